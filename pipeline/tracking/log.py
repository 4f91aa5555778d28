"""Training steps on the log, one by one, for a consumer that can be stopped and go on.

Keeps true
- Outcomes of a step become readable together, with the trainer's transaction. A step is handed out once a later step,
  or the end of the outcomes, follows it; it is handed out again if more outcomes of it come later.
- A step is computed from the same records after every restart: the committed offsets are those of the last step that
  was handed out, and of the oldest sample that it or a later step may need.
- Samples are read only as far as the outcomes need them, so memory holds the facts of the trajectories in flight.
- Samples of other models, of evaluations, and those that are dead letters, are in no step.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from math import inf
from typing import NamedTuple, Self

from rose.pipeline.tracking.steps import SampleFacts, Settled, StepPoint, point_of
from rose.schemas.prompts import is_evaluation
from rose.schemas.samples import Sample, SampleOutcome
from rose.topics.catalog import OUTCOMES, SAMPLES, TRACKER_PREFIX
from rose.topics.dead_letters import dead_lettered_places
from rose.topics.log_reader import CLOCKS_APART_SECONDS, LARGE_RECORDS, read_keyed_messages
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope, Place
from rose.topics.settings import BusSettings

CLIENT = "rose-track"

BATCH = 500
POLL_SECONDS = 0.5
"""Most records of one read, and its longest wait."""

SOURCE: Place = (OUTCOMES, 0)


class _Read(NamedTuple):
    """A sample that was read."""

    place: Place
    offset: int
    facts: SampleFacts | None
    """None for a sample of another model."""


class StepLog:
    """Steps of one model, from the committed offsets of a consumer group on."""

    def __init__(self, settings: BusSettings, model_id: str, name: str, *, from_start: bool = False) -> None:
        """`name`: that of the tracker, which names the group. `from_start`: ignore the committed offsets.

        Raises TopicMissing or BusError.
        """
        self._model_id = model_id
        group = f"{TRACKER_PREFIX}{name}"
        self._outcomes = Reader(settings, CLIENT, group=group, report_ends=True)
        self._samples = Reader(settings, CLIENT, group=group, report_ends=True, **LARGE_RECORDS)
        self._dead = dead_lettered_places(settings, SAMPLES, client_id=CLIENT)
        partitions = range(self._samples.partition_count(SAMPLES))
        self._places: list[Place] = [(SAMPLES, number) for number in partitions]
        begins = self._begins(from_start=from_start)
        self._samples_since = self._oldest_sample(settings, begins) - CLOCKS_APART_SECONDS
        """Timestamp in Unix seconds; of an outcome that the broker stamped earlier, no sample is read."""
        self._settled_before = self._settled_earlier(settings, begins)
        """Trajectories of steps before the committed ones, whose samples are read again."""
        self._is_read_to_end = False
        """Whether the samples were read to their end since the last outcomes were read."""
        self._outcomes.assign({SOURCE: begins[SOURCE]})
        self._positions = {place: begins[place] for place in self._places}
        self._samples.assign(self._positions)
        self._facts: dict[str, _Read] = {}
        """Samples without an outcome so far, and those of the last step, by trajectory."""
        self._step: int | None = None
        """The step whose outcomes are read."""
        self._step_from = begins[SOURCE]
        """Offset of its first outcome."""
        self._settled: dict[str, SampleOutcome] = {}
        """Outcomes of that step, by trajectory."""
        self._is_handed_out = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._outcomes.close()
        self._samples.close()

    def steps(self, *, follow: bool, should_stop: Callable[[], bool]) -> Iterator[StepPoint | None]:
        """Yield steps, and None at the present end of the log, until `should_stop`.

        Ends at the first end of the log unless `follow`. Raises BusError.
        """
        while not should_stop():
            items = self._outcomes.read(BATCH, POLL_SECONDS)
            self._is_read_to_end = False
            for item in items:
                if isinstance(item, EndOfPartition):
                    yield from self._point()
                    yield None
                    if not follow:
                        return
                elif (
                    isinstance(item, Envelope)
                    and isinstance(item.record, SampleOutcome)
                    and not is_evaluation(item.record.group_id)
                ):
                    yield from self._add(item.record, item)

    def commit(self) -> None:
        """Commit the offsets to go on from after the last step that was yielded. Raises BusError."""
        needed = dict(self._positions)
        for read in self._facts.values():
            needed[read.place] = min(needed[read.place], read.offset)
        self._outcomes.commit({SOURCE: self._step_from, **needed})  # one request: outcomes never lag behind samples

    def _begins(self, *, from_start: bool) -> dict[Place, int]:
        """Return the committed offsets that the log still has, and the beginning of the other partitions."""
        places = [SOURCE, *self._places]
        ends = self._samples.all_watermarks(places)
        known = dict.fromkeys(places, None) if from_start else self._samples.committed(places)
        begins = {}
        for place in places:
            low, high = ends[place]
            offset = known[place]
            begins[place] = low if offset is None or not low <= offset <= high else offset
        return begins

    def _oldest_sample(self, settings: BusSettings, begins: Mapping[Place, int]) -> float:
        """Return the timestamp of the oldest sample to be read, in Unix seconds; minus infinity without any."""
        stamps: dict[int, float] = {}
        places = {place: begins[place] for place in self._places}
        found = read_keyed_messages(settings, places, client_id=CLIENT, prefetch_settings=LARGE_RECORDS)
        with closing(found):
            for message in found:
                stamps.setdefault(message.partition, message.timestamp_seconds)
                if len(stamps) == len(places):
                    break
        return min(stamps.values(), default=-inf)

    def _settled_earlier(self, settings: BusSettings, begins: Mapping[Place, int]) -> set[str]:
        """Return the trajectories that were settled before the first outcome to be read, since the oldest sample."""
        settled: set[str] = set()
        if self._samples_since == -inf:
            return settled
        since = self._outcomes.offsets_at([SOURCE], self._samples_since)
        with closing(read_keyed_messages(settings, since, client_id=CLIENT)) as outcomes:
            for message in outcomes:
                if message.offset >= begins[SOURCE]:
                    break
                settled.add(message.key)
        return settled

    def _add(self, outcome: SampleOutcome, at: Envelope) -> Iterator[StepPoint]:
        """Take an outcome; yield the step before, if this outcome is the first of a later one."""
        if outcome.trajectory_id not in self._facts and at.timestamp_seconds >= self._samples_since:
            self._read_samples(outcome.trajectory_id)
        read = self._facts.get(outcome.trajectory_id)
        if read is not None and read.facts is None:
            del self._facts[outcome.trajectory_id]
            return
        if outcome.step != self._step:
            yield from self._point()
            for name in self._settled:
                self._facts.pop(name, None)
            self._step, self._step_from, self._settled = outcome.step, at.offset, {}
        self._is_handed_out &= outcome.trajectory_id in self._settled
        self._settled.setdefault(outcome.trajectory_id, outcome)

    def _point(self) -> Iterator[StepPoint]:
        """Yield the step whose outcomes were read, unless it was yielded as it is."""
        if self._step is None or self._is_handed_out:
            return
        self._is_handed_out = True
        settled = []
        for name, outcome in self._settled.items():
            read = self._facts.get(name)
            settled.append(Settled(outcome, None if read is None else read.facts))
        yield point_of(self._step, settled)

    def _read_samples(self, trajectory_id: str) -> None:
        """Read samples until that of a trajectory is known, or to their present end."""
        if self._is_read_to_end:
            return
        ends = {place: high for place, (_, high) in self._samples.all_watermarks(self._places).items()}
        while trajectory_id not in self._facts and any(self._positions[place] < end for place, end in ends.items()):
            for item in self._samples.read(BATCH, POLL_SECONDS):
                place = item.topic, item.partition
                if isinstance(item, EndOfPartition):
                    self._positions[place] = max(self._positions[place], item.offset)
                    continue
                self._positions[place] = item.offset + 1
                if isinstance(item, Envelope) and isinstance(item.record, Sample):
                    self._keep(item.record, place, item.offset)
        self._is_read_to_end = trajectory_id not in self._facts

    def _keep(self, sample: Sample, place: Place, offset: int) -> None:
        if is_evaluation(sample.group_id):
            return
        if sample.trajectory_id in self._settled_before:
            self._settled_before.discard(sample.trajectory_id)
        elif (place[1], offset) not in self._dead and sample.trajectory_id not in self._facts:
            facts = SampleFacts.of(sample) if sample.model_id == self._model_id else None
            self._facts[sample.trajectory_id] = _Read(place, offset, facts)
