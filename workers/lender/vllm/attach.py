"""Attaches the lender to the serving engine core when its loop starts.

Keeps true
- Serving's outputs are sent before a guest piece, and the guest computes only if admission allows it. A request that
  arrives waits for at most one bounded guest piece. If the guest's model is in this process, the request waits at most
  for one layer of the guest's step (on a GPU for two), its logits or its sampling.
- The loop never spins: if neither serving nor the guest has work, it sleeps where vLLM sleeps.
- A server that is not supported is not changed, and the log says why. The check comes before the import of any part of
  vLLM that the server has not imported itself.
- An engine core whose server was killed during its start does not run.

The lender wraps three methods of `EngineCoreProc`, and the loop of `DPEngineCoreProc` (`compatibility` has the table);
two of the methods only in an engine core that lends or is observed. `has_work` is not wrapped, so vLLM's shutdown is
unchanged.
"""

import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from rose.schemas.errors import UsageError
from rose.workers.lender.config import LendConfig, read_config
from rose.workers.lender.status_page import StatusPage

LOG = logging.getLogger("vllm.rose")


def register_lender(configuration: str) -> None:
    """Wrap the loops of vLLM's engine cores in this process, so that the lender attaches when a loop starts.

    `configuration`: path of the file of `LendConfig`. Raises nothing.
    """
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    for kind in (EngineCoreProc, DPEngineCoreProc):
        kind.run_busy_loop = _wrap_busy_loop(kind.run_busy_loop, configuration)


def _wrap_busy_loop(run_busy_loop: Callable[[Any], None], configuration: str) -> Callable[[Any], None]:
    @wraps(run_busy_loop)
    def run_lending(core: Any) -> None:
        page: StatusPage | None = None
        try:
            config = read_config(Path(configuration))
            page = StatusPage.for_core(
                config.pulse
            )  # first: the watchdog must also know an engine core that does not lend
            _check(core, config)
            _attach(core, config, page)
        except UsageError as refusal:
            LOG.error("rose: lending_refused reason=%s", refusal)
        except Exception:  # serving starts whatever error the lender has
            LOG.exception("rose: lending_failed")
        try:
            _exit_if_orphaned()
            run_busy_loop(core)
        except SystemExit:  # the loop ends so when it is asked to stop
            if page is not None:
                page.clear_core()
            raise

    return run_lending


def _exit_if_orphaned() -> None:
    """End an engine core whose server was killed during the load; vLLM's engine core would outlive it.

    The status page names the engine core by now, so the watchdog ends it if the server is killed later. Raises
    SystemExit.
    """
    server = parent_process()  # its pipe is no proof: another child of the server may hold the pipe open
    if server is not None and os.getppid() != server.pid:
        LOG.error("rose: engine_core_orphaned")
        sys.exit(0)


def _check(core: Any, config: LendConfig) -> None:
    """Raise UsageError if the server can neither lend nor be observed. The check that imports parts of vLLM is last."""
    from rose.workers.lender.vllm.compatibility import (
        guest_error,
        internals_error,
        is_one_of_several,
        version_error,
    )

    reason = version_error()
    if not config.observe:
        reason = reason or guest_error(core, strict=not config.promise.dial, untried_devices=config.untried_devices)
    if reason:
        raise UsageError(reason)
    if is_one_of_several(core):
        raise UsageError("no server was observed that has several engine cores (data parallelism)")
    if reason := internals_error(observing=config.observe):
        raise UsageError(reason)


def _attach(core: Any, config: LendConfig, page: StatusPage) -> None:
    """Attach the observation or the guest to the loop of `core`. Raises UsageError."""
    from vllm.v1.engine import EngineCoreRequestType

    def wake() -> None:
        core.process_input_queue_block = False  # first: the loop may be about to sleep
        core.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    if config.observe:
        from rose.workers.lender.vllm.observing import observe_core

        observe_core(core, config, wake, LOG)
        LOG.info("rose: observation_enabled")
        return
    from rose.workers.lender.vllm.interleaving import interleave

    interleave(core, config, page, wake, LOG)
    LOG.info("rose: lending_enabled socket=%s", config.socket)
