"""The lender in the serving engine's process: how a guest gets its turn.

Keeps true
- Serving's outputs have left before a guest's turn, and a guest has one only where admission lets it: a request that
  arrives waits for at most one bounded piece of the guest's work, and of a step in this process for one layer, its
  logits or its sampling.
- The loop never spins: with nothing to do for either it sleeps where vLLM sleeps.
- A server that no guest was tried in is left as it is, and the log says why in a sentence. Whether one was tried is
  asked before anything of vLLM is imported that the server has not imported itself.
- An engine core whose server was killed meanwhile does not begin.

Three methods of `EngineCoreProc` are wrapped, and the loop that `DPEngineCoreProc` has of its own (`compatibility` has
the table); two of them in an engine that lends alone. `has_work` is left as it is, so vLLM's shutdown is its own.
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
from rose.workers.lender.watchdog_page import StatusPage

LOG = logging.getLogger("vllm.rose")


def register_lender(configuration: str) -> None:
    """Have every engine core of this process offer itself when its loop begins. Raises nothing."""
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
            )  # first: the watchdog is to know an engine core that does not lend, too
            _check(core, config)
            _attach(core, config, page)
        except UsageError as refusal:
            LOG.error("rose: this server does not lend: %s", refusal)
        except Exception:  # serving begins whatever is wrong here
            LOG.exception("rose: this server does not lend")
        try:
            _exit_if_orphaned()
            run_busy_loop(core)
        except SystemExit:  # how the loop ends when it is asked to
            if page is not None:
                page.clear_core()
            raise

    return run_lending


def _exit_if_orphaned() -> None:
    """End an engine core whose server was killed as it loaded, which vLLM's would outlive. Raises SystemExit.

    Its page says by now who it is: of a server that is killed later the watchdog ends the engine core.
    """
    server = parent_process()  # whether its pipe still tells of it is no matter: a child of it may hold that open
    if server is not None and os.getppid() != server.pid:
        LOG.error("rose: the server of this engine core is gone: it ends")
        sys.exit(0)


def _check(core: Any, config: LendConfig) -> None:
    """Raises UsageError where no guest may be. The look at vLLM's parts is last: it imports them."""
    from rose.workers.lender.vllm.compatibility import (
        guest_refusal,
        is_one_of_several,
        missing_internals,
        unsupported_version,
    )

    if reason := unsupported_version() or (not config.observe and guest_refusal(core)):
        raise UsageError(reason)
    if is_one_of_several(core):
        raise UsageError("no server was observed that has several engine cores (data parallelism)")
    if reason := missing_internals(observing=config.observe):
        raise UsageError(reason)


def _attach(core: Any, config: LendConfig, page: StatusPage) -> None:
    """Raises UsageError."""
    if config.observe:
        from rose.workers.lender.vllm.observing import observe

        observe(core, config, LOG)
        LOG.info("rose: this server is observed, and lends nothing")
        return
    from rose.workers.lender.vllm.interleaving import interleave

    interleave(core, config, page, LOG)
    LOG.info("rose: this server lends to who knocks at %s", config.socket)
