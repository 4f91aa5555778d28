"""Finished trajectories on the log: each sample with its outcome, one by one or by group.

Keeps true
- Outcomes are read before samples. Each topic is read once, in the order of the log; memory does not grow with the run
  (see `store.py`).
- A sample that is a dead letter, or that does not decode, is left out.
- A sample without an outcome waits for the trainer, or was settled after the outcomes were read.
- A group is handed out once its last member is read; groups that lack members follow at the end.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from math import inf

from rose.pipeline.samples.store import SampleStore
from rose.schemas.samples import Sample, SampleOutcome
from rose.topics.catalog import OUTCOMES, SAMPLES
from rose.topics.dead_letters import dead_lettered_places
from rose.topics.log_reader import CLOCKS_APART_SECONDS, LARGE_RECORDS, read_keyed_messages, topic_starts
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings

CLIENT = "rose-samples"

WAITING = "waiting"
"""Name in place of an outcome for a sample that has none."""


@dataclass(frozen=True, slots=True)
class FinishedTrajectory:
    """A sample with its outcome."""

    sample: Sample
    outcome: SampleOutcome | None

    @property
    def ended_as(self) -> str:
        """Name of the outcome, or `waiting`."""
        return WAITING if self.outcome is None else self.outcome.outcome.value

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest policy version that sampled its tokens; None if none was sampled."""
        versions = [span.version for span in self.sample.spans]
        return (min(versions), max(versions)) if versions else None

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(span.end - span.start for span in self.sample.spans)


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The finished trajectories of a group that the log has."""

    group_id: str
    size: int
    """Number of trajectories of the group."""
    members: tuple[FinishedTrajectory, ...]
    """In order of index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """Which finished trajectories are wanted."""

    group: str | None = None
    outcomes: frozenset[str] = frozenset()
    """Names of outcomes, or `waiting`; empty: all."""
    step: int | None = None
    """Optimizer step that settled it."""
    since: float = -inf
    """Least `completed_at`, in Unix seconds."""
    until: float = inf

    def accepts(self, found: FinishedTrajectory) -> bool:
        """Whether the trajectory is wanted."""
        outcome = found.outcome
        return (
            (self.group is None or found.sample.group_id == self.group)
            and (not self.outcomes or found.ended_as in self.outcomes)
            and (self.step is None or (outcome is not None and outcome.step == self.step))
            and self.since <= found.sample.completed_at <= self.until
        )


def read_trajectories(settings: BusSettings, wanted: SampleFilter) -> Generator[FinishedTrajectory, None, None]:
    """Yield the wanted trajectories in the order of the log. Raises TopicMissing, BusError or StoreFailed."""
    with closing(SampleStore()) as store:
        _keep_outcomes(settings, wanted, store)
        for sample in _samples(settings, wanted):
            found = FinishedTrajectory(sample, store.outcome_of(sample.trajectory_id))
            if wanted.accepts(found):
                yield found


def read_groups(settings: BusSettings, wanted: SampleFilter) -> Generator[FinishedGroup, None, None]:
    """Yield the groups with at least one wanted trajectory, whole.

    Raises TopicMissing, BusError or StoreFailed.
    """
    members_of_any_time = replace(wanted, since=-inf)
    with closing(SampleStore()) as store:
        _keep_outcomes(settings, wanted, store)
        for sample in _samples(settings, members_of_any_time):
            if store.add_sample(sample) == sample.group_size:
                yield from _group(store, sample.group_id, wanted)
        for group_id in store.groups():
            yield from _group(store, group_id, wanted)


def _group(store: SampleStore, group_id: str, wanted: SampleFilter) -> Iterator[FinishedGroup]:
    """Yield the group if one of its trajectories is wanted."""
    samples = sorted(store.take_group(group_id), key=index_of)
    members = tuple(FinishedTrajectory(sample, store.outcome_of(sample.trajectory_id)) for sample in samples)
    if any(map(wanted.accepts, members)):
        yield FinishedGroup(group_id, samples[0].group_size, members)


def index_of(sample: Sample) -> int:
    """Return the index of a sample in its group; -1 if its trajectory id has none."""
    index = sample.trajectory_id.rpartition(":")[2]
    return int(index) if index.isdecimal() else -1


def _keep_outcomes(settings: BusSettings, wanted: SampleFilter, store: SampleStore) -> None:
    for message in read_keyed_messages(
        settings, topic_starts(settings, [OUTCOMES], client_id=CLIENT), client_id=CLIENT
    ):
        if wanted.group is None or message.key.rpartition(":")[0] == wanted.group:
            outcome = message.decoded(SampleOutcome)
            if outcome is not None:
                store.add_outcome(outcome)


def _samples(settings: BusSettings, wanted: SampleFilter) -> Iterator[Sample]:
    """Yield samples from the time of the filter on, of its group if it names one."""
    dead = dead_lettered_places(settings, SAMPLES, client_id=CLIENT)
    begins = topic_starts(settings, [SAMPLES], client_id=CLIENT)
    if wanted.since > 0:
        with closing(Reader(settings, CLIENT)) as reader:
            begins = reader.offsets_at(list(begins), wanted.since - CLOCKS_APART_SECONDS)
    name = None if wanted.group is None else wanted.group.encode()
    for message in read_keyed_messages(settings, begins, client_id=CLIENT, prefetch_settings=LARGE_RECORDS):
        if (message.partition, message.offset) in dead or (name is not None and name not in (message.raw.value or b"")):
            continue  # a record without the name of the group need not be decoded
        sample = message.decoded(Sample)
        if sample is not None and (wanted.group is None or sample.group_id == wanted.group):
            yield sample
