"""The process beside a lending server: an executor whose engine is the server's guest, or who observes.

Keeps true
- Whatever becomes of it, serving goes on. It ends with the server, with a goodbye, and is started again if it is killed
  (`keeper`).
- A guest that is dropped, a broker that is away or a server that is not up yet is waited for; after each it is a new
  start of the executor. What only a person can mend ends it, with a sentence in the log.
"""

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NoReturn

import msgspec
import structlog

from schemas.errors import RoseError, UsageError
from schemas.slack import WorkerClass
from topics.access import EXECUTOR
from topics.health import HEALTH
from topics.permission import reach_as
from topics.processes import end_with, setter, show_as
from topics.settings import BusSettings
from workers.executor.config import ExecutorConfig
from workers.executor.lease import Lease
from workers.executor.link import EngineLink
from workers.executor.main import run_executor
from workers.executor.vllm.folder import check_folder
from workers.lender.config import LendConfig, LenderConfig
from workers.lender.keeper import Keeper
from workers.lender.link import End, knock
from workers.lender.observed import observe
from workers.lender.pulse import Pulse
from workers.lender.shared_folder import make_folder
from workers.lender.vllm import SETTING
from workers.model_config import refuse_too_long
from workers.weights.config import WeightsConfig
from workers.weights.trust import run_id

KNOCK_SECONDS = 0.5
"""Between two tries to reach a server, which takes seconds to come up."""

AGAIN_SECONDS = 1.0
"""Before it begins anew after a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is lent, to whom, and until when."""

    settings: BusSettings | None
    """None: nothing is lent, what could be is observed."""
    executor: ExecutorConfig
    lender: LenderConfig
    weights: WeightsConfig
    stop_file: Path
    exporting: Callable[[], AbstractContextManager[None]]
    """What each process beside exports, for as long as it runs. May raise UsageError."""


def lend(plan: Plan, serving: Path, flags: Sequence[str]) -> NoReturn:
    """Become a vLLM server of the model folder `serving`, with these flags of vLLM's, and lend as planned.

    Call it before this process has a client of a broker: librdkafka's threads are not forked. Metrics and traces are
    those of the process beside the server. Raises ModelFolderError for a policy that no guest can be made from.
    """
    shapes: Mapping[str, tuple[int, ...]] = {}
    if plan.settings is not None:
        shapes, _ = check_folder(plan.executor.model_folder)
        refuse_too_long(plan.executor.model_folder, plan.executor.max_model_len)
    folder = make_folder()
    file, pulse = folder / "lend.json", Pulse.made(folder / "pulse")
    file.write_bytes(msgspec.json.encode(_of(plan, folder)))
    _fork(lambda: _keep(plan, shapes, folder, pulse))
    command = [sys.executable, "-m", "workers.lender.server", "--model", str(serving), *flags]
    os.execve(sys.executable, command, {**os.environ, SETTING: str(file)})


def _of(plan: Plan, folder: Path) -> LendConfig:
    config = plan.executor
    return LendConfig(
        model_folder=str(config.model_folder.resolve()),
        socket=str(folder / "socket"),
        dtype=config.dtype,
        max_turns=config.max_turns,
        max_model_len=config.max_model_len,
        kv_cache_bytes=config.kv_cache_bytes,
        step_tokens=config.step_tokens,
        promise=plan.lender.promise,
        memory=plan.lender.memory,
        heartbeat_seconds=config.heartbeat_seconds,
        pulse=str(folder / "pulse"),
        observe=plan.settings is None,
    )


def _fork(program: Callable[[], None]) -> int:
    """A child that runs `program`, is asked to stop when this process is gone, and runs nothing else of it."""
    end = end_with(os.getpid(), signal.SIGTERM)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        end()
        program()
        status = 0
    except Exception:  # noqa: BLE001  nobody else would tell
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _until_asked() -> Event:
    stop = Event()
    set_stop = setter(stop)
    signal.signal(signal.SIGTERM, lambda *_: set_stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the server, which takes its children along
    return stop


def _keep(plan: Plan, shapes: Mapping[str, tuple[int, ...]], folder: Path, pulse: Pulse) -> None:
    """The keeper's program."""
    stop = _until_asked()
    show_as(f"keeper-{plan.executor.short_name}")
    try:
        begin = lambda: _fork(lambda: _stay_beside(plan, shapes, folder / "socket"))  # noqa: E731
        Keeper(pulse, plan.stop_file, begin, hang_seconds=plan.lender.hang_seconds).keep(stop)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _stay_beside(plan: Plan, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """The program of the process beside."""
    name, stop = plan.executor.worker, _until_asked()
    show_as(f"beside-{plan.executor.short_name}")
    log = structlog.get_logger("lender").bind(worker=name)
    try:
        with plan.exporting():
            while not stop.is_set():
                try:
                    _link(plan, shapes, path, stop)
                except UsageError:
                    raise
                except RoseError as error:
                    log.warning("begins anew", reason=str(error))
                    HEALTH.begins_anew(str(error))
                    stop.wait(AGAIN_SECONDS)
                except Exception as error:  # nobody else would tell, or begin anew
                    log.exception("begins anew")
                    HEALTH.begins_anew(repr(error))
                    stop.wait(AGAIN_SECONDS)
    except UsageError as error:
        log.error("lends nothing, serving goes on", reason=str(error))


def _link(plan: Plan, shapes: Mapping[str, tuple[int, ...]], path: Path, stop: Event) -> None:
    """One link with the server, from its beginning to its end."""
    settings = plan.settings
    if settings is not None:
        reach_as(settings, EXECUTOR)
    end = _knock(path, stop)
    if end is None:
        return
    with closing(end):
        link = EngineLink(end.wires, end.connection.fileno())
        if settings is None:
            observe(link, stop)
            return
        job = run_id(settings.namespace, plan.weights.run)
        lease = Lease(job, needed=plan.lender.needs_grant)
        run_executor(
            settings, plan.executor, link, shapes, stop, WorkerClass.SERVING, weights=plan.weights, lease=lease
        )


def _knock(path: Path, stop: Event) -> End | None:
    """A link with the server, once it is up; None once `stop` is set."""
    while not stop.is_set():
        try:
            return knock(path)
        except OSError:
            HEALTH.says("waits for its server", ready=False)
            stop.wait(KNOCK_SECONDS)
    return None
