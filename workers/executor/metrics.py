"""What an executor exports to Prometheus. Keeps true: seconds and bytes, and no label that grows with the work."""

from prometheus_client import Counter, Gauge, Histogram

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
