"""A log written by hand for tests of commands that read the log."""

from collections.abc import Sequence

import msgspec

from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.progress import Applied, Group, GroupState, TrajectoryProgress
from rose.schemas.prompts import Prompt, Sampling
from rose.schemas.record import Record
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Outcome, Sample, SampleOutcome, SampleTurn
from rose.schemas.turns import TurnDispatch, TurnRequest, TurnResult, TurnTimes, context_fields
from rose.schemas.wire import encode
from rose.topics.admin import create_topics
from rose.topics.catalog import (
    COMPLETED,
    DISPATCHED,
    GROUPS,
    HEARTBEATS,
    OUTCOMES,
    PROGRESS,
    PROMPTS,
    REQUESTED,
    SAMPLES,
    Partitions,
    Topic,
    home_partition,
)
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.golden.examples import EXAMPLES

PARTITIONS = Partitions(home=4, slots=2, samples=2, chunks=1)
GROUP_SIZE = 2


class Log:
    """Writes the records of a run in order. Times are small numbers of unix seconds."""

    def __init__(self, settings: BusSettings) -> None:
        create_topics(settings, PARTITIONS)
        self.settings = settings
        self.writer = Writer(settings, "log-kit")

    def prompt(self, group_id: str, *, partition: int | None = None, key: str | None = None) -> int:
        """Submit a prompt to its home or to another partition; return its offset."""
        prompt = Prompt(group_id=group_id, group_size=GROUP_SIZE, environment="calculator", seed=1)
        return self.put(PROMPTS, prompt, partition=self.home(group_id) if partition is None else partition, key=key)

    def group(
        self, group_id: str, state: GroupState = GroupState.OPEN, *, offset: int = 0, decided_to: int | None = None
    ) -> None:
        record = Group(
            group_id=group_id,
            group_size=GROUP_SIZE,
            state=state,
            offset=offset,
            decided_to=decided_to,
            changed_at=1.0,
        )
        self.put(GROUPS, record, partition=self.home(group_id), key=group_id)

    def progress(self, name: str, *, turn: int = 0, ended: bool = False) -> None:
        group_id, index = self._of(name)
        if ended:
            self.writer.tombstone(PROGRESS, key=name, partition=self.home(group_id))
            self.writer.flush()
            return
        applied = tuple(Applied(0, 1, 1.0, 0.0, 0.0) for _ in range(turn))
        record = TrajectoryProgress(
            trajectory_id=name,
            group_id=group_id,
            index=index,
            turn=turn,
            requested_from=0,
            prompted=1,
            applied=applied,
        )
        self.put(PROGRESS, record, partition=self.home(group_id), key=name)

    def request(self, name: str, *, turn: int = 0, at: float = 100.0) -> TurnRequest:
        group_id, _ = self._of(name)
        record = TurnRequest(
            trajectory_id=name,
            group_id=group_id,
            home=self.home(group_id),
            environment="calculator",
            turn=turn,
            **context_fields(b"\x01\x00\x00\x00"),
            sampling=Sampling(),
            requested_at=at,
            patience_seconds=60.0,
        )
        self.put(REQUESTED, record, partition=record.home, key=name)
        return record

    def dispatch(self, request: TurnRequest) -> None:
        example = next(record for record in EXAMPLES if isinstance(record, TurnDispatch))
        request_bytes, queued_at = msgspec.Raw(encode(request)), request.requested_at + 0.02
        record = msgspec.structs.replace(
            example, request_wire=request_bytes, home=request.home, attempt=0, queued_at=queued_at
        )
        self.put(DISPATCHED, record, partition=record.slot, key=request.trajectory_id)

    def result(self, request: TurnRequest) -> TurnResult:
        example = next(record for record in EXAMPLES if isinstance(record, TurnResult))
        record = msgspec.structs.replace(
            example,
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            home=request.home,
            turn=request.turn,
            attempt=0,
            times=TurnTimes(requested_at=request.requested_at, finished_at=request.requested_at + 1),
        )
        self.put(COMPLETED, record, partition=request.home, key=request.trajectory_id)
        return record

    def sample(self, name: str, turns: Sequence[SampleTurn] = ()) -> None:
        group_id, _ = self._of(name)
        example = next(record for record in EXAMPLES if isinstance(record, Sample))
        spans = (VersionSpan(0, 1, 0),)
        record = msgspec.structs.replace(
            example, trajectory_id=name, group_id=group_id, group_size=GROUP_SIZE, turns=tuple(turns), spans=spans
        )
        self.put(SAMPLES, record, key=group_id)

    def outcome(self, name: str, outcome: Outcome = Outcome.TRAINED, *, at: float = 2e9, reason: str = "") -> None:
        record = SampleOutcome(
            trajectory_id=name,
            group_id=self._of(name)[0],
            outcome=outcome,
            step=1,
            policy_version=1,
            reason=reason,
            recorded_at=at,
        )
        self.put(OUTCOMES, record, key=name)

    def heartbeat(self, **changes: object) -> None:
        example = next(record for record in EXAMPLES if isinstance(record, SlackHeartbeat))
        record = msgspec.structs.replace(example, **changes)
        self.put(HEARTBEATS, record, key=record.worker)

    def put(self, topic: Topic, record: Record, *, partition: int | None = None, key: str | None = None) -> int:
        """Write one record and wait until it is stored; return its offset."""
        offsets: list[int] = []
        self.writer.write(
            topic, record, key=key or "", partition=partition, on_delivery=lambda _, offset: offsets.append(offset)
        )
        self.writer.flush()
        return offsets[0]

    def home(self, group_id: str) -> int:
        return home_partition(group_id, PARTITIONS.home)

    def _of(self, name: str) -> tuple[str, int]:
        group_id, _, index = name.rpartition(":")
        return group_id, int(index)
