"""Commits the records that an environment worker has ready, in one transaction.

Keeps true
- Requests, progress, snapshots, samples, dead letters and the offsets of the inputs that caused them are committed
  together.
- Every transaction commits offsets of both inputs of each home that it writes for. So a transaction of a worker that
  has lost the home fails, and the next owner, which asks for these offsets first, waits for a transaction that is under
  way.
- The trajectories of a group are opened in one transaction. The committed prompt offset of a home covers only decided
  prompts.
- After a failure nothing of the transaction counts; the transaction is aborted before anything is decided again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from prometheus_client import Counter

from rose.schemas.errors import ThreadRefused
from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import Prompt, trajectory_id
from rose.topics.catalog import (
    COMPLETED,
    ENVIRONMENT_TRANSACTIONAL_PREFIX,
    GROUPS,
    PROGRESS,
    PROMPTS,
    REQUESTED,
    SAMPLES,
    SNAPSHOTS,
)
from rose.topics.errors import BusError, TopicMissing
from rose.topics.queries import noop
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.environments import metrics
from rose.workers.environments.home import OLD_BATCH, Home, KnownGroup, OpenGroup
from rose.workers.environments.prompt_decisions import DecisionKind, PromptDecision, ResetResult
from rose.workers.environments.trajectory import Trajectory, TrajectoryRules, begin, with_full_sampling
from rose.workers.environments.transitions import OutgoingRecords, fail_at_opening, first_request

OFFSETS_SECONDS = 1.0
"""Offsets of late results and settled groups are committed after at most this long."""

SWEEP_SECONDS = 600.0
"""Interval of looking for groups in a home that are old enough to be forgotten."""

AGAIN_SECONDS = 10.0
"""The same interval while more groups are old than one transaction forgets: 50 groups a second for each home."""

OFFSETS_MARK = "rose"
"""Metadata of the offsets that environment workers commit. Offsets without it were moved by another program."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PendingTransition:
    """The records of one trajectory for the next transaction."""

    home: Home
    trajectory_id: str
    records: OutgoingRecords
    offset: int | None
    """Offset of the result that caused the records; None if no result did."""


def group_record(
    prompt: Prompt,
    state: GroupState,
    *,
    offset: int,
    decided_to: int | None = None,
    outcomes_from: int,
    needed: int = 0,
    rewarded: int = 0,
    deferrals: int = 0,
    deferred: bool = False,
    now: float,
) -> Group:
    """The record of a group whose prompt was decided. `prompt` must have its full sampling.

    `needed`, `rewarded`, `deferrals`, `deferred`: see Group.
    """
    return Group(
        group_id=prompt.group_id,
        group_size=prompt.group_size,
        state=state,
        offset=offset,
        prompt=prompt if state is GroupState.OPEN else None,
        outcomes_from=outcomes_from,
        decided_to=decided_to,
        needed=needed,
        rewarded=rewarded,
        deferrals=deferrals,
        deferred=deferred,
        changed_at=now,
    )


def open_group_record(known: KnownGroup, group: OpenGroup) -> Group:
    """The record of an open group whose counts or deferral have changed."""
    return group_record(
        group.prompt,
        GroupState.OPEN,
        offset=known.offset,
        decided_to=known.decided_to,
        outcomes_from=group.outcomes_from,
        needed=group.needed,
        rewarded=group.rewarded,
        deferrals=group.deferrals,
        deferred=group.deferred,
        now=known.changed_at,
    )


class Outbox:
    """Commits collected records in transactions.

    After an error no record of the transaction counts: fence, recover, and decide again from the log.
    """

    def __init__(
        self,
        writer: Writer,
        reader: Reader,
        *,
        rules: TrajectoryRules,
        clock: Callable[[], float],
        group_retention_seconds: float,
    ) -> None:
        """Create the outbox of a writer.

        `writer` has fenced earlier writers of its name. `reader` is the group member whose offsets are committed.
        Groups that ended more than `group_retention_seconds` ago are forgotten.
        """
        self._writer = writer
        self._reader = reader
        self._rules = rules
        self._clock = clock
        self._group_retention_seconds = group_retention_seconds
        self._committed: dict[Place, int] = {}
        self._committed_at = 0.0
        self._sweep_at = 0.0
        self._request_next: dict[int, int] = {}
        """Lower bound of the offset of the next request, by home."""
        self.has_failed = False
        """Whether the writer is closed after an error of the broker, so that this outbox cannot be used any more."""
        self.began_at = 0.0
        """Monotonic seconds at the beginning of the last transaction."""
        self._asking: list[Trajectory] = []
        """Trajectories with a request in this transaction."""
        self._counted: list[tuple[Counter, int]] = []
        """Increments of counters, applied once the transaction is committed; an aborted transaction is decided
        again."""

    def offsets(self, places: Sequence[Place]) -> dict[Place, int | None]:
        """Return the offsets that environment workers have committed; None for a place without a committed offset.

        Raises BusError or ThreadRefused.
        """
        try:
            return self._writer.committed_offsets(self._reader, places, mark=OFFSETS_MARK)
        except (BusError, ThreadRefused) as error:
            failure: BusError | ThreadRefused = error
        self.close()
        raise failure

    def on_recovered(self, offsets: Mapping[Place, int], request_ends: Mapping[int, int]) -> None:
        """The homes were recovered.

        `offsets`: where their inputs are read from. `request_ends`: by home, an end offset of its requests that was
        seen.
        """
        self._committed = dict(offsets)
        self._request_next = dict(request_ends)

    def needed(self, homes: Mapping[int, Home]) -> dict[Place, int]:
        """The first offset of each home's prompts, requests and results that is still needed."""
        needed: dict[Place, int] = {}
        for partition, home in homes.items():
            requests, results = home.needed(self._request_next[partition])
            needed[PROMPTS, partition] = self._committed[PROMPTS, partition]
            needed[REQUESTED, partition] = requests
            needed[COMPLETED, partition] = min(results, self._committed[COMPLETED, partition])
        return needed

    def commit(self, homes: Mapping[int, Home], ready: Sequence[PendingTransition]) -> list[str]:
        """Commit one transaction, if there is anything to write; returns the trajectories that have ended.

        Raises BusError, TopicMissing or ThreadRefused.
        """
        decisions = [(home, decision) for home in homes.values() for decision in home.take_complete()]
        touched = {home.partition for home, _ in decisions} | {item.home.partition for item in ready}
        touched |= {
            home.partition
            for home in homes.values()
            if home.undecodable_results or home.orphaned_trajectories or home.changed_groups
        }
        unhurried = time.monotonic() - self._committed_at >= OFFSETS_SECONDS
        if unhurried:
            moved = self._offsets(homes.values())
            touched |= {place[1] for place, offset in moved.items() if offset != self._committed[place]}
            touched |= {home.partition for home in homes.values() if home.settled}
        old = self._old_groups(homes.values())
        touched |= old.keys()
        if not touched:
            return []
        self.began_at = time.monotonic()
        self._counted.clear()
        self._asking.clear()
        failure: BusError | TopicMissing | ThreadRefused | None = None
        try:
            self._writer.begin()
            ended = [ended_id for home, decision in decisions for ended_id in self._put_decision(home, decision)]
            for item in ready:
                self._put(item)
            for partition in touched:
                self._put_rest(homes[partition], old.get(partition, []))
            offsets = self._offsets(homes[partition] for partition in touched)
            self._writer.commit(offsets, self._reader, metadata=OFFSETS_MARK)
            self._writer.poll()
        except (BusError, TopicMissing, ThreadRefused) as error:
            failure = error
        if failure is not None:
            self.close()
            raise failure
        self._committed.update(offsets)
        self._committed_at = time.monotonic()
        metrics.TRANSACTION_SECONDS.observe(self._committed_at - self.began_at)
        for counter, more in self._counted:
            counter.inc(more)
        now = self._clock()
        for trajectory in self._asking:
            trajectory.committed_at = now
        return ended + [item.trajectory_id for item in ready if item.records.sample is not None]

    def close(self) -> None:
        """Close the writer. Never call this while an exception is handled, see `topics/transactions.py`."""
        self._writer.close()
        self.has_failed = True

    def _offsets(self, homes: Iterable[Home]) -> dict[Place, int]:
        offsets: dict[Place, int] = {}
        for home in homes:
            offsets[PROMPTS, home.partition] = home.prompts_low_water
            offsets[COMPLETED, home.partition] = home.results.low_water
        return offsets

    def _put_decision(self, home: Home, decision: PromptDecision) -> list[str]:
        """Write a decision; returns the trajectories whose environments are not needed any more."""
        if decision.kind is DecisionKind.OPEN:
            return self._open(home, decision)
        found, prompt = decision.message, decision.prompt
        if decision.kind is DecisionKind.FORWARD and prompt is not None:
            self._writer.forward(PROMPTS, found.raw, partition=decision.home, key=prompt.group_id.encode())
            self._counted.append((metrics.FORWARDED, 1))
        if decision.kind is DecisionKind.REFUSE:
            self._writer.dead_letter(found, decision.refusal)
            self._counted.append((metrics.REFUSED, 1))
            log.warning(
                "prompt_refused",
                group=prompt and prompt.group_id,
                home=home.partition,
                offset=found.offset,
                reason=decision.refusal,
            )
            if prompt is not None and not decision.repeated:
                self._write_group(home, prompt, GroupState.REFUSED, offset=found.offset)
        return [trajectory_id(decision.opens.group_id, index) for index in decision.reset_results]

    def _open(self, home: Home, decision: PromptDecision) -> list[str]:
        prompt, now = with_full_sampling(decision.opens, self._rules.sampling), self._clock()
        self._write_group(
            home,
            prompt,
            GroupState.OPEN,
            offset=decision.message.offset,
            outcomes_from=home.open_groups[prompt.group_id].outcomes_from,
            needed=decision.needed,
        )
        ended = []
        for index in range(prompt.group_size):
            own_id, opening = trajectory_id(prompt.group_id, index), decision.reset_results[index]
            if isinstance(opening, ResetResult):
                trajectory = begin(
                    prompt, index, home=home.partition, observation=opening.observation, state=opening.state
                )
                written = first_request(trajectory, self._rules, now)
                if written.sample is None:
                    home.trajectories[own_id] = trajectory
            else:
                log.warning("environment_failed", trajectory=own_id, reason=opening)
                written = fail_at_opening(prompt, index, opening, self._rules, now)
            if written.sample is not None:
                ended.append(own_id)
            self._write(home, own_id, written, home.trajectories.get(own_id))
        self._counted.append((metrics.OPENED, prompt.group_size))
        return ended

    def _write_group(
        self,
        home: Home,
        prompt: Prompt,
        state: GroupState,
        *,
        offset: int,
        outcomes_from: int = 0,
        needed: int = 0,
    ) -> None:
        group = group_record(
            prompt,
            state,
            offset=offset,
            decided_to=home.prompts_low_water,
            outcomes_from=outcomes_from,
            needed=needed,
            now=home.changed_at(self._clock()),
        )
        self._writer.write(GROUPS, group, key=group.group_id, partition=home.partition)
        home.on_group(group)

    def _old_groups(self, homes: Iterable[Home]) -> dict[int, list[str]]:
        """The groups that can be forgotten, by home; seldom any."""
        if time.monotonic() < self._sweep_at:
            return {}
        found = {home.partition: home.take_expired(self._clock(), self._group_retention_seconds) for home in homes}
        more = any(len(old) >= OLD_BATCH for old in found.values())
        self._sweep_at = time.monotonic() + (AGAIN_SECONDS if more else SWEEP_SECONDS)
        return {partition: old for partition, old in found.items() if old}

    def _put_rest(self, home: Home, old_groups: Sequence[str]) -> None:
        """Write what no trajectory of this transaction writes.

        These are dead letters of undecodable results, tombstones of orphaned trajectories and old groups, and groups
        that are settled or whose count has changed.
        """
        for found, reason in home.undecodable_results:
            self._writer.dead_letter(found, reason)
            home.results.on_done(found.offset)
            self._counted.append((metrics.SPOILED, 1))
            log.warning(
                "dead_lettered", topic=COMPLETED.name, partition=home.partition, offset=found.offset, reason=reason
            )
        for own_id in home.orphaned_trajectories:
            self._writer.tombstone(PROGRESS, key=own_id, partition=home.partition)
            self._writer.tombstone(SNAPSHOTS, key=own_id, partition=home.partition)
        home.undecodable_results, home.orphaned_trajectories = [], []
        counted = [open_group_record(known, group) for known, group in home.take_changed()]
        for group in [*counted, *home.take_settled(self._clock())]:
            self._writer.write(GROUPS, group, key=group.group_id, partition=home.partition)
        for group_id in old_groups:
            self._writer.tombstone(GROUPS, key=group_id, partition=home.partition)

    def _put(self, item: PendingTransition) -> None:
        if item.offset is not None:
            item.home.results.on_done(item.offset)
        trajectory = item.home.trajectories.get(item.trajectory_id)
        if item.records.sample is not None:
            item.home.trajectories.pop(item.trajectory_id, None)
        self._write(item.home, item.trajectory_id, item.records, trajectory, opened=True)

    def _write(
        self, home: Home, own_id: str, written: OutgoingRecords, trajectory: Trajectory | None, *, opened: bool = False
    ) -> None:
        """Write the records of one trajectory. `opened`: earlier transactions have written records of it."""
        partition = home.partition
        if written.snapshot is not None:
            self._counted.append((metrics.SNAPSHOT_BYTES, len(written.snapshot.record.state)))
            self._writer.write(SNAPSHOTS, written.snapshot, key=own_id, partition=partition, trajectory_id=own_id)
        if written.request is not None and trajectory is not None:
            # One writer's records are in the order of writing, so this request is at or after this offset.
            trajectory.requested_from, trajectory.request_offset = self._request_next[partition], None
            trajectory.committed_at = 0.0
            self._asking.append(trajectory)
            self._request_next[partition] += 1
            self._writer.write(
                REQUESTED,
                written.request,
                key=own_id,
                partition=partition,
                trajectory_id=own_id,
                on_delivery=self._on_request_stored(trajectory),
            )
            self._writer.write(PROGRESS, trajectory.progress(), key=own_id, partition=partition, trajectory_id=own_id)
        if written.stop is not None:
            self._request_next[partition] += 1
            self._writer.write(REQUESTED, written.stop, key=own_id, partition=partition, trajectory_id=own_id)
        if written.sample is not None:
            sample = written.sample.record
            self._counted.append((metrics.ENDED.labels(sample.ended.value), 1))
            self._writer.write(SAMPLES, written.sample, key=sample.group_id, trajectory_id=own_id)
            if opened:
                self._writer.tombstone(PROGRESS, key=own_id, partition=partition)
                self._writer.tombstone(SNAPSHOTS, key=own_id, partition=partition)

    def _on_request_stored(self, trajectory: Trajectory) -> Callable[[int, int], None]:
        """A delivery callback that stores the request's offset, which the next request may append to."""

        def stored(partition: int, offset: int) -> None:
            trajectory.request_offset = offset
            if partition in self._request_next:
                self._request_next[partition] = max(self._request_next[partition], offset + 1)

        return stored


def fence(
    settings: BusSettings,
    name: str,
    reader: Reader,
    *,
    rules: TrajectoryRules,
    clock: Callable[[], float],
    still_needed: Callable[[], bool] = lambda: True,
    on_wait: Callable[[], None] = noop,
) -> Outbox:
    """End the transactions of earlier writers of this name, and return an outbox whose transactions follow them.

    `still_needed`, `on_wait`: see Writer. Raises BusError.
    """
    writer = Writer(
        settings,
        f"rose-{name}",
        transactional_id=f"{ENVIRONMENT_TRANSACTIONAL_PREFIX}{name}",
        still_needed=still_needed,
        on_wait=on_wait,
    )
    return Outbox(writer, reader, rules=rules, clock=clock, group_retention_seconds=settings.retention.outcomes)
