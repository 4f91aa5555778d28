"""What an environment worker puts on the log: one transaction for all that is ready.

Keeps true
- Requests, snapshots, samples, dead letters and the offsets of the inputs that led to them are committed together.
- Every transaction names both inputs of each home that it writes to: one by a worker that has lost the home fails, and
  the next owner, who asks for those offsets first, waits for one that is under way.
- A group's trajectories are opened in one transaction, and the prompts of a home in the order of the log.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from schemas.environments import LogPosition
from schemas.prompts import trajectory_id
from topics.catalog import COMPLETED, PROMPTS, REQUESTED, SAMPLES, SNAPSHOTS
from topics.errors import BusError
from topics.reader import Reader
from topics.records import Envelope, Place
from topics.settings import BusSettings
from topics.writer import Writer
from workers.environments import metrics
from workers.environments.home import Home, Opening
from workers.environments.trajectory import Ending, Rules, Written, begin, failed_at_opening, first_request

OFFSETS_SECONDS = 1.0
"""Inputs without consequences (late results) are committed after this long, when nothing else is."""

END_SECONDS = 5.0
"""How old the end of a partition may be that is noted as a group's beginning: asking costs a round trip."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Ready:
    """What goes into the next transaction for one trajectory."""

    home: Home
    trajectory_id: str
    written: Written
    offset: int | None
    """Of the result that led to it; None when no result did."""


class Outbox:
    """Commits what is ready. After a BusError nothing of it counts: `fence`, and decide again from the log."""

    def __init__(
        self, settings: BusSettings, name: str, reader: Reader, *, rules: Rules, clock: Callable[[], float]
    ) -> None:
        """`reader` is the member of the group whose offsets are committed."""
        self._settings = settings
        self._name = name
        self._reader = reader
        self._rules = rules
        self._clock = clock
        self._writer: Writer | None = None
        self._committed: dict[Place, int] = {}
        self._committed_at = 0.0
        self._requested_ends: dict[int, tuple[float, int]] = {}

    def fence(self) -> None:
        """Make sure of a sound writer: transactions of an earlier one of this name are over. Raises BusError."""
        if self._writer is None:
            transactional_id = f"rose-environment.{self._name}"
            self._writer = Writer(self._settings, f"rose-{self._name}", transactional_id=transactional_id)

    def begins(self, offsets: Mapping[Place, int]) -> None:
        """The homes were recovered; these are the committed offsets of their inputs."""
        self._committed = dict(offsets)
        self._requested_ends = {}

    def commit(self, homes: Mapping[int, Home], ready: Sequence[Ready]) -> list[str]:
        """One transaction, if there is anything to say; the trajectories that have ended. Raises BusError."""
        openings = [(home, opening) for home in homes.values() for opening in home.take_complete()]
        touched = {home.partition for home, _ in openings} | {item.home.partition for item in ready}
        if not touched and time.monotonic() - self._committed_at >= OFFSETS_SECONDS:
            moved = self._offsets(homes.values())
            touched = {place[1] for place, offset in moved.items() if offset != self._committed[place]}
        if not touched:
            return []
        assert self._writer is not None
        began = time.monotonic()
        try:
            self._writer.begin()
            ended = [ended_id for home, opening in openings for ended_id in self._put_opening(home, opening)]
            for item in ready:
                self._put(item)
            offsets = self._offsets(homes[partition] for partition in touched)
            self._writer.commit(offsets, self._reader)
        except BusError:
            self._writer = None
            raise
        self._committed.update(offsets)
        self._committed_at = time.monotonic()
        metrics.TRANSACTION_SECONDS.observe(self._committed_at - began)
        return ended + [item.trajectory_id for item in ready if item.written.sample is not None]

    def _offsets(self, homes: Iterable[Home]) -> dict[Place, int]:
        offsets: dict[Place, int] = {}
        for home in homes:
            offsets[PROMPTS, home.partition] = home.prompts_low_water
            offsets[COMPLETED, home.partition] = home.results.low_water
        return offsets

    def _put_opening(self, home: Home, opening: Opening) -> list[str]:
        """Open a group, or refuse its prompt; the trajectories whose environments are not needed any more."""
        assert self._writer is not None
        prompt, now = opening.prompt, self._clock()
        ids = [trajectory_id(prompt.group_id, index) for index in range(prompt.group_size)]
        if opening.refusal:
            letter = Envelope(prompt, PROMPTS, home.partition, opening.offset, prompt.group_id, now)
            self._writer.dead_letter_record(letter, opening.refusal)
            metrics.REFUSED.inc()
            log.warning("prompt_refused", group=prompt.group_id, reason=opening.refusal)
            return ids if opening.begun else []
        # Nothing of these trajectories is on the log yet, so what comes lies at or after any end seen so far.
        opened = LogPosition(requested=self._requested_end(home.partition), completed=home.results.next)
        ended = []
        for index, own_id in enumerate(ids):
            begun = opening.begun[index]
            if isinstance(begun, str):
                log.warning("environment_failed", trajectory=own_id, failure=begun)
                written = Written(sample=failed_at_opening(prompt, index, begun, now), ending=Ending.FAILED)
            else:
                trajectory = begin(
                    prompt,
                    index,
                    home=home.partition,
                    opened=opened,
                    observation=begun.observation,
                    state=begun.state,
                )
                written = first_request(trajectory, self._rules, now)
                if written.sample is None:
                    home.trajectories[own_id] = trajectory
            if written.sample is not None:
                ended.append(own_id)
            self._write(home, own_id, written, opened=False)
        metrics.OPENED.inc(len(ids))
        return ended

    def _requested_end(self, partition: int) -> int:
        """An end that the home's requests had a moment ago."""
        asked_at, end = self._requested_ends.get(partition, (-math.inf, 0))
        if time.monotonic() - asked_at > END_SECONDS:
            end = self._reader.watermarks((REQUESTED, partition))[1]
            self._requested_ends[partition] = time.monotonic(), end
        return end

    def _put(self, item: Ready) -> None:
        if item.offset is not None:
            item.home.results.done(item.offset)
        if item.written.sample is not None:
            item.home.trajectories.pop(item.trajectory_id, None)
        self._write(item.home, item.trajectory_id, item.written, opened=True)

    def _write(self, home: Home, own_id: str, written: Written, *, opened: bool) -> None:
        assert self._writer is not None
        if written.snapshot is not None:
            metrics.SNAPSHOT_BYTES.inc(len(written.snapshot.state))
            self._writer.write(SNAPSHOTS, written.snapshot, key=own_id, partition=home.partition, trajectory_id=own_id)
        if written.request is not None:
            self._writer.write(REQUESTED, written.request, key=own_id, partition=home.partition, trajectory_id=own_id)
        if written.sample is not None and written.ending is not None:
            metrics.ENDED.labels(written.ending.value).inc()
            self._writer.write(SAMPLES, written.sample, key=written.sample.group_id, trajectory_id=own_id)
            if opened:
                self._writer.tombstone(SNAPSHOTS, key=own_id, partition=home.partition)
