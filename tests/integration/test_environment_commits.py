"""An environment worker with a long commit stays a member of its group and keeps the records read meanwhile."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pytest

from rose.schemas.samples import Sample
from rose.topics import transactions
from rose.topics.catalog import ENVIRONMENT_GROUP, PROMPTS, Topic
from rose.topics.queries import noop
from rose.topics.records import Item
from rose.topics.writer import Writer
from rose.workers.environments.config import EnvironmentConfig
from rose.workers.environments.main import run_environment_worker
from rose.workers.environments.membership import Membership
from rose.workers.environments.worker import EnvironmentWorker
from tests.support.brokers import EMBEDDED
from tests.support.environment_worker_fixtures import GROUPS, finish, once, prompt_of
from tests.support.scripted_executors import ScriptedExecutors


class Commits:
    """The commits of the worker on the thread. While `held` is set, no commit finishes."""

    def __init__(self, patch: pytest.MonkeyPatch, thread: Thread) -> None:
        self.held = False
        self.lasts = False
        """Whether a commit was held."""
        self.read_amid: list[Item] = []
        self.moved_amid = False
        self.taken: dict[tuple[int, Topic, int], list[int]] = defaultdict(list)
        """The accepted offsets by incarnation, topic and partition."""
        self._amid = False
        commit, read, take = Writer.commit, Membership.read, EnvironmentWorker._on_item

        def commits(writer: Writer, *arguments: Any, **named: Any) -> None:
            self._amid = current_thread() is thread
            try:
                commit(writer, *arguments, **named)
            finally:
                self._amid = False

        def reads(member: Membership, limit: int, timeout_seconds: float) -> list[Item]:
            items = read(member, limit, timeout_seconds)
            if self._amid and current_thread() is thread:
                self.read_amid += items
                self.moved_amid |= member.rebalanced
            return items

        def takes(worker: EnvironmentWorker, item: Item) -> None:
            self.taken[worker._generation, item.topic, item.partition].append(item.offset)
            take(worker, item)

        patch.setattr("rose.topics.writer.in_time_slices", self._in_turns)
        patch.setattr(Writer, "commit", commits)
        patch.setattr(Membership, "read", reads)
        patch.setattr(EnvironmentWorker, "_on_item", takes)

    def _in_turns(self, call: Callable[[float], object]) -> Callable[[float], bool]:
        goes_on, never = transactions.in_time_slices(call), Event()

        def late(seconds: float) -> bool:
            if not (self._amid and self.held):
                return goes_on(seconds)
            self.lasts = True
            return never.wait(seconds)

        return late


@pytest.mark.slow
@pytest.mark.parametrize("joins", [False, True], ids=["alone", "another-joins"])
def test_worker_in_a_long_commit_stays_a_member_and_reads_each_record_once(
    executors: ScriptedExecutors,
    undisturbed: dict[str, Sample],
    model: str,
    broker_kind: str,
    joins: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if broker_kind == EMBEDDED:
        pytest.skip("tells the offsets of an open transaction: there homes wait for a commit under way")
    settings, stop = executors.settings, Event()
    config = EnvironmentConfig(model_folder=Path(model), window_groups=2 * GROUPS)
    worker = Thread(target=run_environment_worker, args=(settings, config, "w0", stop))
    commits = Commits(monkeypatch, worker)
    worker.start()
    try:
        for number in range(GROUPS - 1):
            executors.submit(prompt_of(number))
        executors.pump_until(lambda: executors.requested >= 40, what="40 requests")
        commits.held = True
        executors.pump_until(lambda: commits.lasts, what="a commit that lasts")
        executors.submit(prompt_of(GROUPS - 1))
        what = "a prompt that is read amid a commit"
        executors.pump_until(lambda: any(item.topic is PROMPTS for item in commits.read_amid), what=what)
        if joins:
            with closing(Membership(settings, "other", ENVIRONMENT_GROUP, on_wait=noop)) as other:
                other.join()

                def have_moved() -> bool:
                    other.read(1, 0.0)
                    return commits.moved_amid and bool(other.homes)

                executors.pump_until(have_moved, what="homes that move amid a commit")
                commits.held = False
        commits.held = False
        finish(executors)
    finally:
        commits.held = False
        stop.set()
        worker.join()
    assert [offsets for offsets in commits.taken.values() if offsets != sorted(set(offsets))] == []
    assert once(executors) == undisturbed
