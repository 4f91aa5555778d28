"""vLLM's worker of one rank of an engine, by `ranks.WORKER_CLASS`. Runs in the rank's process, and only there.

Keeps true
- A rank's process ends with the engine's process, also while it is stopped or computes.
- A rank that fails ends, and leaves its error to the executor. vLLM reads the answer of rank 0 only: another rank that
  failed and went on would sample other tokens than rank 0 from then on, or rank 0 would wait for the rank for ever.
- Signals that ask a role to stop are ignored, as in the engine's process.
"""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from rose.schemas.errors import describe_error
from rose.topics.processes import die_with_parent
from rose.workers.executor.ipc.rank_failures import record_failure
from rose.workers.executor.vllm.engine_core import hide_llvmlite
from rose.workers.executor.vllm.ranks import Answer, RankPolicy, answer_to
from rose.workers.executor.vllm.weights import keep_unpacked_weights

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

SHARED_MEMORY = re.compile(r"(/dev/shm/[^\n]+?)(?: \(deleted\))?\n")
"""A mapped file of shared memory in /proc/self/maps."""


def _ends_the_rank(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error of the method end this process."""

    @wraps(method)
    def call(self: "RankWorker", *arguments: Any, **settings: Any) -> Any:
        try:
            return method(self, *arguments, **settings)
        except Exception as error:  # noqa: BLE001  the executor reports the error
            record_failure(os.getppid(), self.rank, describe_error(error))
            os._exit(1)

    return call


class RankWorker(PlatformWorker):  # type: ignore[misc]
    """vLLM's worker, whose weights are replaced between two steps."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        engine = multiprocessing.parent_process()
        assert engine is not None and engine.pid is not None
        die_with_parent(engine.pid, signal.SIGKILL)()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._policy: RankPolicy | None = None
        super().__init__(*arguments, **settings)

    determine_available_memory = _ends_the_rank(PlatformWorker.determine_available_memory)
    initialize_from_config = _ends_the_rank(PlatformWorker.initialize_from_config)
    compile_or_warm_up_model = _ends_the_rank(PlatformWorker.compile_or_warm_up_model)
    execute_model = _ends_the_rank(PlatformWorker.execute_model)
    sample_tokens = _ends_the_rank(PlatformWorker.sample_tokens)

    @_ends_the_rank
    def init_device(self) -> None:
        """Initialize the device, and the memory that the ranks of a CPU share."""
        super().init_device()
        _unlink_shared_memory(os.environ.get("VLLM_DIST_IDENT", "/"))

    @_ends_the_rank
    def load_model(self, **settings: Any) -> None:
        """Load this rank's shard of the model."""
        with keep_unpacked_weights(), hide_llvmlite():
            super().load_model(**settings)

    def call(self, name: str, *arguments: Any) -> Answer:
        """Call `patch_model` or a method of `RankPolicy`. See `answer_to`."""
        return answer_to(self.patch_model if name == "patch_model" else getattr(self._policy, name), *arguments)

    def patch_model(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        """Prepare the loaded model for changes of its weights."""
        _unlink_shared_memory("")
        self._policy = RankPolicy(self, folder, shapes)


def _unlink_shared_memory(beginning: str) -> None:
    """Remove names of shared memory that this process has mapped, which a process that is killed would leave behind.

    Call it when all processes have mapped the memory, which is freed with the last of them.
    """
    for name in set(SHARED_MEMORY.findall(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))):
        if Path(name).name.startswith(beginning):
            Path(name).unlink(missing_ok=True)
