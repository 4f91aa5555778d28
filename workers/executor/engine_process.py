"""The engine of a dedicated executor, in its own process.

Keeps true
- The engine process lives no longer than its parent, however the parent ends. The parent learns at once when the
  engine process is gone.
- The engine process is forked before its parent has a client of a broker, and uses no broker: a fork does not copy
  librdkafka's threads.
- Signals that ask a role to stop are ignored in the engine process; the parent handles them.
- Temporary files of the engine process and of its ranks are in a folder that the parent removes.
"""

import os
import select
import shutil
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from rose.schemas.errors import RoseError, UsageError
from rose.topics.processes import children_of, die_with_parent, have_exited, send_signal, set_process_name
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.executor.ipc.messages import EngineFailed, MessageSender
from rose.workers.executor.ipc.rank_failures import recorded_failures
from rose.workers.executor.ipc.shared_memory import ChannelFds, RingBuffer
from rose.workers.model_config import check_context_length
from rose.workers.weights.model_folder import check_folder

RANKS_END_SECONDS = 10.0
"""Most time to wait for the end of ranks that were killed: a device frees memory first."""


class EngineProcess:
    """A process that builds an engine and runs turns. As a context manager it ends the process."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Fork the engine process and return at once. Call it before this process has a client of a broker.

        Raises FolderError or ConfigRefused.
        """
        self.shapes, _ = check_folder(config.model_folder)
        check_context_length(config.model_folder, config.max_model_len)
        channel, parent = ChannelFds.create(), os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="rose-engine-"))
        end = die_with_parent(parent, signal.SIGKILL)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            end()
            _child_main(config, channel, self._folder)
        self._liveness_fd = os.pidfd_open(self.pid)
        failures = partial(recorded_failures, self._folder, self.pid)
        self.client = EngineClient(channel, self._liveness_fd, failures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Kill the process and its ranks, and remove their files. Nothing else is left behind.

        Python's resource tracker, another child, removes names of shared memory and ends by itself.
        """
        ranks = _open_ranks(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._liveness_fd)
        send_signal(ranks, signal.SIGKILL)
        have_exited(ranks, RANKS_END_SECONDS)
        for rank in ranks:
            os.close(rank)
        shutil.rmtree(self._folder, ignore_errors=True)


def _open_ranks(engine: int) -> list[int]:
    """Return pidfds of the ranks of an engine process."""
    ranks = []
    for child in children_of(engine):
        with suppress(OSError):  # the child has just ended
            if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():
                ranks.append(os.pidfd_open(child))
    return ranks


def _child_main(config: ExecutorConfig, channel: ChannelFds, folder: Path) -> NoReturn:
    """Run the program of the engine process. `folder`: for temporary files."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        set_process_name(f"engine-{config.short_name}")
        run_engine(config, channel)
    except RoseError as error:
        MessageSender(RingBuffer(channel.reports)).send(EngineFailed(str(error), isinstance(error, UsageError)))
    except Exception:  # noqa: BLE001 - nothing else reports an error of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # skips the exit handlers, which are the parent's


def run_engine(config: ExecutorConfig, channel: ChannelFds) -> None:
    """Build the engine and tick it forever. Raises EngineStartError or EngineBroken."""
    import rose.workers.executor.vllm.process_env  # before vLLM
    from rose.workers.executor.engine_loop import EngineLoop
    from rose.workers.executor.step_cost import INITIAL_COST, StepCost
    from rose.workers.executor.vllm.engine import Engine
    from rose.workers.executor.vllm.engine_core import InProcessBackend
    from rose.workers.executor.vllm.ranks import RanksBackend
    from rose.workers.executor.vllm.types import EngineConfig, EngineStartError

    named = rose.workers.executor.vllm.process_env.other_variables()  # vLLM sets more as it starts
    ranks = config.vllm.get("tensor_parallel_size", 1)
    engine = Engine(
        EngineConfig(
            model_folder=config.model_folder,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_running=config.max_turns,
            kv_cache_bytes=None if "gpu_memory_utilization" in config.vllm else config.kv_cache_bytes,
            step_tokens=config.step_tokens,
            vllm_arguments=config.vllm,
        ),
        RanksBackend(ranks) if ranks > 1 else InProcessBackend(),
    )
    engine.allocate_spare()
    try:
        engine.self_test()
    except EngineStartError as error:
        if not named:
            raise
        raise EngineStartError(f"{error} (set in the environment: {', '.join(named)})") from error
    reports = MessageSender(RingBuffer(channel.reports))
    loop = EngineLoop(engine, channel, reports, StepCost(**INITIAL_COST), status_seconds=config.heartbeat_seconds)
    wake = select.poll()
    wake.register(channel.wake_event, select.POLLIN)
    while True:
        loop.tick()
        if not loop.busy and wake.poll(1000 * loop.rest_seconds):
            os.eventfd_read(channel.wake_event)
