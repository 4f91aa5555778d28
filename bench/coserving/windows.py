"""One window: the users' requests from first to last, the guests at the same time, and the results of both.

Keeps true
- Users begin when the guests have settled; guests are counted from the window's beginning to its last arrival.
- Serving is measured by the clients' clocks and by the server's report on each request, never by a counter that mixes
  users and rollouts.
- A window with a late client or a foreign request has a reason in `thrown` and does not count.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.coserving.arms import Arm
from bench.coserving.clients import REQUEST_SECONDS, RolloutResult, UserResult, UserTask
from bench.coserving.figures import attainment, covered, engine_seconds, latency, outside_seconds
from bench.coserving.processes import Client
from bench.coserving.server import MODEL_NAME, Server
from bench.percentiles import percentile
from rose.workers.loadgen.requests import StreamedCompletion
from rose.workers.loadgen.traces import TraceWindow

SETTLE_SECONDS = 2.0
"""Time that guests run before users begin."""

LEAD_SECONDS = 0.2
"""Time from the message to the clients to the beginning of a window."""

CLIENTS = 2
"""Number of processes that share the users of a window."""

GUESTS_ALONE_SECONDS = 20.0
"""Longest window without users."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """The latency targets, in seconds."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Window:
    """The measurements of one window."""

    arm: str
    round: int
    start: float
    """Start on time.monotonic(), as all times."""
    seconds: float
    """Seconds to the last arrival."""
    answers: Sequence[StreamedCompletion]
    """Answers in the order in which the requests were due."""
    ticks: Sequence[float]
    """Delay of the clients' timers in seconds, for each tick."""
    rolled: RolloutResult
    server: Mapping[str, float]
    """Increase of the server's counters, which count users and rollouts together if both use the server."""
    thrown: str = ""
    """Reason why the window does not count; empty if it counts."""


def run_window(arm: Arm, server: Server, work: TraceWindow, *, number: int, most_late: float) -> Window:
    """Run one window. `most_late`: p99 bound of the clients' lateness in seconds. Raises RoseError."""
    rolled = RolloutResult([], [], [])
    with ExitStack() as stack:
        salt = f"window-{time.monotonic()}"
        users = [_user(stack, server, part, salt) for part in (_dealt(work) if arm.users else [])]
        if arm.guests is not None:
            rolled = stack.enter_context(arm.guests.run_with(server))
            time.sleep(SETTLE_SECONDS)  # the start of the guests is not counted
        before = server.counters()
        start = time.monotonic() + LEAD_SECONDS
        for user in users:
            user.say(repr(start).encode())
        seconds = work.seconds if arm.users else min(work.seconds, GUESTS_ALONE_SECONDS)
        used = [user.result(UserResult, seconds=seconds + REQUEST_SECONDS + LEAD_SECONDS) for user in users]
        time.sleep(max(0.0, start + seconds - time.monotonic()))  # a window without users ends by time
        after = server.counters()
    answers = sorted((answer for each in used for answer in each.answers), key=lambda answer: answer.due)
    ticks = [behind for each in used for behind in each.ticks]
    counters = {name: value - before[name] for name, value in after.items()}
    window = Window(arm.name, number, start, seconds, answers, ticks, rolled, counters)
    return replace(window, thrown=flaw(window, guests=arm.guests is not None, most_late=most_late))


def _dealt(work: TraceWindow) -> list[TraceWindow]:
    return [TraceWindow(work.requests[first::CLIENTS], 0) for first in range(CLIENTS)]


def _user(stack: ExitStack, server: Server, part: TraceWindow, salt: str) -> Client:
    user = stack.enter_context(Client("users", UserTask(server.url, MODEL_NAME, salt, part.requests)))
    user.wait_until_ready()
    return user


def flaw(window: Window, *, guests: bool, most_late: float) -> str:
    """Return the reason why a window does not count; empty if it counts."""
    return _too_late(window, most_late) or (_guests_failed(window) if guests else _not_alone(window))


def _too_late(window: Window, most: float) -> str:
    worst = late(window)
    if worst <= most:
        return ""
    return f"one in a hundred times its clients were {1000 * worst:.1f} ms late or more; {1000 * most:g} ms is borne"


def _guests_failed(window: Window) -> str:
    return f"a rollout failed: {window.rolled.errors[0]}" if window.rolled.errors else ""


def _not_alone(window: Window) -> str:
    tokens, made = sum(answer.tokens for answer in window.answers), window.server["vllm:generation_tokens"]
    if tokens == made or any(answer.error for answer in window.answers):
        return ""
    return f"the server made {made:.0f} tokens, its clients got {tokens}: another client used it"


def late(window: Window) -> float:
    """Return the p99 lateness of requests or timer in seconds; 0 without users."""
    behind = ([answer.sent - answer.due for answer in window.answers], window.ticks)
    return max((percentile(values, 99) for values in behind if values), default=0.0)


def figures(window: Window, budgets: Budgets) -> dict[str, float]:
    """Return the figures of a window: latencies in milliseconds, NaN without requests."""
    answered = [answer for answer in window.answers if not answer.error]
    failed = len(window.answers) - len(answered)
    latencies = [latency(answer.due, answer.moments, answer.counts) for answer in answered]
    waits = {
        "ttft": [each.ttft for each in latencies],
        "tpot": [each.tpot for each in latencies if each.tpot is not None],
        "gap": [later - one for each in answered for one, later in pairwise(each.moments)],
        "outside": [outside_seconds(answer) for answer in answered],
        "queue": [answer.queue_seconds for answer in answered],
        "waited": [outside_seconds(answer) + answer.queue_seconds for answer in answered],
    }
    end = max([window.start + window.seconds, *(answer.moments[-1] for answer in answered)])
    prompt = sum(answer.prompt_tokens for answer in answered)
    has_users, rolled = bool(window.answers), window.rolled
    return {
        "requests": len(window.answers),
        "failed": failed,
        **{
            f"{name}_p{percent}_ms": 1000 * percentile(values, percent)
            for name, values in waits.items()
            for percent in (50, 99)
        },
        "ttft_attainment": attainment(waits["ttft"], budgets.ttft, failed=failed) if has_users else math.nan,
        "tpot_attainment": attainment(waits["tpot"], budgets.tpot, failed=failed) if has_users else math.nan,
        "serving_tokens_per_second": sum(answer.tokens for answer in answered) / (end - window.start),
        "guest_step_ms": 1000 * rolled.step_seconds / rolled.steps if rolled.steps else math.nan,
        "guest_longest_ms": 1000 * max(rolled.longest_seconds, default=math.nan),
        "guest_computed_ms": 1000 * max(rolled.computed_seconds, default=math.nan),
        "guest_tokens_per_second": guest_tokens(window) / window.seconds,
        "busy": busy(window),
        "prefix_hit_rate": sum(answer.cached_tokens for answer in answered) / prompt if prompt else math.nan,
        "preemptions": window.server["vllm:num_preemptions"],
        "late_p99_ms": 1000 * late(window),
    }


def busy(window: Window) -> float:
    """Return the share of the window in which the engine held a request of serving, waiting or running.

    The share uses the server's own durations, each of which ends at the last token: time in HTTP is not included.
    """
    held = [(each.moments[-1] - engine_seconds(each), each.moments[-1]) for each in window.answers if each.moments]
    return covered(held, window.start, window.start + window.seconds)


def guest_tokens(window: Window) -> int:
    """Return the tokens that guests sampled from the window's beginning to its last arrival."""
    end = window.start + window.seconds
    pairs = zip(window.rolled.moments, window.rolled.counts, strict=True)
    return sum(count for moment, count in pairs if window.start <= moment < end)
