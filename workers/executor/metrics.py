"""What an executor exports to Prometheus. Keeps true: seconds and bytes, and no label that grows with the work."""

import math

from prometheus_client import Counter, Gauge, Histogram

from workers.executor.words import Lent, Slack

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

TURNS = Counter("rose_executor_turns_total", "Turns answered or dropped", ["outcome"])
TOKENS = Counter("rose_executor_tokens_total", "Tokens of finished turns", ["kind"])
STEPS = Counter("rose_executor_steps_total", "Engine steps")
STEP_SECONDS = Counter("rose_executor_step_seconds_total", "That engine steps took")
TURN_SECONDS = Histogram("rose_executor_turn_seconds", "From the inbox to the last token", buckets=SECONDS)
SWAP_SECONDS = Histogram("rose_executor_swap_seconds", "The engine's pause for a policy version", buckets=SECONDS)
HELD_TURNS = Gauge("rose_executor_held_turns", "Turns taken on and not answered")
KV_FREE_BYTES = Gauge("rose_executor_kv_free_bytes", "Free KV cache")
POLICY_VERSION = Gauge("rose_executor_policy_version", "The version that serves; -1 before one is proven")
SWAPS_REFUSED = Counter("rose_executor_swaps_refused_total", "Staged versions that the engine refused")
LENT_BYTES = Gauge("rose_lender_budget_bytes", "KV memory that rollout turns may hold")
FROZEN = Gauge("rose_lender_frozen", "1 while it was cut and grows no more")
CUTS = Counter("rose_lender_cuts_total", "Times that serving took KV memory back")
CUT_SECONDS = Counter("rose_lender_cut_seconds_total", "That cuts took between two steps of serving")
PREEMPTED = Counter("rose_lender_preempted_total", "Turns given up for want of KV memory")
LOOKS = Counter("rose_lender_looks_total", "Times that the KV memory was shared out anew")
LOOK_SECONDS = Counter("rose_lender_look_seconds_total", "That those took, cuts among them")
SERVING_REQUESTS = Gauge(
    "rose_lender_serving_requests", "Requests of serving beside the guest; NaN where there is none", ["state"]
)
HEADROOM_SECONDS = Gauge(
    "rose_lender_headroom_seconds",
    "Least slack when serving was last looked at; NaN where nothing waits for it",
    ["kind"],
)
GUEST_PIECE_SECONDS = Histogram(
    "rose_lender_guest_piece_seconds", "Longest piece of the guest's work between two reports", buckets=SECONDS
)
PREDICTION_ERROR = Gauge(
    "rose_lender_prediction_error", "Share of its prediction by which one step in ten is wrong, or more", ["step"]
)
HELD_BACK = Counter("rose_lender_held_back_total", "Times that a guest with work might not compute", ["why"])


def show(slack: Slack) -> None:
    """What a guest's host says of serving."""
    SERVING_REQUESTS.labels("running").set(slack.running)
    SERVING_REQUESTS.labels("waiting").set(slack.waiting)
    for kind, headroom in (("prefill", slack.prefill_headroom), ("decode", slack.decode_headroom)):
        HEADROOM_SECONDS.labels(kind).set(math.nan if headroom is None else headroom)
    GUEST_PIECE_SECONDS.observe(slack.longest_seconds)
    for step in ("guest", "prefill", "decode"):
        PREDICTION_ERROR.labels(step).set(getattr(slack, f"{step}_error"))
    for why, times in slack.held_back.items():
        HELD_BACK.labels(why).inc(times)


def show_lent(lent: Lent) -> None:
    """What a guest's host says of memory."""
    LENT_BYTES.set(lent.budget_bytes)
    FROZEN.set(lent.frozen)
    CUTS.inc(lent.cuts)
    CUT_SECONDS.inc(lent.cut_seconds)
    PREEMPTED.inc(lent.preempted)
    LOOKS.inc(lent.looks)
    LOOK_SECONDS.inc(lent.look_seconds)


def show_parked() -> None:
    """There is no guest: it may hold nothing, and its host does not say how serving stands."""
    LENT_BYTES.set(0)
    FROZEN.set(False)
    for state in ("running", "waiting"):
        SERVING_REQUESTS.labels(state).set(math.nan)
    for kind in ("prefill", "decode"):
        HEADROOM_SECONDS.labels(kind).set(math.nan)
