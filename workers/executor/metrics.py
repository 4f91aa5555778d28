"""The Prometheus metrics of an executor.

Keeps true
- Units are seconds and bytes, and the number of labels does not grow with the work.
- Executors export the executor metrics, and lenders export the lender metrics too. Both are exported only while the
  executor's loop runs: an executor that restarts, because the guest or the broker is gone, exports nothing meanwhile.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rose.schemas.arrays import count
from rose.schemas.turns import TurnOutcome
from rose.topics.metrics import register, unregister
from rose.workers.executor.ipc.messages import EngineStatus, ServingStats, TurnFinished

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

EXECUTOR = CollectorRegistry()
"""Metrics that every executor exports while it runs."""

LENDER = CollectorRegistry()
"""Metrics that a lender exports while it runs, from the first status with serving statistics on."""

_counter, _gauge = partial(Counter, registry=EXECUTOR), partial(Gauge, registry=EXECUTOR)
_histogram = partial(Histogram, buckets=SECONDS, registry=EXECUTOR)
_lender_counter, _lender_gauge = partial(Counter, registry=LENDER), partial(Gauge, registry=LENDER)

TURNS = _counter("rose_executor_turns_total", "Turns answered or dropped, by outcome.", ["outcome"])
TOKENS = _counter("rose_executor_tokens_total", "Tokens of finished turns, by kind.", ["kind"])
STEPS = _counter("rose_executor_steps_total", "Engine steps.")
STEP_SECONDS = _counter("rose_executor_step_seconds_total", "Time that engine steps took.")
TURN_SECONDS = _histogram("rose_executor_turn_seconds", "Time of a turn from the inbox to its last token.")
SWAP_SECONDS = _histogram("rose_executor_swap_seconds", "Pause of the engine to activate a policy version.")
CONTEXTS = _counter(
    "rose_executor_contexts_total",
    "Contexts of turns: carried by the dispatch, kept from the turn before, read back from the log, or torn.",
    ["found"],
)
READ_BACK_SECONDS = _histogram(
    "rose_executor_context_read_back_seconds",
    "Time to read a context back from the log, from the dispatch to its last token.",
)
HELD_TURNS = _gauge("rose_executor_held_turns", "Turns held, without an answer so far.")
KV_CAPACITY_BYTES = _gauge(
    "rose_executor_kv_capacity_bytes", "KV cache that turns may hold; for a lender, at this moment."
)
KV_FREE_BYTES = _gauge("rose_executor_kv_free_bytes", "Free part of the KV cache that turns may hold.")
POLICY_VERSION = _gauge("rose_executor_policy_version", "Policy version that serves; -1 before one is proven.")
SWAPS_REFUSED = _counter("rose_executor_swaps_refused_total", "Staged versions that the engine refused.")
LENT_BYTES = _lender_gauge("rose_lender_budget_bytes", "KV memory that rollout turns may hold.")
FROZEN = _lender_gauge("rose_lender_frozen", "Whether the KV budget was cut and does not grow.")
CUTS = _lender_counter("rose_lender_cuts_total", "Times that serving took KV memory back from rollouts.")
CUT_SECONDS = _lender_counter("rose_lender_cut_seconds_total", "Time that cuts took between two steps of serving.")
PREEMPTED = _lender_counter("rose_lender_preempted_total", "Turns preempted for lack of KV memory.")
LOOKS = _lender_counter("rose_lender_looks_total", "Times that the KV memory was divided again.")
LOOK_SECONDS = _lender_counter("rose_lender_look_seconds_total", "Time to divide the KV memory, cuts included.")
SERVING_REQUESTS = _lender_gauge(
    "rose_lender_serving_requests", "Requests of serving, by state; NaN without a guest.", ["state"]
)
HEADROOM_SECONDS = _lender_gauge(
    "rose_lender_headroom_seconds",
    "Least slack of serving at the last check, by kind of step; NaN if nothing waits or no guest needs it.",
    ["kind"],
)
GUEST_PIECE_SECONDS = _histogram(
    "rose_lender_guest_piece_seconds",
    "Longest guest piece between two checks for new requests, since the report before.",
    registry=LENDER,
)
PREDICTION_ERROR = _lender_gauge(
    "rose_lender_prediction_error_ratio",
    "Error of step predictions, relative to the prediction: the 90th percentile, by tenant.",
    ["step"],
)
HELD_BACK = _lender_counter(
    "rose_lender_held_back_total", "Times that a guest with work was not allowed to compute, by reason.", ["why"]
)

for _outcome in (*TurnOutcome, "dropped_claim", "dropped_incarnation", "dropped_duplicate", "dropped_withdrawn"):
    TURNS.labels(_outcome if isinstance(_outcome, str) else _outcome.value)
for _kind in ("sampled", "cached"):
    TOKENS.labels(_kind)
for _why in ("waiting", "occupancy", "prefill", "decode"):
    HELD_BACK.labels(_why)
POLICY_VERSION.set(-1)


@contextmanager
def exported() -> Iterator[None]:
    """Export the metrics while an executor runs. Counters continue from earlier runs in the process."""
    register(EXECUTOR)
    try:
        yield
    finally:
        unregister(EXECUTOR)
        unregister(LENDER)
        POLICY_VERSION.set(-1)
        for gauge in (HELD_TURNS, KV_CAPACITY_BYTES, KV_FREE_BYTES):
            gauge.set(0)
        _set_suspended()


def count_finished(outcome: TurnOutcome, finished: TurnFinished, *, received_at: float) -> None:
    """Count a turn that the engine has finished. `received_at`: unix seconds, when the turn came to the inbox."""
    TURNS.labels(outcome.value).inc()
    TOKENS.labels("sampled").inc(count(finished.turn.sampled.tokens))
    TOKENS.labels("cached").inc(finished.turn.cached_tokens)
    TURN_SECONDS.observe(finished.turn.times.finished_at - received_at)


def show_held(status: EngineStatus, *, turns: int, version: int) -> None:
    """Set the gauges of held turns, KV memory and policy version. `version`: -1 before a version serves."""
    HELD_TURNS.set(turns)
    KV_CAPACITY_BYTES.set(status.kv_bytes_total)
    KV_FREE_BYTES.set(status.kv_bytes_free)
    POLICY_VERSION.set(version)


def show_steps(status: EngineStatus) -> None:
    """Count the engine's steps since the status before; for a guest, update the metrics of serving too."""
    STEPS.inc(status.steps)
    STEP_SECONDS.inc(status.step_seconds)
    if status.serving is not None:
        show_serving(status.serving)


def show_serving(stats: ServingStats) -> None:
    """Update the metrics of serving from a status of the guest's host."""
    register(LENDER)
    SERVING_REQUESTS.labels("running").set(stats.running)
    SERVING_REQUESTS.labels("waiting").set(stats.waiting)
    for kind, headroom in (("prefill", stats.prefill_headroom), ("decode", stats.decode_headroom)):
        HEADROOM_SECONDS.labels(kind).set(math.nan if headroom is None else headroom)
    if stats.longest_seconds:  # statuses without guest work would hide the few long pieces
        GUEST_PIECE_SECONDS.observe(stats.longest_seconds)
    for step in ("guest", "prefill", "decode"):
        PREDICTION_ERROR.labels(step).set(getattr(stats, f"{step}_error"))
    for why, times in stats.held_back.items():
        HELD_BACK.labels(why).inc(times)


def show_lending(status: EngineStatus) -> None:
    """Update the metrics of lent memory, if the status has lending statistics. Call it once for each status.

    Of a suspended engine, set the budget to 0 and the metrics of serving to NaN.
    """
    if (stats := status.lending) is not None:
        register(LENDER)
        LENT_BYTES.set(stats.budget_bytes)
        FROZEN.set(stats.frozen)
        CUTS.inc(stats.cuts)
        CUT_SECONDS.inc(stats.cut_seconds)
        PREEMPTED.inc(stats.preempted)
        LOOKS.inc(stats.looks)
        LOOK_SECONDS.inc(stats.look_seconds)
    if status.suspended_reason:
        register(LENDER)
        _set_suspended()


def _set_suspended() -> None:
    LENT_BYTES.set(0)
    FROZEN.set(False)
    for state in ("running", "waiting"):
        SERVING_REQUESTS.labels(state).set(math.nan)
    for kind in ("prefill", "decode"):
        HEADROOM_SECONDS.labels(kind).set(math.nan)
