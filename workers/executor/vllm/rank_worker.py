"""vLLM's worker of one rank of an engine, by `ranks.WORKER_CLASS`. Runs in the rank's process, and only there.

Keeps true
- A rank's process ends with the engine's process, also while it is stopped or computes.
- Signals that ask a role to stop are ignored, as in the engine's process.
"""

import os
import signal
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from rose.topics.processes import die_with_parent
from rose.workers.executor.vllm.engine_core import hide_llvmlite
from rose.workers.executor.vllm.ranks import RankPolicy, answer_to
from rose.workers.executor.vllm.weights import keep_unpacked_weights

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class RankWorker(PlatformWorker):  # type: ignore[misc]
    """vLLM's worker, whose weights are replaced between two steps."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        die_with_parent(os.getppid(), signal.SIGKILL)()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self._policy: RankPolicy | None = None
        super().__init__(*arguments, **settings)

    def load_model(self, **settings: Any) -> None:
        """Load this rank's shard of the model."""
        with keep_unpacked_weights(), hide_llvmlite():
            super().load_model(**settings)

    def call(self, name: str, *arguments: Any) -> tuple[bool, Any]:
        """Call `patch_model` or a method of `RankPolicy`. See `answer_to`."""
        return answer_to(self.patch_model if name == "patch_model" else getattr(self._policy, name), *arguments)

    def patch_model(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        """Prepare the loaded model for changes of its weights."""
        _unlink_shared_memory()
        self._policy = RankPolicy(self, folder, shapes)


def _unlink_shared_memory() -> None:
    """Remove the names of the memory that the ranks of a CPU share, as a rank that is killed leaves them behind.

    All ranks have mapped the memory, which is freed with the last of them.
    """
    if current_platform.is_cpu():
        for file in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):
            file.unlink(missing_ok=True)
