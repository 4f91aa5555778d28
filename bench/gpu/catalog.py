"""The checks in the order in which they run: quick checks with much influence on the design come first."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One check."""

    function: str
    """MODULE:FUNCTION; the docstring of the function names the decision that depends on the check."""
    limit: float
    """Seconds after which the check's process is ended."""


CHECKS = {
    "A": Entry("bench.gpu.process_state:stale_reads", 40),
    "B": Entry("bench.gpu.process_state:madvise_device", 30),
    "L": Entry("bench.gpu.process_state:random_states", 30),
    "D": Entry("bench.gpu.weights:inplace_delta", 75),
    "E": Entry("bench.gpu.steps:yield_times", 110),
    "C": Entry("bench.gpu.weights:slab_copies", 90),
    "G": Entry("bench.gpu.sharing:serving_beside_guest", 130),
    "F": Entry("bench.gpu.codec:collect_changes", 90),
    "H": Entry("bench.gpu.memory:guest_pool", 60),
    "I": Entry("bench.gpu.memory:virtual_memory", 40),
    "J": Entry("bench.gpu.compiling:triton_compile", 90),
    "K": Entry("bench.gpu.process_state:sticky_error", 60),
    "M": Entry("bench.gpu.lending:guest_beside_server", 400),
}
