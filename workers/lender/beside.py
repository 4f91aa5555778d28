"""The process beside a lending server: an executor whose engine is the server's guest.

Keeps true
- It is the server's child, and whatever becomes of it, serving goes on. It ends with the server, with a goodbye.
- A guest that is dropped, a broker that is away or a server that is not up yet is waited for; after each it is a new
  start of the executor. What only a person can mend ends it, with a sentence in the log.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import NoReturn

import msgspec
import structlog

from schemas.errors import RoseError, UsageError
from schemas.slack import WorkerClass
from topics.admin import reach
from topics.processes import end_with, show_as
from topics.settings import BusSettings
from workers.executor.config import ExecutorConfig
from workers.executor.link import EngineLink
from workers.executor.main import run_executor
from workers.executor.vllm.folder import check_folder
from workers.lender.config import LendConfig, LenderConfig
from workers.lender.link import End, knock
from workers.lender.vllm import SETTING
from workers.weights.config import WeightsConfig

KNOCK_SECONDS = 0.5
"""Between two tries to reach a server, which takes seconds to come up."""

AGAIN_SECONDS = 1.0
"""Before it begins anew after a failure."""


def lend(
    settings: BusSettings,
    config: ExecutorConfig,
    lender: LenderConfig,
    serving: Path,
    flags: Sequence[str],
    weights: WeightsConfig,
    *,
    serve_metrics: Callable[[], None],
) -> NoReturn:
    """Become a vLLM server of the model folder `serving`, with these flags of vLLM's, and lend to inbox `config.slot`.

    Call it before this process has a client of a broker: librdkafka's threads are not forked. `serve_metrics` is called
    in the process beside the server. Raises ModelFolderError for a policy that no guest can be made from.
    """
    shapes, _ = check_folder(config.model_folder)
    folder = Path(tempfile.mkdtemp(prefix="rose-lend-"))
    file = folder / "lend.json"
    file.write_bytes(msgspec.json.encode(_of(config, lender, folder / "socket")))
    end = end_with(os.getpid(), signal.SIGTERM)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        end()
        _stay_beside(settings, config, shapes, folder, weights, serve_metrics)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(serving), *flags]
    os.execve(sys.executable, command, {**os.environ, SETTING: str(file)})


def _of(config: ExecutorConfig, lender: LenderConfig, path: Path) -> LendConfig:
    return LendConfig(
        model_folder=str(config.model_folder.resolve()),
        socket=str(path),
        dtype=config.dtype,
        max_turns=config.max_turns,
        max_model_len=config.max_model_len,
        kv_cache_bytes=config.kv_cache_bytes,
        step_tokens=config.step_tokens,
        promise=lender.promise,
        memory=lender.memory,
        heartbeat_seconds=config.heartbeat_seconds,
    )


def _stay_beside(
    settings: BusSettings,
    config: ExecutorConfig,
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    weights: WeightsConfig,
    serve_metrics: Callable[[], None],
) -> NoReturn:
    """The forked process's program."""
    name, stop = f"executor-{config.slot}", Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the server, which takes it along
    show_as(f"beside-{config.slot}")
    log = structlog.get_logger("lender").bind(worker=name)
    try:
        serve_metrics()
        while not stop.is_set():
            try:
                reach(settings)
                end = _knock(folder / "socket", stop)
                if end is not None:
                    with closing(end):
                        link = EngineLink(end.wires, end.connection.fileno())
                        run_executor(settings, config, name, link, shapes, stop, WorkerClass.SERVING, weights=weights)
            except UsageError:
                raise
            except RoseError as error:
                log.warning("begins anew", reason=str(error))
                stop.wait(AGAIN_SECONDS)
            except Exception:  # nobody else would tell, or begin anew
                log.exception("begins anew")
                stop.wait(AGAIN_SECONDS)
    except UsageError as error:
        log.error("lends nothing, serving goes on", reason=str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _knock(path: Path, stop: Event) -> End | None:
    """A link with the server, once it is up; None once `stop` is set."""
    while not stop.is_set():
        try:
            return knock(path)
        except OSError:
            stop.wait(KNOCK_SECONDS)
    return None
