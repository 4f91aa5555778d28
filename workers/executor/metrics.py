"""What an executor exports to Prometheus.

Keeps true
- Seconds and bytes, and no label that grows with the work.
- An executor's figures are exported by an executor alone, a lender's by one that lends, and by either while it looks at
  its engine: one that begins anew, for want of a guest or of the broker, says nothing meanwhile.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rose.schemas.arrays import count
from rose.schemas.turns import TurnOutcome
from rose.topics.metrics import register, unregister
from rose.workers.executor.ipc.messages import EngineStatus, LendingStats, ServingStats, TurnFinished

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

EXECUTOR = CollectorRegistry()
"""What every executor exports while it runs."""

LENDER = CollectorRegistry()
"""What those beside serving export while they run, once they have heard of it."""

TURNS = Counter("rose_executor_turns_total", "Turns answered or dropped, by outcome.", ["outcome"], registry=EXECUTOR)
TOKENS = Counter("rose_executor_tokens_total", "Tokens of finished turns, by kind.", ["kind"], registry=EXECUTOR)
STEPS = Counter("rose_executor_steps_total", "Engine steps.", registry=EXECUTOR)
STEP_SECONDS = Counter("rose_executor_step_seconds_total", "Time that engine steps took.", registry=EXECUTOR)
TURN_SECONDS = Histogram(
    "rose_executor_turn_seconds", "A turn from the inbox to its last token.", buckets=SECONDS, registry=EXECUTOR
)
SWAP_SECONDS = Histogram(
    "rose_executor_swap_seconds", "The engine's pause for a policy version.", buckets=SECONDS, registry=EXECUTOR
)
CONTEXTS = Counter(
    "rose_executor_contexts_total",
    "Contexts of turns: carried by the dispatch, kept from the turn before, read back from the log, or torn.",
    ["found"],
    registry=EXECUTOR,
)
READ_BACK_SECONDS = Histogram(
    "rose_executor_context_read_back_seconds",
    "A context read back from the log, from the dispatch to its last token.",
    buckets=SECONDS,
    registry=EXECUTOR,
)
HELD_TURNS = Gauge("rose_executor_held_turns", "Turns taken on and not answered.", registry=EXECUTOR)
KV_CAPACITY_BYTES = Gauge(
    "rose_executor_kv_capacity_bytes", "KV cache that turns may hold; of a lender, at this moment.", registry=EXECUTOR
)
KV_FREE_BYTES = Gauge("rose_executor_kv_free_bytes", "Of that, what is free.", registry=EXECUTOR)
POLICY_VERSION = Gauge(
    "rose_executor_policy_version", "The version that serves; -1 before one is proven.", registry=EXECUTOR
)
SWAPS_REFUSED = Counter(
    "rose_executor_swaps_refused_total", "Staged versions that the engine refused.", registry=EXECUTOR
)
LENT_BYTES = Gauge("rose_lender_budget_bytes", "KV memory that rollout turns may hold.", registry=LENDER)
FROZEN = Gauge("rose_lender_frozen", "Whether that was cut and grows no more.", registry=LENDER)
CUTS = Counter("rose_lender_cuts_total", "Times that serving took KV memory back.", registry=LENDER)
CUT_SECONDS = Counter(
    "rose_lender_cut_seconds_total", "Time that cuts took between two steps of serving.", registry=LENDER
)
PREEMPTED = Counter("rose_lender_preempted_total", "Turns given up for want of KV memory.", registry=LENDER)
LOOKS = Counter("rose_lender_looks_total", "Times that the KV memory was shared out anew.", registry=LENDER)
LOOK_SECONDS = Counter("rose_lender_look_seconds_total", "Time that those took, cuts among them.", registry=LENDER)
SERVING_REQUESTS = Gauge(
    "rose_lender_serving_requests",
    "Requests of serving beside the guest, by state; NaN where there is no guest.",
    ["state"],
    registry=LENDER,
)
HEADROOM_SECONDS = Gauge(
    "rose_lender_headroom_seconds",
    "Least slack when serving was last looked at, by kind of step; NaN where nothing waits, or no guest wants it.",
    ["kind"],
    registry=LENDER,
)
GUEST_PIECE_SECONDS = Histogram(
    "rose_lender_guest_piece_seconds",
    "Longest piece of the guest's work without a look whether a request has come, between two reports, "
    "where there was any.",
    buckets=SECONDS,
    registry=LENDER,
)
PREDICTION_ERROR = Gauge(
    "rose_lender_prediction_error_ratio",
    "Share of its prediction by which one step in ten is wrong, or more, by whose step.",
    ["step"],
    registry=LENDER,
)
HELD_BACK = Counter(
    "rose_lender_held_back_total", "Times that a guest with work might not compute, by why.", ["why"], registry=LENDER
)

for _outcome in (*TurnOutcome, "dropped_claim", "dropped_incarnation", "dropped_duplicate"):
    TURNS.labels(_outcome if isinstance(_outcome, str) else _outcome.value)
for _kind in ("sampled", "cached"):
    TOKENS.labels(_kind)
for _why in ("waiting", "occupancy", "prefill", "decode"):
    HELD_BACK.labels(_why)
POLICY_VERSION.set(-1)


@contextmanager
def exported() -> Iterator[None]:
    """While an executor runs; what it has counted before it goes on."""
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
    """A turn that the engine has ended. `received_at`: unix seconds, when it came to the inbox."""
    TURNS.labels(outcome.value).inc()
    TOKENS.labels("sampled").inc(count(finished.tokens))
    TOKENS.labels("cached").inc(finished.cached_tokens)
    TURN_SECONDS.observe(finished.finished_at - received_at)


def show_held(status: EngineStatus, *, turns: int, version: int) -> None:
    """What it holds, and the version that serves; -1 before one is proven."""
    HELD_TURNS.set(turns)
    KV_CAPACITY_BYTES.set(status.kv_bytes_total)
    KV_FREE_BYTES.set(status.kv_bytes_free)
    POLICY_VERSION.set(version)


def show_steps(status: EngineStatus) -> None:
    """What the engine did since the tick before; of a guest, how serving stands."""
    STEPS.inc(status.steps)
    STEP_SECONDS.inc(status.step_seconds)
    if status.serving is not None:
        show_serving(status.serving)


def show_serving(stats: ServingStats) -> None:
    """What a guest's host says of serving."""
    register(LENDER)
    SERVING_REQUESTS.labels("running").set(stats.running)
    SERVING_REQUESTS.labels("waiting").set(stats.waiting)
    for kind, headroom in (("prefill", stats.prefill_headroom), ("decode", stats.decode_headroom)):
        HEADROOM_SECONDS.labels(kind).set(math.nan if headroom is None else headroom)
    if stats.longest_seconds:  # reports without any would hide the long ones among the many
        GUEST_PIECE_SECONDS.observe(stats.longest_seconds)
    for step in ("guest", "prefill", "decode"):
        PREDICTION_ERROR.labels(step).set(getattr(stats, f"{step}_error"))
    for why, times in stats.held_back.items():
        HELD_BACK.labels(why).inc(times)


def show_lending(status: EngineStatus) -> None:
    """What a guest's host says of memory, if anything. Where there is no guest it may hold nothing, and its host does
    not say how serving stands.
    """
    if status.lending is not None:
        _show_memory(status.lending)
    if status.suspended_reason:
        register(LENDER)
        _set_suspended()


def _show_memory(stats: LendingStats) -> None:
    register(LENDER)
    LENT_BYTES.set(stats.budget_bytes)
    FROZEN.set(stats.frozen)
    CUTS.inc(stats.cuts)
    CUT_SECONDS.inc(stats.cut_seconds)
    PREEMPTED.inc(stats.preempted)
    LOOKS.inc(stats.looks)
    LOOK_SECONDS.inc(stats.look_seconds)


def _set_suspended() -> None:
    LENT_BYTES.set(0)
    FROZEN.set(False)
    for state in ("running", "waiting"):
        SERVING_REQUESTS.labels(state).set(math.nan)
    for kind in ("prefill", "decode"):
        HEADROOM_SECONDS.labels(kind).set(math.nan)
