"""Measures what lending costs serving: latency, throughput and prefix hits of a vLLM server, alone and with rollouts.

    python -m bench.coserve --trace AzureLLMInferenceTrace_code.csv
    python -m bench.coserve --trace mooncake_synthetic_trace.jsonl --prompt-divisor 64 --first 3200
    python -m bench.coserve --trace square:15,1,90

A slice of the trace (`--first`, `--requests`) is compressed in length (`--prompt-divisor`, `--output-divisor`) and in
time. The pace is the one at which serving alone is busy for about 25 % of the time; it is measured unless `--pace` is
given. Then every arm (bench.coserving.arms) has a window with the same slice, `--repeats` times in rotated order.
Clients in their own processes stream from an unmodified vLLM server over HTTP, and send each request at its time,
independent of earlier requests. A window with late clients is discarded, reported and repeated. Figures are medians
over windows, with the range. Ratios are relative to serving alone; a ratio whose distance from 1 is no larger than that
of the arm `again` is `unresolved`. Unless given, the budgets for time to first token and time per output token are 5
times the unloaded median. `--json FILE` writes one object with `checks` and all figures; `-` is standard output.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.check import keep, options, say
from bench.coserving.arms import ARMS, SWEEP, TRAJECTORIES, Arm, Guest
from bench.coserving.curve import draw
from bench.coserving.figures import latency
from bench.coserving.pace import first_guess, search, unloaded
from bench.coserving.report import show
from bench.coserving.results import checks, published_ratios, standings, worst
from bench.coserving.server import LENT, LONGEST_TOKENS, SERVED, VOCABULARY, Launch, Server, lending, make_model, serve
from bench.coserving.square import SQUARE, read_arrivals
from bench.coserving.windows import Budgets, Window, busy, figures, run_window
from bench.percentiles import percentile
from rose.schemas.errors import RoseError
from rose.workers.loadgen.requests import StreamedCompletion
from rose.workers.loadgen.traces import TraceScaling, TraceWindow, scale_requests

TRIES = 3
"""Most attempts of an arm in a round until a window counts."""

BUDGET = 5.0
"""Budget as a multiple of the unloaded median."""

MOST_LATE = 0.01
"""Seconds by which clients may be late, at p99."""


def in_rotation(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Return the order of a round.

    Each round begins with another arm, and every second round runs in reverse, so that the effects of an arm do not
    always reach the same arm.
    """
    step = -1 if number % 2 else 1
    return [arms[(number + step * place) % len(arms)] for place in range(len(arms))]


def run_rounds(
    arms: Sequence[Arm], repeats: int, run: Callable[[Arm, int], Window], tell: Callable[[str], None]
) -> list[Window]:
    """Return all windows of a run, including the discarded windows."""
    windows = []
    for number in range(repeats):
        for arm in in_rotation(arms, number):
            for _ in range(TRIES):
                window = run(arm, number)
                windows.append(window)
                if not window.thrown:
                    break
                tell(f"round {number}, {arm.name}: discarded, {window.thrown}")
    return windows


def budgets(answers: Sequence[StreamedCompletion], ttft: float | None, tpot: float | None) -> Budgets:
    """Return the given budgets, in milliseconds; missing budgets follow from the unloaded medians."""
    waits = [latency(each.due, each.moments, each.counts) for each in answers]
    unloaded_ttft = percentile([wait.ttft for wait in waits], 50)
    unloaded_tpot = percentile([wait.tpot for wait in waits if wait.tpot is not None], 50)
    return Budgets(
        ttft=BUDGET * unloaded_ttft if ttft is None else ttft / 1000,
        tpot=BUDGET * unloaded_tpot if tpot is None else tpot / 1000,
    )


def paced(
    server: Server, work: TraceWindow, answers: Sequence[StreamedCompletion], given: float | None
) -> tuple[float, TraceWindow]:
    """Return the pace of the run, and the slice of the trace at this pace. Raises RoseError."""
    alone = Arm("finding the pace")
    most_late = float("inf")  # the busy share depends on the number of requests, not on milliseconds

    def busy_at(pace: float) -> float:
        share = busy(run_window(alone, server, work.at_pace(pace), number=0, most_late=most_late))
        say(f"at {pace:.3g} times the trace's pace serving alone is busy {share:.0%} of the time")
        return share

    pace = search(busy_at, first_guess(answers, work)) if given is None else given
    return pace, work.at_pace(pace)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the whole benchmark, and return the object that --json writes. Raises RoseError."""
    known = (*ARMS, *SWEEP) if arguments.sweep else ARMS
    arms = [arm for arm in known if not arguments.arm or arm.name in arguments.arm]
    shape = TraceScaling(
        prompt_divisor=arguments.prompt_divisor,
        output_divisor=arguments.output_divisor,
        longest=LONGEST_TOKENS,
        vocabulary=VOCABULARY,
    )
    work = scale_requests(read_arrivals(arguments.trace, first=arguments.first, count=arguments.requests), shape)
    with ExitStack() as stack:
        model, lent = make_model(folder / "model", SERVED), make_model(folder / "lent", LENT)
        plain = stack.enter_context(serve(Launch(), model, folder / "server-0.log"))
        answers = unloaded(plain, work)
        promised = budgets(answers, arguments.ttft, arguments.tpot)
        pace, work = paced(plain, work, answers, arguments.pace)
        servers: dict[Launch, Server] = {Launch(): plain}
        for launch in dict.fromkeys(arm.launch for arm in arms if arm.launch != Launch()):
            name, lends = f"server-{len(servers)}", None
            if launch.lends is not None:
                socket = folder / f"{name}.sock"
                lends = lending(launch.lends, lent, socket, ttft=promised.ttft, tpot=promised.tpot)
            servers[launch] = stack.enter_context(serve(launch, model, folder / f"{name}.log", lends))

        def run(arm: Arm, number: int) -> Window:
            say(f"round {number}: {arm.name}, {work.seconds:.0f} s")
            return run_window(arm, servers[arm.launch], work, number=number, most_late=MOST_LATE)

        for launch, server in servers.items():  # a server's first window is slow, and its guest is built then
            guests = Guest(TRAJECTORIES) if server.lends_at else None
            run(Arm("warming up", launch=launch, guests=guests), -1)
        windows = run_rounds(arms, arguments.repeats, run, say)
    return result(arguments, arms, windows, promised) | {
        "pace": pace,
        "window_seconds": work.seconds,
        "requests_cut_short": work.truncated,
    }


def result(
    arguments: argparse.Namespace, arms: Sequence[Arm], windows: Sequence[Window], promised: Budgets
) -> dict[str, Any]:
    """Summarise the windows of a run."""
    found = standings(arms, windows, promised)
    return {
        "cores": os.cpu_count(),
        "asked": vars(arguments),
        "budgets_ms": {"ttft": 1000 * promised.ttft, "tpot": 1000 * promised.tpot},
        "checks": checks(arms, found),
        "arms": found,
        "peers": published_ratios() if arguments.trace.startswith(SQUARE) else {},
        "worst": worst(windows),
        "windows": [
            {
                "arm": each.arm,
                "round": each.round,
                "thrown": each.thrown,
                "server": each.server,
                **figures(each, promised),
            }
            for each in windows
        ],
    }


def number(kind: Callable[[str], float], above: float) -> Callable[[str], float]:
    """Return an argument type: a number above a bound."""

    def parse(text: str) -> float:
        value = kind(text)
        if not above < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above {above:g}")
        return value

    parse.__name__ = kind.__name__
    return parse


def arguments_of(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = options(__doc__)
    parser.add_argument(
        "--trace", required=True, metavar="FILE", help="Azure CSV, Mooncake JSONL, or square:HIGH,LOW,SECONDS"
    )
    parser.add_argument(
        "--arm", action="append", choices=[arm.name for arm in (*ARMS, *SWEEP)], help="run this arm; repeatable"
    )
    parser.add_argument("--sweep", action="store_true", help="also run the guest at other dials")
    parser.add_argument(
        "--plot", metavar="FILE", help="write a plot of guest tokens over the stretch of latencies, as HTML"
    )
    parser.add_argument("--repeats", type=number(int, 0), default=5, help="windows of each arm")
    parser.add_argument("--requests", type=number(int, 0), default=400, help="requests of a window")
    parser.add_argument("--first", type=number(int, -1), default=0, help="first row of the trace in a window")
    parser.add_argument(
        "--prompt-divisor", type=number(int, 0), default=16, help="divisor of the trace's prompt lengths"
    )
    parser.add_argument(
        "--output-divisor", type=number(int, 0), default=2, help="divisor of the trace's answer lengths"
    )
    parser.add_argument(
        "--pace", type=number(float, 0), help="seconds of the trace in each second; measured if not given"
    )
    parser.add_argument("--ttft", type=number(float, 0), metavar="MS", help="budget for the time to first token")
    parser.add_argument("--tpot", type=number(float, 0), metavar="MS", help="budget for the mean time between tokens")
    return parser.parse_args(line)


def main() -> None:
    arguments = arguments_of()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops servers and clients at exit
    try:
        with tempfile.TemporaryDirectory(prefix="coserve-") as folder:
            measured = measure(arguments, Path(folder))
    except RoseError as error:
        sys.exit(str(error))
    on_stdout = keep(measured, arguments.json)
    if arguments.plot:
        draw(measured["arms"], Path(arguments.plot))
    if not on_stdout:
        pace, seconds = measured["pace"], measured["window_seconds"]
        print(f"{arguments.trace} at {pace:.3g} times its pace: {arguments.requests} requests in {seconds:.0f} s")
        show(measured["arms"], measured["peers"], measured["checks"], measured["worst"])


if __name__ == "__main__":
    main()
