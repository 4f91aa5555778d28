"""Reads complete groups and writes outcomes.

SampleStream and `WeightPublisher` are the whole interface of a trainer to the bus.

Keeps true
- A stream hands a group out once; a later stream hands it out again only if it was not settled.
- A trajectory gets one outcome, however often its trainer is killed: outcomes, the manifest that belongs to them and
  the resume point are one transaction.
- The trainer's position is on the log; a stream needs no checkpoint. A stream begins before the oldest sample without
  an outcome and drops samples that have one, so it reads only what is still live. `groups.py` says why this position is
  sufficient.
- A model has one stream: a newer stream fences the older one, which then cannot settle anything (`fencing.py`).
- Samples of evaluations are skipped: they are in no group, and the evaluator settles them.
- A message that is no valid sample, or a sample of an unknown trajectory, becomes a dead letter once.
- A sample is deleted only after every trainer that the broker remembers, of whatever model, has settled it.

Example (any trainer)
    tensors = FolderTensors(model, folder)
    with SampleStream(settings, "policy") as stream, WeightPublisher(settings, "policy") as publisher:
        version = stream.publish(publisher, tensors)
        while groups := stream.take(16):
            selected = [select_samples(group, version, rules=rules) for group in groups]
            learn([group.trained for group in selected])
            outcomes = outcomes_of(selected, step=version + 1, policy_version=version, now=time.time())
            version = stream.publish(publisher, tensors, outcomes)
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Self

import structlog

from rose.schemas.errors import RoseError, UsageError
from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import is_evaluation
from rose.schemas.samples import Sample, SampleOutcome
from rose.topics.admin import delete_before, lowest_committed
from rose.topics.catalog import GROUPS, OUTCOMES, SAMPLES, TRAINER_PREFIX
from rose.topics.dead_letters import dead_lettered_places
from rose.topics.errors import BusError
from rose.topics.health import HEALTH
from rose.topics.log_reader import await_transactions, read_to_end
from rose.topics.metrics import register
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope, InvalidMessage, Item, Place
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.trainer import metrics
from rose.workers.trainer.fencing import CLIENT_ID, OUTCOMES_PLACE, FencedCommitter
from rose.workers.trainer.groups import CompleteGroup, GroupAssembly, ResumePoint, SampleStatus

if TYPE_CHECKING:  # both import torch, which a reader of samples does not need
    from torch import Tensor

    from rose.workers.weights.manifests import SignedManifest
    from rose.workers.weights.publish import WeightPublisher

BATCH = 256
"""Most records taken from librdkafka in one read."""

LOOK_SECONDS = 0.2
"""Longest wait of one read for samples; a stop is noticed within it."""

DELETING_SECONDS = 3600.0
"""Interval of deleting samples that are settled and old enough."""

log = structlog.get_logger("trainer")


class WrongLog(UsageError):
    """The log is another one than the trainer has read before."""


class StreamStopped(RoseError):
    """The stream was stopped before it had recovered its position."""

    def __init__(self) -> None:
        super().__init__("the trainer was asked to stop before it had read back where it stands")


@dataclass(frozen=True, slots=True)
class Settlement:
    """The content of one settling transaction, decided but not committed."""

    stream: "SampleStream"
    outcomes: tuple[SampleOutcome, ...]
    resume: ResumePoint

    def commit(self, manifest: "SignedManifest | None" = None) -> None:
        """Commit the outcomes, the resume point and the manifest of the version that was trained on them.

        On any thread; settlements may be committed in any order.

        A settlement that is never committed settles nothing: the next stream hands its groups out again.

        Raises BusError, or StreamStopped if a transaction's outcome was still unknown at the stop; the stream is
        unusable then. Raises UsageError if the stream is closed.
        """
        self.stream._commit(self, manifest)


class SampleStream:
    """The complete groups that no trainer of the model has settled.

    A context manager; its methods are for one thread.
    """

    def __init__(
        self,
        settings: BusSettings,
        model_id: str,
        *,
        total_groups: int = 0,
        stop: Event | None = None,
    ) -> None:
        """Fences any other stream of the model and recovers the position from the log.

        `total_groups`: the run ends when this many groups are settled or refused; 0 means never. `stop` ends waiting
        for groups and for an unreachable broker.

        Raises StreamStopped if `stop` is set before the position is recovered, TopicMissing, BusError, and WrongLog if
        the samples topic ends before the committed position.
        """
        register(metrics.TRAINER)
        self.model_id = model_id
        self._settings, self._stop = settings, stop or Event()
        self._total = total_groups
        self._publishing = False
        self._committed_groups: deque[str] = deque()
        """Groups that were committed on any thread; the stream's thread passes them to the assembly."""
        self._committer = FencedCommitter(settings, model_id, self._stop)
        self._reader = Reader(
            settings, CLIENT_ID, group=f"{TRAINER_PREFIX}{model_id}", report_ends=True, on_wait=self.check_stopped
        )
        self.fresh = False
        """Whether no trainer of the model has settled anything on this log, as far as the broker remembers."""
        self._dead_lettered: set[tuple[int, int]] | None = None
        self._handed_out: set[str] = set()
        self._ended_groups: set[str] = set()
        """Groups that count towards `total_groups`: settled or refused."""
        try:
            self._recover_position()
        except BaseException as error:
            self.close()
            if isinstance(error, BusError) and self._stop.is_set():
                raise StreamStopped from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[CompleteGroup]:
        """Iterate over groups one by one; a second iteration continues with the next group. Raises BusError."""
        while groups := self.take(1):
            yield groups[0]

    @property
    def ended(self) -> bool:
        """Whether all groups of the run are settled or refused."""
        return bool(self._total) and len(self._ended_groups) >= self._total

    def check_stopped(self) -> None:
        """Report progress to the health check; raises StreamStopped if `stop` is set. A callback for waits."""
        HEALTH.report_progress()
        if self._stop.is_set():
            raise StreamStopped

    def take(
        self, count: int, *, on_complete: Callable[[CompleteGroup], None] | None = None
    ) -> tuple[CompleteGroup, ...]:
        """Wait for the next `count` groups, in the order in which they became complete.

        `on_complete` is called with the first of these groups, in the same order, while the others are awaited. If the
        run ends meanwhile, because a prompt was refused, fewer of them may be returned.

        Returns fewer groups if the run has fewer left, and none if the run has ended or `stop` is set. Raises BusError.
        """
        seen = 0
        while not self._stop.is_set():
            left = self._total - len(self._ended_groups | self._handed_out)
            target = min(count, left) if self._total else count
            if target <= 0:
                break
            if self._assembly.complete_groups >= target:
                groups = self._assembly.take(target)
                self._handed_out.update(group.group_id for group in groups)
                return groups
            longest = LOOK_SECONDS
            if on_complete is not None and (more := self._assembly.peek(seen + 1, after=seen)):
                on_complete(more[0])
                seen, longest = seen + 1, 0.0
            for item in self._reader.read(BATCH, longest):
                self._on_item(item)
            HEALTH.report("waits for groups")
            metrics.HELD_SAMPLES.set(self._assembly.held_samples)
            self._delete_expired()
        return ()

    def settle(self, outcomes: Sequence[SampleOutcome]) -> None:
        """Commit the outcomes of all trajectories of some groups.

        Groups that are settled already are skipped, if they were settled since the oldest sample without an outcome or
        named by the last settlement before this stream. Raises ValueError if a trajectory of a group has no outcome,
        and BusError.
        """
        self.settlement(outcomes).commit()

    def settlement(self, outcomes: Sequence[SampleOutcome]) -> Settlement:
        """The transaction that `settle` would commit, to be committed later. Raises ValueError."""
        by_group: dict[str, set[str]] = {}
        for outcome in outcomes:
            by_group.setdefault(outcome.group_id, set()).add(outcome.trajectory_id)
        fresh = {name for name in by_group if not self._assembly.is_settled(name)}
        for name in fresh:
            if left_out := set(self._assembly.members(name)) - by_group[name]:
                raise ValueError(f"group {name} is settled whole: {min(left_out)} has no outcome")
        while self._committed_groups:
            self._assembly.on_committed([self._committed_groups.popleft()])
        resume = self._assembly.settle(by_group.keys(), outcomes_end=self._outcomes_end)
        self._handed_out -= fresh
        if self._total:
            self._ended_groups |= fresh
        return Settlement(self, tuple(one for one in outcomes if one.group_id in fresh), resume)

    def publish(
        self,
        publisher: "WeightPublisher",
        named_tensors: "Iterable[tuple[str, Tensor]]",
        outcomes: Sequence[SampleOutcome] = (),
    ) -> int:
        """Publish the next version and settle the groups that it was trained on in one transaction.

        Training goes on meanwhile.

        Returns the version's number. The tensors are copied before this returns; a later failure is raised by the next
        call, or by the publisher's `close`. The first call of a process resumes: if the policy is the newest on the
        log, it is published again under its number as an anchor; otherwise it begins a new epoch. Raises what `settle`
        and `WeightPublisher.publish` raise.
        """
        publisher.wait_until_published()  # before the copy, so that there are at most two copies
        settlement = self.settlement(outcomes)
        snapshot, newest, version = publisher.snapshot(named_tensors), publisher.newest, publisher.next_version
        if newest is not None and not self._publishing:
            version = newest.version if newest.digest == snapshot.digest() else publisher.begin_epoch()
        self._publishing = True
        publisher.publish_snapshot(snapshot, version, settlement.commit)
        return version

    def close(self) -> None:
        """Close the stream.

        Groups that are not settled are handed out again by the model's next stream; a commit under way still completes.
        """
        self._committer.close()
        self._reader.close()

    def _recover_position(self) -> None:
        places: list[Place] = [(SAMPLES, part) for part in range(self._reader.partition_count(SAMPLES))]
        committed = self._committer.claim(self._reader, places)
        await_transactions(self._settings, [OUTCOMES_PLACE], client_id=CLIENT_ID, on_wait=self.check_stopped)
        forgotten = None in committed.values()  # the broker drops the offsets of a group without members after a week
        self.fresh = all(committed[place] is None for place in places)
        known_from = 0 if self._total or forgotten else committed[OUTCOMES_PLACE] or 0
        low, self._outcomes_end = self._reader.watermarks(OUTCOMES_PLACE)
        if low > known_from:
            reason = f"outcomes are kept for {self._settings.retention.outcomes / 86_400:g} days"
            log.warning("outcomes_expired", from_offset=known_from, kept_from=low, reason=reason)
        begin = {OUTCOMES_PLACE: max(low, known_from)}
        settled = (one.record for one in self._read_back(begin))
        spans = {place[1]: self._begin_and_end(place, committed[place]) for place in places}
        self._committed = {part: first for part, (first, _) in spans.items()}
        self._assembly = GroupAssembly(
            ResumePoint(dict(self._committed), known_from),
            {part: end for part, (_, end) in spans.items()},
            settled=(
                one.group_id for one in settled if isinstance(one, SampleOutcome) and not is_evaluation(one.group_id)
            ),
        )
        self._delete_at = 0.0
        begins = {(SAMPLES, part): offset for part, offset in self._committed.items()}
        if self._total:
            self._ended_groups.update(self._assembly.settled)
            begins |= self._catch_up()
        self._reader.assign(begins)

    def _catch_up(self) -> dict[Place, int]:
        """Read all group records and return the offsets that follow.

        Reading to the end ensures that a refused group whose prompt was mended later does not count.
        """
        places: list[Place] = [(GROUPS, part) for part in range(self._reader.partition_count(GROUPS))]
        begins = {place: low for place, (low, _) in self._reader.all_watermarks(places).items()}
        for envelope in self._read_back(begins):
            self._on_group(envelope)
            begins[GROUPS, envelope.partition] = envelope.offset + 1
        return begins

    def _read_back(self, begins: Mapping[Place, int]) -> Iterator[Envelope]:
        return read_to_end(self._settings, begins, client_id=CLIENT_ID, on_wait=self.check_stopped)

    def _begin_and_end(self, place: Place, committed: int | None) -> tuple[int, int]:
        low, high = self._reader.watermarks(place)
        begin = low if committed is None else committed
        if begin > high:
            raise WrongLog(
                f"this trainer has read samples up to offset {begin} of partition {place[1]}, which ends at {high}: "
                "the broker has lost records; take another --namespace"
            )
        if begin < low:
            log.error("samples_lost", partition=place[1], from_offset=begin, kept_from=low)
        return max(begin, low), high

    def _on_item(self, item: Item) -> None:
        if item.topic is GROUPS:
            if not isinstance(item, EndOfPartition):
                self._on_group(item)
            return
        if isinstance(item, EndOfPartition):  # transaction markers may follow the last record
            self._assembly.on_read(item.partition, item.offset - 1)
            return
        self._assembly.on_read(item.partition, item.offset)
        if isinstance(item, InvalidMessage):
            self._dead_letter(item, item.reason)
        elif not isinstance(item.record, Sample):
            self._dead_letter(item, "it has no value")
        elif item.record.model_id != self.model_id:
            metrics.SAMPLES.labels(metrics.OTHER_MODEL).inc()
        elif is_evaluation(item.record.group_id):
            metrics.SAMPLES.labels(metrics.EVALUATION).inc()
        else:
            self._on_sample(item, item.record)

    def _on_sample(self, item: Envelope, sample: Sample) -> None:
        taken = self._assembly.on_sample(
            sample, partition=item.partition, offset=item.offset, outcomes_end=self._outcomes_end
        )
        metrics.SAMPLES.labels(taken.value).inc()
        if taken is SampleStatus.STRANGER:
            self._dead_letter(item, f"{sample.trajectory_id} is no trajectory of group {sample.group_id}")
        elif taken is SampleStatus.DUPLICATE and not self._assembly.is_from_before(item.partition, item.offset):
            log.warning("sample_dropped", trajectory=sample.trajectory_id, reason="it has come before")

    def _on_group(self, item: Envelope | InvalidMessage) -> None:
        """Count a group as ended, or not, from its record."""
        if isinstance(item, Envelope) and isinstance(item.record, Group):
            name = item.record.group_id
            if is_evaluation(name):
                return
            if item.record.state is not GroupState.OPEN:
                self._ended_groups.add(name)
            elif not self._assembly.is_settled(name):
                self._ended_groups.discard(name)  # a corrected prompt has opened the group

    def _dead_letter(self, item: Envelope | InvalidMessage, reason: str) -> None:
        metrics.SAMPLES.labels(metrics.DEAD_LETTER).inc()
        if self._dead_lettered is None:
            self._dead_lettered = dead_lettered_places(self._settings, SAMPLES, client_id=CLIENT_ID)
        if (item.partition, item.offset) in self._dead_lettered:
            return
        log.warning("dead_lettered", topic=SAMPLES.name, partition=item.partition, offset=item.offset, reason=reason)
        self._committer.dead_letter(item, reason)

    def _commit(self, settlement: Settlement, manifest: "SignedManifest | None") -> None:
        offsets: dict[Place, int] = {(SAMPLES, part): at for part, at in settlement.resume.offsets.items()}
        offsets[OUTCOMES_PLACE] = settlement.resume.outcomes_from

        def write(writer: Writer) -> None:
            for outcome in settlement.outcomes:
                name = outcome.trajectory_id
                writer.write(OUTCOMES, outcome, key=name, trajectory_id=name, on_delivery=self._on_stored)
            if manifest is not None:
                manifest.write(writer)

        self._committer.commit(write, offsets, self._reader)
        self._committed = dict(settlement.resume.offsets)
        self._committed_groups.extend({outcome.group_id for outcome in settlement.outcomes})

    def _on_stored(self, _partition: int, offset: int) -> None:
        self._outcomes_end = max(self._outcomes_end, offset + 1)

    def _delete_expired(self) -> None:
        if time.monotonic() < self._delete_at:
            return
        self._delete_at = time.monotonic() + DELETING_SECONDS
        own: Mapping[Place, int] = {(SAMPLES, part): offset for part, offset in self._committed.items()}
        try:  # trainers of other models read the same topic
            read = lowest_committed(self._settings, TRAINER_PREFIX, list(own), client_id=CLIENT_ID)
            needed = {place: min(offset, read.get(place, offset)) for place, offset in own.items()}
            delete_before(self._settings, needed, client_id=CLIENT_ID)
        except RoseError as error:
            log.warning("records_not_deleted", reason=str(error))
