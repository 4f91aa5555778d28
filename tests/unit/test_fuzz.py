"""Every fuzzed message decodes to a record or a RecordError, and no core fails on an accepted record.

`tests/chaos/test_fuzz.py` tests the loops around the cores. Test names contain the seeds.
"""

from collections.abc import Iterator, Sequence

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rose.pipeline.accounting.cost import cost_of
from rose.pipeline.accounting.prices import Prices
from rose.pipeline.accounting.usage import UsageLedger
from rose.pipeline.audit import Ledger
from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.elasticity import ElasticityCore
from rose.pipeline.control.page import page_of, state_of
from rose.pipeline.monitor.run_state import RunState
from rose.pipeline.process_setup import serve_metrics
from rose.pipeline.replay.description import describe_trajectory
from rose.pipeline.replay.records import TrajectoryRecords, fold_trajectory, sort_records
from rose.pipeline.report.history import fold_history
from rose.pipeline.report.lending_statistics import LatencyBudgets, seconds_of_lending, summarise_lending
from rose.pipeline.report.summary import RunMetadata, Success, describe_machine, summarise
from rose.pipeline.report.write import report_html
from rose.pipeline.routing.cell_summary import summarize_cell
from rose.pipeline.routing.liveness import ClockSkews
from rose.pipeline.routing.router import Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.arrays import pack_tokens
from rose.schemas.cells import CellSummary
from rose.schemas.errors import RecordError, UsageError
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.heartbeats import SlackHeartbeat, WorkerClass
from rose.schemas.progress import EnvSnapshot, Group, GroupState, TrajectoryProgress
from rose.schemas.prompts import Prompt
from rose.schemas.record import Record
from rose.schemas.samples import Sample, SampleOutcome
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult
from rose.schemas.weights import WeightChunk, WeightManifest
from rose.schemas.wire import decode, encode
from rose.topics.catalog import RECORD_TOPICS, Topic
from rose.topics.local_broker import free_ports
from rose.topics.records import Envelope, InvalidMessage
from rose.workers.environments.home import Home
from rose.workers.environments.outbox import group_record
from rose.workers.environments.prompt_admission import admission_error
from rose.workers.environments.prompt_decisions import DecisionKind
from rose.workers.environments.trajectory import ResultVerdict, begin, result_error, with_full_sampling
from rose.workers.environments.transitions import advance, fail_trajectory
from rose.workers.executor.contexts import ContextCache
from rose.workers.executor.grants import Lease
from rose.workers.executor.inbox import Inbox
from rose.workers.executor.inbox import InboxAction as InboxVerdict
from rose.workers.executor.records import (
    ExecutorIncarnation,
    dispatch_error,
    finished_result,
    refused_result,
    remaining_sampling,
    resumed_context,
)
from rose.workers.trainer.groups import GroupAssembly, ResumePoint
from rose.workers.trainer.selection import SelectionRules, outcomes_of, select_samples
from rose.workers.weights.checks import VersionRefused, check_manifest
from rose.workers.weights.lineage import Lineage
from rose.workers.weights.trust import Trust
from tests.golden.examples import EXAMPLES, PROMPT
from tests.support.fuzz import FuzzGenerator, send_garbage
from tests.support.scripted_engine import turn_finished
from tests.support.trajectory_fixtures import RULES, stepped

MESSAGES = 180
"""Number of messages per topic; there are 14 topics."""


def items(fuzz: FuzzGenerator, topic: Topic, count: int) -> Iterator[Envelope | InvalidMessage]:
    """Yield the items that a reader returns for fuzzed messages."""
    assert topic.record is not None
    for offset in range(count):
        raw = fuzz.message(topic)
        key = raw.key.decode(errors="replace") if raw.key else ""
        try:
            record = None if raw.value is None else decode(topic.record, raw.value, raw.headers)
        except RecordError as error:
            yield InvalidMessage(topic, 0, offset, raw, str(error))
        else:
            yield Envelope(record, topic, 0, offset, key, 1.0, raw)


class FuzzedCores:
    """The cores of every role with genuine state, which the fuzzer tries to disturb."""

    def __init__(self) -> None:
        self.now = 1.0
        self.router, self.skews = Router(), ClockSkews()
        self.home = Home(0, homes=1)
        self.assembly = GroupAssembly(ResumePoint({0: 0}, 0), {0: 0})
        self.trust = Trust("policy", "team.:demo", Ed25519PrivateKey.generate().public_key())
        self.lineage, self.ledger, self.found = Lineage(), Ledger(), TrajectoryRecords()
        self.control = ElasticityCore(ControlConfig(most_lenders=2), "team.:demo")
        self.lease = Lease("team.:demo", grant_required=True)
        self.history: list[Record] = []
        self.view = RunState(began=0.0)

    def take(self, item: Envelope | InvalidMessage) -> None:
        self.now += 0.05
        self.route(self.router.on_heartbeat(BEAT, self.now))
        record = item.record if isinstance(item, Envelope) else None
        if isinstance(record, Prompt) or (item.topic.record is Prompt):
            self.prompt(item)
        if record is None:
            return
        assert encode(decode(type(record), encode(record))) == encode(record)
        self.history.append(record)
        sort_records(self.found, [record])
        self.view.on_record(record, self.now, wall=self.now)
        match record:
            case TurnRequest():
                self.route(
                    self.router.on_request(
                        ReceivedRequest.from_record(msgspec.structs.replace(record, home=0)), self.now
                    )
                )
            case SlackHeartbeat():
                self.skews.on_heartbeat(record.worker, record.sent_at, self.now)
                self.route(self.router.on_heartbeat(record, self.now))
            case TurnResult():
                self.route(self.router.on_result(record, self.now))
                self.result(record)
            case TurnDispatch():
                self.dispatch(record)
            case Sample():
                self.sample(record, item.offset)
            case SampleOutcome():
                self.ledger.on_outcome(record)
                self.home.on_outcome(record.group_id, record.trajectory_id, item.offset)
            case WeightManifest():
                self.manifest(item)
            case Group():
                self.ledger.on_group(record.group_id, record)
            case CellSummary():
                self.control.on_summary(record, self.now)
                self.elasticity()
            case CapacityGrant():
                grant_source = list(GrantSource)[item.offset % len(GrantSource)]
                self.control.on_grant(record.worker, record, self.now, source=grant_source)
                self.lease.on_grant(record, self.now, source=grant_source, live=item.offset % 5 > 0)
                self.lease.permission(self.now)
                self.elasticity()
            case TrajectoryProgress() | EnvSnapshot() | WeightChunk() | Prompt():
                pass

    def route(self, decisions: Sequence[Record]) -> None:
        for decision in [*decisions, *self.router.tick(self.now)]:
            encode(decision)
        router, counters = self.router, self.router.counters
        ended_or_not = counters.finished + counters.failed + counters.withdrawn + router.outstanding + len(router.queue)
        assert counters.requested == ended_or_not

    def elasticity(self) -> None:
        for grant in self.control.tick(self.now):
            assert decode(CapacityGrant, encode(grant)).reason
        page_of(state_of(self.control, (), self.now))
        encode(summarize_cell(self.router, name="router-0", now=self.now))

    def prompt(self, item: Envelope | InvalidMessage) -> None:
        self.home.on_prompt(item)
        decision = self.home.decide(has_room=True, outcomes_from=0)
        assert decision is not None
        if decision.kind is DecisionKind.OPEN and not admission_error(decision.opens, RULES, self.check):
            prompt = with_full_sampling(decision.opens, RULES.sampling)
            encode(group_record(prompt, GroupState.OPEN, offset=0, outcomes_from=0, now=1.0))
        self.home.decisions.clear()
        self.home.open_groups.clear()

    def check(self, name: str) -> None:
        if name != "calculator":
            raise UsageError(f"there is no {name}")

    def result(self, result: TurnResult) -> None:
        """Apply the result to a trajectory that waits for this turn, and to the records that this writes."""
        prompt = with_full_sampling(PROMPT, RULES.sampling)
        life = begin(prompt, 3, home=0, observation=pack_tokens([5, 6]), state=b"")
        life.turn = result.turn
        verdict = life.classify(result)
        if verdict is ResultVerdict.APPLY and not (problem := result_error(result, 2)):
            step = stepped(done=self.now % 2 < 1)
            written = advance(life, result, step, offset=0, rules=RULES, applied_at=1.0, now=2.0)
        elif verdict is ResultVerdict.APPLY:
            written = fail_trajectory(life, str(problem), RULES, 2.0)
        else:
            return
        for record in (written.request, written.snapshot, written.sample):
            if record is not None:
                assert encode(record.record) == record.wire

    def dispatch(self, dispatch: TurnDispatch) -> None:
        if dispatch_error(dispatch, homes=8):
            return
        own = Inbox(dispatch.worker, dispatch.incarnation, max_turns=4, token_budget=200_000)
        answer = own.on_dispatch(dispatch, 3, offset=9)
        start = ExecutorIncarnation("executor-0", WorkerClass.SERVING, dispatch.incarnation)
        if answer.action is InboxVerdict.REFUSE:
            encode(refused_result(start, dispatch, answer.reason, answer.refusal, now=2.0))
        elif answer.action is InboxVerdict.ACCEPT:
            context = ContextCache().lookup(dispatch)
            resumed_context(dispatch, context or b""), remaining_sampling(dispatch)
            turn = msgspec.structs.replace(DONE.turn, context_tokens=dispatch.request.context_tokens)
            done = msgspec.structs.replace(DONE, turn=turn)
            encode(finished_result(start, dispatch, done, TurnOutcome.COMPLETED, "", received_at=1.0))

    def sample(self, sample: Sample, offset: int) -> None:
        self.ledger.on_sample(sample.trajectory_id)
        self.assembly.on_sample(sample, partition=0, offset=offset, outcomes_end=0)
        rules = SelectionRules(max_staleness=2, vocabulary=100, context_tokens=1_000)
        judged = [select_samples(group, 5, rules=rules) for group in self.assembly.take(1)]
        for outcome in outcomes_of(judged, step=5, policy_version=5, now=2.0):
            encode(outcome)

    def manifest(self, item: Envelope | InvalidMessage) -> None:
        assert isinstance(item, Envelope) and isinstance(item.record, WeightManifest)
        assert not isinstance(self.trust.verify(item), WeightManifest), "nobody signed it"
        self.lineage.on_manifest(item.record, item.offset)  # as if keys were not used
        self.lineage.next_path()
        self.lineage.blocked()
        shapes = {"model.embed_tokens.weight": (32, 64)}
        try:
            check_manifest(item.record, shapes)
        except VersionRefused:
            self.lineage.forget_useless()

    def tell(self) -> None:
        """Feed everything to the commands that read a log."""
        self.view.present_executors(self.now)
        usage = UsageLedger()
        history = fold_history(usage.watch(self.history))
        rows, promised = seconds_of_lending(history, [], now=self.now), LatencyBudgets(ttft=1.0, tpot=1.0)
        summary = summarise(
            history,
            self.ledger.audit(),
            RunMetadata(started_at=0.0, seconds=self.now, broker="none", success=Success(), machine=describe_machine()),
            run="strangers",
            seed=0,
            cost=cost_of(usage.usage(None), Prices()),
            lending=summarise_lending(history, [], rows, promised),
        )
        report_html(summary, history, configuration="", rows=rows)
        for name in ("g-1:3", "g-1:0"):
            list(describe_trajectory(fold_trajectory(name, self.found)))


BEAT = next(example for example in EXAMPLES if isinstance(example, SlackHeartbeat))
"""A heartbeat of a healthy executor, so that fuzzed requests are dispatched."""
DONE = turn_finished("g-1:3/2/1", [9, 7], logprob=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_core_fails_on_fuzzed_records(seed: int) -> None:
    fuzz, cores = FuzzGenerator(seed), FuzzedCores()
    taken = {topic: iter(items(fuzz, topic, MESSAGES)) for topic in RECORD_TOPICS}
    for _ in range(MESSAGES):
        for topic in RECORD_TOPICS:
            item = next(taken[topic])
            try:
                cores.take(item)
            except Exception as error:
                error.add_note(f"{topic.name}: {item}")
                raise
    cores.tell()


def test_metrics_server_answers_after_many_invalid_requests() -> None:
    (port,) = free_ports(1)
    serve_metrics("127.0.0.1", port)
    send_garbage(port, seed=0, count=60)
