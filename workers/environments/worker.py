"""The environment worker's loop: reads prompts and results; writes requests, progress and samples. It decides nothing.

Keeps true
- State in memory is always a fold of the log: after a failed transaction, a change of homes or an error of the broker
  the worker builds the state again. It polls the consumer group during a recovery, and on Apache Kafka also during a
  commit that contains its offsets, so that members that join or leave need not wait. Records that are read during a
  commit are kept.
- The bus is read while environments step. Homes, records and the bus client belong to one thread.
- Groups are opened only while the window has room; results are always read.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from rose.schemas.arrays import count
from rose.schemas.errors import ThreadRefused
from rose.schemas.progress import SettleRequest
from rose.schemas.prompts import Prompt, is_evaluation
from rose.schemas.samples import Ending, SampleOutcome
from rose.schemas.turns import TurnResult
from rose.topics import tracing
from rose.topics.catalog import COMPLETED, ENVIRONMENT_GROUP, EVALUATIONS, OUTCOMES, PROMPTS, SETTLES
from rose.topics.errors import TopicMissing
from rose.topics.health import HEALTH
from rose.topics.log_reader import read_to_end
from rose.topics.metrics import register
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope, InvalidMessage, Item, Place
from rose.topics.settings import BusSettings
from rose.workers.environments import metrics
from rose.workers.environments.early_endings import (
    ending_at_result,
    overdue_endings,
    stale_endings,
    surplus_endings,
)
from rose.workers.environments.home import Home
from rose.workers.environments.jobs import EnvironmentFailure, Job, JobResult, ResetRefused, StepJob
from rose.workers.environments.log_cleaner import LogCleaner
from rose.workers.environments.membership import RECOVERABLE, Membership, RecoveryAbandoned, RecoveryPolicy
from rose.workers.environments.outbox import Outbox, PendingTransition, fence
from rose.workers.environments.prompt_admission import PendingReset, admission_error, reset_jobs
from rose.workers.environments.prompt_decisions import DecisionKind, PromptDecision, ResetResult
from rose.workers.environments.recovery import outcomes_from, recover_homes
from rose.workers.environments.rounds import Rounds
from rose.workers.environments.runner_pool import RunnerPool
from rose.workers.environments.trajectory import ResultVerdict, Trajectory, TrajectoryRules, result_error
from rose.workers.environments.transitions import (
    OutgoingRecords,
    advance,
    end_at_result,
    end_early,
    fail_trajectory,
    fail_unrecovered,
    put_on_hold,
    request_again,
)

BATCH = 500
"""Most records taken from the bus in one read."""

IDLE_SECONDS = 0.05
"""Longest wait for the bus while no environment steps; a stop is noticed within it."""

STEP_WAIT_SECONDS = 0.002
"""Longest wait for a step before the bus is read again."""

DEADLINE_CHECK_SECONDS = 1.0
"""Time between two searches for overdue trajectories."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Applying:
    """A result whose environment step is running."""

    home: Home
    trajectory: Trajectory
    result: TurnResult
    offset: int
    applied_at: float


class EnvironmentWorker:
    """One member of the consumer group of environment workers. `run` works until stopped and then closes everything."""

    def __init__(
        self,
        settings: BusSettings,
        name: str,
        *,
        rules: TrajectoryRules,
        rounds: Rounds,
        runners: RunnerPool,
        check_environment: Callable[[str], object],
    ) -> None:
        """`name`: unique name of the worker.

        `rounds`: how many groups may be active. `check_environment` raises UsageError if a name leads to no
        environment.
        """
        register(metrics.ENVIRONMENT)
        self._settings = settings
        self._name = name
        self._rules = rules
        self._rounds = rounds
        self._runners = runners
        self._check_environment = check_environment
        self._member = Membership(settings, name, ENVIRONMENT_GROUP, on_wait=self._on_wait)
        self._outcomes = Reader(settings, f"rose-{name}-outcomes", group=ENVIRONMENT_GROUP, on_wait=self._on_wait)
        self._outbox: Outbox | None = None
        """None before the first recovery."""
        self._has_lost_log = False
        """Whether topics were missing since the last recovery: an empty broker may have taken the broker's place."""
        self._recovery_policy = RecoveryPolicy(name)
        self._log_cleaner = LogCleaner(settings, name)
        self._stop = threading.Event()
        self._generation = 0
        self._homes: dict[int, Home] = {}
        self._jobs: list[Job] = []
        self._ready: list[PendingTransition] = []
        self._early: list[Item] = []
        """Items that were read during a commit or a wait."""
        self._outcomes_next = 0
        """An offset of the outcomes topic, at or before its end."""
        self._paused = False
        self._next_deadline_check = 0.0

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set. Raises WorkerFenced if another worker has this name, or another RoseError."""
        self._stop = stop
        try:
            self._member.join()
            while not stop.is_set():
                try:
                    self._cycle()
                    if self._homes:
                        self._recovery_policy.on_success()
                    HEALTH.report(f"owns homes {self._member.homes}" if self._homes else "waits for homes")
                except RECOVERABLE as error:
                    self._member.rebalanced = True
                    self._has_lost_log |= isinstance(error, TopicMissing)
                    began_at = 0.0 if self._outbox is None else self._outbox.began_at
                    wait = self._recovery_policy.on_error(error, time.monotonic(), began_at)
                    log.warning("restarting", worker=self._name, reason=str(error), retry_seconds=wait)
                    cause = "" if isinstance(error, ThreadRefused) else "trouble with the broker: "
                    HEALTH.report_restart(f"{cause}{error}")
                    stop.wait(wait)
        finally:
            self._member.close()
            self._outcomes.close()

    def _cycle(self) -> None:
        items = self._member.read(BATCH, 0.0 if self._runners.in_flight or self._early else IDLE_SECONDS)
        if self._member.rebalanced:
            self._recover()  # the items are read again after the recovery
            return
        self._end_settled_by_hand()  # before their next results are applied, which may end this process
        early, self._early = self._early, []
        for item in early + items:
            self._on_item(item)
        self._on_settle_items(self._outcomes.read(BATCH, 0.0))
        self._ready += self._rounds.advance(self._homes.values(), self._rules, time.time(), time.monotonic())
        self._open_groups()
        self._runners.start(self._jobs)
        self._jobs = []
        self._on_answers(self._runners.results(STEP_WAIT_SECONDS if self._runners.in_flight else 0.0))
        self._end_early()
        self._write()
        if self._outbox is not None and self._homes and self._log_cleaner.is_due(time.monotonic()):
            self._log_cleaner.sweep(self._outbox.needed(self._homes))
        self._export_gauges()

    def _recover(self) -> None:
        """Discard all state and build the homes from the log."""
        self._member.rebalanced = False
        HEALTH.report("builds its homes from the log", ready=False)
        self._generation += 1
        self._runners.begin_generation(self._generation)
        self._homes, self._jobs, self._ready, self._early = {}, [], [], []
        began = time.monotonic()
        self._member.pause()
        outbox = self._fence()  # also without homes: an open transaction of this name blocks its readers
        records = 0
        if self._member.homes:
            try:
                records = self._recover_homes(outbox)
            except RecoveryAbandoned:
                self._member.rebalanced, self._homes = True, {}
                return
            metrics.RECOVERIES.inc()
            metrics.RECOVERY_READ.inc(records)
            metrics.RECOVERY_SECONDS.observe(time.monotonic() - began)
        log.info(
            "homes_recovered",
            worker=self._name,
            homes=self._member.homes,
            trajectories=sum(len(home.trajectories) for home in self._homes.values()),
            failed_trajectories=len(self._ready),
            unsettled_groups=self._unsettled(),
            records=records,
            seconds=round(time.monotonic() - began, 3),
        )

    def _fence(self) -> Outbox:
        """The outbox; a new one if there is none whose writer works. Raises BusError."""
        if self._outbox is not None and self._has_lost_log:
            self._outbox.close()  # an empty broker does not know the writer, and may leave its transaction open
        self._has_lost_log = False
        if self._outbox is None or self._outbox.has_failed:
            self._outbox = fence(
                self._settings,
                self._name,
                self._member.reader,
                rules=self._rules,
                clock=time.time,
                still_needed=lambda: not self._stop.is_set(),
                on_wait=self._keep_membership,
            )
        return self._outbox

    def _recover_homes(self, outbox: Outbox) -> int:
        """Build the homes from the log; returns the number of records read. Raises RecoveryAbandoned."""
        reader = self._member.reader
        taken = recover_homes(
            self._settings,
            reader,
            self._member.homes,
            homes=reader.partition_count(PROMPTS),
            rules=self._rules,
            offsets=outbox.offsets,
            on_wait=self._on_wait,
        )
        self._homes = taken.homes
        for home, lost in taken.broken:
            log.error("trajectory_broken", trajectory=lost.trajectory_id, reason=lost.reason)
            written = fail_unrecovered(
                lost.prompt, lost.index, lost.reason, self._rules, time.time(), home=home.partition, turn=lost.turn
            )
            self._ready.append(PendingTransition(home, lost.trajectory_id, written, None))
        self._recall_outcomes()
        self._rounds.recover(self._homes.values(), time.monotonic())
        reader.assign(taken.begins)
        outbox.on_recovered(taken.begins, taken.request_ends)
        self._log_cleaner.request_soon()
        self._paused = False
        return taken.newest + taken.fetched

    def _recall_outcomes(self) -> None:
        """Read outcomes of open groups, and all settle requests and prompts of evaluations, up to the present end."""
        place: Place = (OUTCOMES, 0)
        # This reader has no fetch under way, so the query does not wait for one.
        low, end = self._member.reader.watermarks(place)
        whole: dict[Place, tuple[int, int]] = {
            each: self._member.reader.watermarks(each) for each in ((SETTLES, 0), (EVALUATIONS, 0))
        }
        begins = {each: first for each, (first, last) in whole.items() if first < last}
        begin = outcomes_from(self._homes.values())
        if begin is not None and begin < end:
            begins[place] = max(low, begin)
        if begins:
            self._on_settle_items(read_to_end(self._settings, begins, client_id="rose-recovery", on_wait=self._on_wait))
        self._outcomes_next = end
        self._outcomes.assign({place: end, **{each: last for each, (_, last) in whole.items()}})
        outcomes_kept = f"outcomes are kept for {self._settings.retention.outcomes / 86_400:g} days"
        for home in self._homes.values():
            for group_id in home.settle_expired(low):
                log.warning("outcomes_expired", group=group_id, reason=outcomes_kept)

    def _keep_membership(self) -> None:
        """Poll the consumer group, so that a rebalance does not wait for this worker.

        Items that are read are handled later.
        """
        HEALTH.report_progress()
        self._early += self._member.read(max(1, BATCH - len(self._early)), 0.0)

    def _on_wait(self) -> None:
        """Poll the consumer group. Raises RecoveryAbandoned if the homes have changed or the worker is to stop."""
        self._keep_membership()
        if self._member.rebalanced or self._stop.is_set():
            raise RecoveryAbandoned

    def _on_item(self, item: Item) -> None:
        if isinstance(item, EndOfPartition):
            return
        home = self._homes[item.partition]
        if isinstance(item, Envelope):
            home.on_log_time(item.timestamp_seconds)
        if item.topic is PROMPTS:
            home.on_prompt(item)
        elif isinstance(item, Envelope) and isinstance(item.record, TurnResult):
            self._on_result(home, item.offset, item.record)
        elif home.is_dead_lettered(item):
            home.results.on_skipped(item.offset)
        else:
            home.results.on_read(item.offset)
            reason = item.reason if isinstance(item, InvalidMessage) else "a message without a value is no result"
            home.undecodable_results.append((item, reason))

    def _on_result(self, home: Home, offset: int, result: TurnResult) -> None:
        home.on_result_spans(result.spans)
        trajectory = home.trajectories.get(result.trajectory_id)
        verdict = ResultVerdict.LATE if trajectory is None else trajectory.classify(result)
        if trajectory is not None and verdict is ResultVerdict.ANCHOR:
            self._request_again(home, trajectory, offset, result.reason)
            return
        if trajectory is None or verdict not in (ResultVerdict.APPLY, ResultVerdict.FAIL):
            home.results.on_skipped(offset)
            metrics.DROPPED.labels(verdict.value).inc()
            return
        home.results.on_read(offset)
        trajectory.applying = True
        now = time.time()
        failure = f"the turn was given up: {result.reason}"
        if verdict is ResultVerdict.APPLY:
            problem = result_error(result, count(trajectory.tokens))
            failure = f"malformed result of {result.worker}: {problem}" if problem else ""
        if failure:
            self._prepare(home, trajectory, fail_trajectory(trajectory, failure, self._rules, now), offset)
            return
        if ending := ending_at_result(home, trajectory, result):
            written = self._ended_at(_Applying(home, trajectory, result, offset, now), ending, now)
            self._prepare(home, trajectory, written, offset)
            return
        self._jobs.append(
            StepJob(
                generation=self._generation,
                trajectory_id=trajectory.trajectory_id,
                environment=trajectory.prompt.environment,
                ticket=_Applying(home, trajectory, result, offset, now),
                tokens=result.tokens,
                stop_token_ids=trajectory.sampling.stop_token_ids,
                state=trajectory.state,
            )
        )

    def _request_again(self, home: Home, trajectory: Trajectory, offset: int, reason: str) -> None:
        name = trajectory.trajectory_id
        log.warning("context_missing", trajectory=name, turn=trajectory.turn, reason=reason)
        metrics.TORN.inc()
        home.results.on_read(offset)
        self._prepare(home, trajectory, request_again(trajectory, self._rules, time.time()), offset)

    def _prepare(self, home: Home, trajectory: Trajectory, written: OutgoingRecords, offset: int) -> None:
        """Add the records that the result at `offset` caused to the next transaction."""
        if written.sample is not None:
            home.on_sample(written.sample.record)
        group = home.open_groups.get(trajectory.prompt.group_id)
        if written.request is not None and group is not None and group.deferred:
            written = put_on_hold(trajectory, self._rules, time.time(), written)
        self._ready.append(PendingTransition(home, trajectory.trajectory_id, written, offset))

    def _ended_at(self, ticket: _Applying, ending: Ending, now: float, failure: str = "") -> OutgoingRecords:
        return end_at_result(
            ticket.trajectory,
            ticket.result,
            ending,
            failure,
            offset=ticket.offset,
            rules=self._rules,
            applied_at=ticket.applied_at,
            now=now,
        )

    def _on_settle_items(self, items: Iterable[Item]) -> None:
        """Apply outcomes, settle requests and prompts of evaluations to the homes."""
        for item in items:
            if item.topic is EVALUATIONS:
                self._on_evaluation(item)
                continue
            if item.topic is SETTLES:
                if isinstance(item, Envelope) and isinstance(item.record, SettleRequest):
                    for home in self._homes.values():
                        home.on_settle_request(item.record)
                continue
            self._outcomes_next = item.offset + 1
            if isinstance(item, Envelope) and isinstance(item.record, SampleOutcome):
                for home in self._homes.values():
                    home.on_log_time(item.timestamp_seconds)
                    home.on_outcome(
                        item.record.group_id,
                        item.record.trajectory_id,
                        item.offset,
                        step=item.record.step,
                        oldest_fresh=item.record.oldest_fresh,
                    )

    def _end_early(self) -> None:
        """End the trajectories that nobody waits for, or that are overdue."""
        now, monotonic = time.time(), time.monotonic()
        overdue = self._rules.deadline_seconds > 0 and monotonic >= self._next_deadline_check
        if overdue:
            self._next_deadline_check = monotonic + DEADLINE_CHECK_SECONDS
        for home in self._homes.values():
            self._ready += surplus_endings(home, self._rules, now) + stale_endings(home, self._rules, now)
            if overdue:
                for ended in overdue_endings(home, self._rules, now, monotonic):
                    deadline = self._rules.deadline_seconds
                    log.warning("trajectory_overdue", trajectory=ended.trajectory_id, seconds=deadline)
                    self._ready.append(ended)

    def _on_evaluation(self, item: Item) -> None:
        prompt = item.record if isinstance(item, Envelope) else None
        if isinstance(item, EndOfPartition):
            return
        if isinstance(item, InvalidMessage) or (prompt is not None and not _is_request(item.key, prompt)):
            reason = item.reason if isinstance(item, InvalidMessage) else "it is no prompt of an evaluation"
            log.warning("evaluation_prompt_ignored", offset=item.offset, reason=reason)
            return
        for home in self._homes.values():
            home.on_evaluation(item)

    def _end_settled_by_hand(self) -> None:
        """End the trajectories that settle requests name."""
        for home in self._homes.values():
            for name, trajectory, reason in home.take_settle_requests():
                if trajectory is None:
                    log.warning("settle_request_without_effect", trajectory=name, reason=reason)
                    continue
                log.warning("trajectory_settled_by_hand", trajectory=name, reason=reason)
                written = end_early(trajectory, Ending.FAILED, self._rules, time.time(), failure=reason)
                self._ready.append(PendingTransition(home, name, written, None))

    def _open_groups(self) -> None:
        """Decide prompts, one per home in turn, while the window has room. Pause reading prompts while one waits."""
        for home in self._homes.values():
            for opening in home.decide_evaluations(self._outcomes_next):
                self._open(home, opening)
        active, limit = self._active(), self._rounds.limit  # counted once, because open groups are many
        able = [home for home in self._homes.values() if home.waits]
        while able:
            home = able.pop(0)
            decision = home.decide(has_room=active < limit, outcomes_from=self._outcomes_next)
            if decision is None:
                continue
            if decision.kind is DecisionKind.OPEN:
                self._open(home, decision)
                active += decision.kind is DecisionKind.OPEN  # a prompt that is refused here opens no group
            if home.waits:
                able.append(home)
        full = active >= limit or any(home.waits for home in self._homes.values())
        if full != self._paused:
            places: list[Place] = [(PROMPTS, home) for home in self._homes]
            if full:
                self._member.reader.pause(places)
            else:
                self._member.reader.resume(places)
            self._paused = full

    def _open(self, home: Home, decision: PromptDecision) -> None:
        """Begin to reset the environments of a group, or refuse its prompt."""
        if reason := admission_error(decision.opens, self._rules, self._check_environment):
            decision.awaited = 0
            home.refuse(decision, reason)
        else:
            self._jobs += reset_jobs(home, decision, generation=self._generation)

    def _on_answers(self, answers: Sequence[tuple[Job, JobResult]]) -> None:
        """Handle the results of environment jobs; results of an older generation are ignored."""
        now = time.time()
        for job, answer in answers:
            if job.generation != self._generation:
                continue
            ticket = job.ticket
            if isinstance(ticket, PendingReset):
                _on_reset(ticket, answer)
            else:
                assert isinstance(ticket, _Applying)
                self._on_step(ticket, answer, now)

    def _on_step(self, ticket: _Applying, answer: JobResult, now: float) -> None:
        trajectory, result = ticket.trajectory, ticket.result
        if isinstance(answer, EnvironmentFailure):
            log.warning("environment_failed", trajectory=trajectory.trajectory_id, reason=answer.failure)
            written = self._ended_at(ticket, Ending.FAILED, now, answer.failure)
        elif ending := ending_at_result(ticket.home, trajectory, result):
            written = self._ended_at(ticket, ending, now)
        else:
            assert not isinstance(answer, ResetResult | ResetRefused)
            metrics.STEP_SECONDS.observe(answer.environment_seconds)
            written = advance(
                trajectory,
                result,
                answer,
                offset=ticket.offset,
                rules=self._rules,
                applied_at=ticket.applied_at,
                now=now,
            )
        metrics.APPLIED.inc()
        if tracing.exporter is not None:
            tracing.exporter.on_applied(result, self._settings.topic(COMPLETED), began=ticket.applied_at)
        self._prepare(ticket.home, trajectory, written, ticket.offset)

    def _write(self) -> None:
        """Commit what is ready and release the environments of ended trajectories.

        If the commit fails, everything is decided again from the log.
        """
        if self._outbox is None:
            return
        ready, self._ready = self._ready, []
        ended = self._outbox.commit(self._homes, ready)
        if ended:
            self._runners.release(ended)

    def _active(self) -> int:
        return sum(home.active_groups for home in self._homes.values())

    def _unsettled(self) -> int:
        """Number of open groups that count against the window."""
        return sum(home.training_groups for home in self._homes.values())

    def _export_gauges(self) -> None:
        metrics.HOMES.set(len(self._homes))
        metrics.TRAJECTORIES.set(sum(len(home.trajectories) for home in self._homes.values()))
        metrics.UNSETTLED.set(self._unsettled())
        metrics.DEFERRED.set(self._unsettled() - self._active())
        metrics.LIVE.set(self._runners.live)
        metrics.STUCK.set(self._runners.threads_stuck)


def _is_request(key: str, record: object) -> bool:
    """Whether a record of the topic of evaluations opens a group of an evaluation."""
    if not isinstance(record, Prompt) or not record.evaluation:
        return False
    return record.group_id == key and is_evaluation(key)


def _on_reset(ticket: PendingReset, answer: JobResult) -> None:
    decision = ticket.decision
    decision.awaited -= 1
    if isinstance(answer, ResetResult):
        decision.reset_results[ticket.index] = answer
    elif isinstance(answer, EnvironmentFailure):
        decision.reset_results[ticket.index] = answer.failure
    elif isinstance(answer, ResetRefused) and decision.opens.evaluation:
        decision.reset_results[ticket.index] = answer.reason
    elif isinstance(answer, ResetRefused) and decision.kind is DecisionKind.OPEN:
        ticket.home.refuse(decision, answer.reason)
