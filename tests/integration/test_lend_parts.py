"""The processes of a lending server are halted and killed one by one: serving continues, as
docs/guides/lend-a-server.md states."""

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from rose.schemas.heartbeats import ExecutorState
from rose.schemas.turns import TurnOutcome
from rose.topics.settings import BusSettings
from rose.workers.lender.sidecar import FOLDER_PREFIX
from rose.workers.lender.status_page import WATCHDOG_SILENT_SECONDS
from rose.workers.lender.vllm_server import CORE_LOST_STATUS
from tests.integration.test_lend import CONTEXT, START_SECONDS, child, lending, prove, started, with_topics
from tests.support.brokers import AnyBroker, best_broker, flags
from tests.support.executor_fixtures import Router
from tests.support.lender_server_fixtures import MODEL
from tests.support.waiting import WAIT_SECONDS, until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200)]

HALTED_SECONDS = (1.0, 15.0)


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    return with_topics(broker.settings(namespace))


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder in which servers create their shared folders. Its name is short, because it holds sockets."""
    with tempfile.TemporaryDirectory(prefix="rose-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@contextmanager
def halted(process: psutil.Process, seconds: float) -> Iterator[None]:
    """Halt the process during the block. It continues `seconds` after the halt, or later."""
    began = time.monotonic()
    process.suspend()
    try:
        yield
        time.sleep(max(0.0, began + seconds - time.monotonic()))  # total time of the halt
    finally:
        process.resume()


@best_broker
def test_server_keeps_serving_over_any_fault_of_sidecar_and_watchdog(
    settings: BusSettings, folders: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    dice = random.Random(seed)
    print(f"seed {seed}", file=sys.__stderr__)
    with lending(tmp_path, *flags(settings)) as server:
        router = Router(settings, server.process)
        answer = server.complete(CONTEXT).text
        router.publish_tensors(load_file(MODEL / "model.safetensors"), 0)
        lends(router, "first")
        watchdog = child(server, "watchdog")
        with halted(watchdog, dice.uniform(*HALTED_SECONDS)):
            assert server.complete(CONTEXT).text == answer
        lends(router, "after a watchdog that was halted for a moment")
        with halted(watchdog, 0.0):
            router.until(lambda: "watchdog is silent" in router.heartbeats[-1].paused_reason)
            assert server.complete(CONTEXT).text == answer
        lends(router, "after a watchdog that was halted for longer")

        incarnation = router.heartbeats[-1].incarnation
        with halted(child(server, "sidecar"), dice.uniform(*HALTED_SECONDS)):
            assert server.complete(CONTEXT).text == answer
        lends(router, "after the sidecar was halted")
        assert router.heartbeats[-1].incarnation == incarnation

        with halted(server.core, 2 * WATCHDOG_SILENT_SECONDS):  # longer than its guest may hang
            pass
        assert server.complete(CONTEXT).text == answer
        lends(router, "after the engine core was halted")

        child(server, "sidecar").kill()
        assert server.complete(CONTEXT).text == answer
        router.until(lambda: router.heartbeats[-1].incarnation > incarnation)
        lends(router, "after the sidecar was killed")
        assert server.log.read_text().count("guest_dropped") == 0

        watchdog.kill()
        router.executor = None
        router.until(lambda: router.heartbeats[-1].state is ExecutorState.STOPPING)
        assert server.complete(CONTEXT).text == answer
        [left] = folders.glob(f"{FOLDER_PREFIX}*")
    assert server.process.returncode == 0 and left.exists(), "nobody was there to remove it"


@best_broker
def test_server_with_a_killed_engine_core_exits_with_a_status_and_cleans_up(
    settings: BusSettings, folders: Path, tmp_path: Path
) -> None:
    left = folders / f"{FOLDER_PREFIX}left"
    left.mkdir()
    with lending(tmp_path, *flags(settings)) as server:
        assert not left.exists(), "what nobody has is removed at the next start"
        router = Router(settings, server.process)
        router.publish_tensors(load_file(MODEL / "model.safetensors"), 0)
        router.until(lambda: router.serves(0))
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.core.kill()
        assert server.process.wait(WAIT_SECONDS) == CORE_LOST_STATUS
        assert "nobody had asked it to" in server.log.read_text()
        assert not psutil.wait_procs(children, WAIT_SECONDS)[1]
        assert not list(folders.glob(f"{FOLDER_PREFIX}*"))


def test_killed_server_leaves_nothing_behind(folders: Path, tmp_path: Path) -> None:
    with lending(tmp_path, "--observe") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.core.pid in [child.pid for child in children]
        server.process.kill()
        assert not psutil.wait_procs(children, WAIT_SECONDS)[1]
        assert not list(folders.glob(f"{FOLDER_PREFIX}*"))


def has_engine_core(server: psutil.Process) -> bool:
    """Whether the engine core has begun. Other children of a server that starts may end meanwhile."""
    with suppress(psutil.NoSuchProcess):
        return any("EngineCore" in each.name() for each in server.children(recursive=True))
    return False


def test_server_killed_during_loading_leaves_nothing_behind(folders: Path, tmp_path: Path) -> None:
    server = started(tmp_path, "--observe")
    process = psutil.Process(server.process.pid)
    children: list[psutil.Process] = []
    try:
        until(lambda: has_engine_core(process), START_SECONDS)
        children = process.children(recursive=True)
    finally:
        server.process.kill()
        server.process.wait()
    assert not psutil.wait_procs(children, START_SECONDS)[1]
    said = server.log.read_text()  # the engine core may not have heard of its server before the kill: then vLLM ends it
    assert "engine_core_orphaned" in said or "Did not receive response from front-end process" in said
    assert not list(folders.glob(f"{FOLDER_PREFIX}*"))


def lends(router: Router, when: str) -> None:
    """Assert that the lender runs a turn. A refused turn is sent again, as a router would."""
    name = when.replace(" ", "-")
    for attempt in count():
        router.heartbeats.clear()
        router.until(lambda: router.serves(0) and router.heartbeats[-1].state is ExecutorState.READY)
        router.dispatch(name, CONTEXT, attempt=attempt)
        result = router.result(name, attempt)
        if result.outcome is TurnOutcome.COMPLETED:
            prove(result)
            return
        assert result.outcome in (TurnOutcome.REFUSED, TurnOutcome.PREEMPTED)
