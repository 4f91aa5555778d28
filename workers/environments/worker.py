"""The environment worker's loop: prompts and results in; requests, snapshots and samples out. Decides nothing.

Keeps true
- Memory is only ever a fold of the log: after any failed transaction or change of homes it is built anew.
- The bus is read while environments step; homes, records and the bus belong to one thread.
- Groups are opened only while the window has room; results are always read.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, KafkaError

from schemas.arrays import count
from schemas.errors import RoseError, UsageError
from schemas.prompts import Prompt, trajectory_id
from schemas.samples import SampleOutcome
from schemas.turns import TurnResult
from topics.catalog import COMPLETED, OUTCOMES, PROMPTS
from topics.errors import BusError
from topics.reader import Reader
from topics.records import EndOfPartition, Envelope, Place
from topics.settings import BusSettings
from workers.environments import metrics
from workers.environments.home import Begun, Home, Opening
from workers.environments.outbox import Outbox, Ready
from workers.environments.recovery import Begins, recover_homes
from workers.environments.stage import Advance, Answer, Failed, Job, Refused, Reset, Stage
from workers.environments.trajectory import (
    Ending,
    Rules,
    Trajectory,
    Verdict,
    Written,
    advance,
    broken,
    failed,
    failed_at_opening,
    problem_of,
)

GROUP = "rose-environment"
"""The consumer group of all environment workers."""

BATCH = 500
"""Records taken from the bus at once."""

IDLE_SECONDS = 0.05
"""Longest wait for the bus while no environment steps; a stop is noticed within it."""

STEP_WAIT_SECONDS = 0.002
"""Longest wait for a step before the bus is looked at again."""

SESSION_MILLISECONDS = "10000"
"""After so long a silence a worker's homes go to the others. Kafka's default of 45 s would stall its trajectories."""

log = structlog.get_logger()


class WorkerFenced(RoseError):
    """Another worker has this worker's name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"another environment worker was started as {name!r} and takes its place: use another --name")


@dataclass(frozen=True, slots=True)
class _Applying:
    """A result whose step is under way."""

    home: Home
    trajectory: Trajectory
    result: TurnResult
    offset: int
    applied_at: float


@dataclass(frozen=True, slots=True)
class _Resetting:
    """A trajectory of a group that is being opened."""

    home: Home
    opening: Opening
    index: int


class EnvironmentWorker:
    """One member of the group of environment workers. `run` until stopped; `close` is part of it."""

    def __init__(
        self,
        settings: BusSettings,
        name: str,
        *,
        rules: Rules,
        window_groups: int,
        stage: Stage,
        check_environment: Callable[[str], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`check_environment` raises UsageError for a name that leads to no environment."""
        self._settings = settings
        self._name = name
        self._rules = rules
        self._window_groups = window_groups
        self._stage = stage
        self._check_environment = check_environment
        self._clock = clock
        session: dict[str, Any] = {
            "session.timeout.ms": settings.properties.get("session.timeout.ms", SESSION_MILLISECONDS)
        }
        self._reader = Reader(settings, f"rose-{name}", group=GROUP, instance=name, **session)
        self._outcomes = Reader(settings, f"rose-{name}-outcomes", group=GROUP, ends=True)
        self._outbox = Outbox(settings, name, self._reader, rules=rules, clock=clock)
        self._owned: list[int] = []
        self._stale = False
        """Memory is not that of the homes owned: build it anew before anything else."""
        self._life = 0
        self._homes: dict[int, Home] = {}
        self._jobs: list[Job] = []
        self._ready: list[Ready] = []
        self._paused = False

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set. Raises WorkerFenced, TopicMissing or BusError."""
        try:
            self._reader.subscribe([PROMPTS, COMPLETED], assigned=self._assigned, revoked=self._revoked)
            while not stop.is_set():
                try:
                    self._cycle()
                except BusError as error:
                    if error.code in (KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL):
                        raise WorkerFenced(self._name) from error
                    raise
        finally:
            self._reader.close()
            self._outcomes.close()

    def _cycle(self) -> None:
        items = self._reader.read(BATCH, 0.0 if self._stage.in_flight else IDLE_SECONDS)
        if self._stale:
            self._recover()  # what was read is read again
            return
        for item in items:
            assert isinstance(item, Envelope)
            self._take(item)
        self._settle(self._outcomes.read(BATCH, 0.0))
        self._open_groups()
        self._stage.start(self._jobs)
        self._jobs = []
        self._finish(self._stage.answers(STEP_WAIT_SECONDS if self._stage.in_flight else 0.0))
        self._write()
        self._show()

    def _assigned(self, places: list[Place]) -> dict[Place, int]:
        homes = {topic: sorted(part for other, part in places if other is topic) for topic in (PROMPTS, COMPLETED)}
        if homes[PROMPTS] != homes[COMPLETED]:
            raise RoseError("prompts and results have different numbers of partitions: see `rose topics check`")
        self._owned = homes[PROMPTS]
        self._stale = True
        return {}  # reading begins once the homes are recovered

    def _revoked(self, _places: list[Place]) -> None:
        self._owned = []
        self._stale = True

    def _recover(self) -> None:
        """Forget everything and build the homes from the log."""
        self._stale = False
        self._life += 1
        self._stage.new_life(self._life)
        self._homes, self._jobs, self._ready = {}, [], []
        if self._owned:
            self._outbox.fence()
            self._recover_homes()
            metrics.RECOVERIES.inc()
        log.info(
            "homes_recovered",
            worker=self._name,
            homes=self._owned,
            trajectories=sum(len(home.trajectories) for home in self._homes.values()),
            cannot_go_on=len(self._ready),
            unsettled_groups=self._unsettled(),
        )

    def _recover_homes(self) -> None:
        found = self._reader.committed([(topic, home) for home in self._owned for topic in (PROMPTS, COMPLETED)])
        begins = {
            place: self._reader.watermarks(place)[0] if offset is None else offset for place, offset in found.items()
        }
        self._homes, cannot = recover_homes(
            self._settings,
            {home: Begins(begins[PROMPTS, home], begins[COMPLETED, home]) for home in self._owned},
            life=self._life,
        )
        for lost in cannot:
            snapshot = lost.snapshot
            sample = failed_at_opening(snapshot.prompt, snapshot.index, lost.reason, self._clock())
            written = Written(sample=sample, ending=Ending.FAILED)
            self._ready.append(Ready(self._homes[snapshot.home], snapshot.trajectory_id, written, None))
        self._outcomes.assign({(OUTCOMES, 0): OFFSET_BEGINNING})
        while not self._settle(self._outcomes.read(BATCH, IDLE_SECONDS)):
            pass
        self._reader.assign(begins)
        self._outbox.begins(begins)
        self._paused = False

    def _take(self, envelope: Envelope) -> None:
        home, record = self._homes[envelope.partition], envelope.record
        if isinstance(record, Prompt):
            home.submitted(envelope.offset, record)
        elif isinstance(record, TurnResult):
            self._result(home, envelope.offset, record)

    def _result(self, home: Home, offset: int, result: TurnResult) -> None:
        trajectory = home.trajectories.get(result.trajectory_id)
        verdict = Verdict.LATE if trajectory is None else trajectory.judge(result)
        if trajectory is None or verdict not in (Verdict.APPLY, Verdict.FAIL):
            home.results.passed(offset)
            metrics.DROPPED.labels(verdict.value).inc()
            return
        home.results.read(offset)
        trajectory.applying = True
        now = self._clock()
        failure = f"the turn was given up: {result.reason}"
        if verdict is Verdict.APPLY:
            problem = problem_of(result, count(trajectory.tokens))
            failure = f"malformed result of {result.worker}: {problem}" if problem else ""
        if failure:
            written = failed(trajectory, failure, now)
            self._ready.append(Ready(home, trajectory.trajectory_id, written, offset))
            return
        self._jobs.append(
            Advance(
                life=self._life,
                trajectory_id=trajectory.trajectory_id,
                environment=trajectory.prompt.environment,
                ticket=_Applying(home, trajectory, result, offset, now),
                tokens=result.tokens,
                state=trajectory.state,
            )
        )

    def _settle(self, items: Sequence[Envelope | EndOfPartition]) -> bool:
        """Take outcomes in; whether the end of the topic was reached."""
        at_end = False
        for item in items:
            if isinstance(item, EndOfPartition):
                at_end = True
            elif isinstance(item.record, SampleOutcome):
                for home in self._homes.values():
                    home.settled(item.record.group_id, item.record.trajectory_id)
        return at_end

    def _open_groups(self) -> None:
        """Open groups while the window has room, home by home in turn; read prompts only while none waits."""
        able = [home for home in self._homes.values() if home.can_open]
        while able and self._unsettled() < self._window_groups:
            home = able.pop(0)
            self._open_group(home)
            if home.can_open:
                able.append(home)
        full = self._unsettled() >= self._window_groups or any(home.waits for home in self._homes.values())
        if full != self._paused:
            places = [(PROMPTS, home) for home in self._homes]
            if full:
                self._reader.pause(places)
            else:
                self._reader.resume(places)
            self._paused = full

    def _open_group(self, home: Home) -> None:
        opening = home.open_next()
        prompt = opening.prompt
        if opening.refusal:
            return
        try:
            self._check_environment(prompt.environment)
        except UsageError as error:
            opening.awaited = 0
            home.refuse(opening, str(error))
            return
        self._jobs += [
            Reset(
                life=self._life,
                trajectory_id=trajectory_id(prompt.group_id, index),
                environment=prompt.environment,
                ticket=_Resetting(home, opening, index),
                seed=prompt.seed,
                arguments=prompt.arguments,
            )
            for index in range(prompt.group_size)
        ]

    def _finish(self, answers: Sequence[tuple[Job, Answer]]) -> None:
        """Take in what the environments answered."""
        now = self._clock()
        for job, answer in answers:
            if job.life != self._life:
                continue
            ticket = job.ticket
            if isinstance(ticket, _Resetting):
                self._was_reset(ticket, answer)
            else:
                assert isinstance(ticket, _Applying)
                self._stepped(ticket, answer, now)

    def _was_reset(self, ticket: _Resetting, answer: Answer) -> None:
        opening = ticket.opening
        opening.awaited -= 1
        if isinstance(answer, Begun):
            opening.begun[ticket.index] = answer
        elif isinstance(answer, Failed):
            opening.begun[ticket.index] = answer.failure
        elif isinstance(answer, Refused) and not opening.refusal:
            ticket.home.refuse(opening, answer.reason)

    def _stepped(self, ticket: _Applying, answer: Answer, now: float) -> None:
        trajectory, result = ticket.trajectory, ticket.result
        if isinstance(answer, Failed):
            log.warning("environment_failed", trajectory=trajectory.trajectory_id, failure=answer.failure)
            written = broken(trajectory, result, answer.failure, applied_at=ticket.applied_at, now=now)
        else:
            assert not isinstance(answer, Begun | Refused)
            metrics.STEP_SECONDS.observe(answer.environment_seconds)
            written = advance(trajectory, result, answer, rules=self._rules, applied_at=ticket.applied_at, now=now)
        metrics.APPLIED.inc()
        self._ready.append(Ready(ticket.home, trajectory.trajectory_id, written, ticket.offset))

    def _write(self) -> None:
        """Put what is ready on the log; if that fails, all of it is decided again from the log."""
        ready, self._ready = self._ready, []
        try:
            ended = self._outbox.commit(self._homes, ready)
        except BusError as error:
            if error.code == KafkaError.FENCED_INSTANCE_ID:
                raise
            log.warning("transaction_failed", worker=self._name, reason=str(error))
            self._stale = True
            return
        if ended:
            self._stage.let_go(ended)

    def _unsettled(self) -> int:
        return sum(len(home.unsettled) for home in self._homes.values())

    def _show(self) -> None:
        metrics.HOMES.set(len(self._homes))
        metrics.TRAJECTORIES.set(sum(len(home.trajectories) for home in self._homes.values()))
        metrics.UNSETTLED.set(self._unsettled())
        metrics.LIVE.set(self._stage.live)
