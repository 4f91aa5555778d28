"""A small world around the router's core: executors that come and go, trajectories that ask, and what must hold.

The world keeps its own books, from the records alone, and compares them with the router's after every event.
"""

from dataclasses import dataclass, field

from pipeline.routing.config import RouterConfig
from pipeline.routing.liveness import Standing
from pipeline.routing.router import Decision, Router
from schemas.prompts import Sampling
from schemas.record import Record
from schemas.slack import ExecutorState, Hardware, SlackHeartbeat, WorkerClass
from schemas.turns import TurnDispatch, TurnOutcome, TurnRequest, TurnResult, VersionSpan
from schemas.weights import WeightManifest

TTL_SECONDS = 2.0
CONFIG = RouterConfig(max_attempts=4, max_lag_versions=1, remembered_trajectories=50)


def request(trajectory: str, turn: int = 0, *, context: int = 20, max_tokens: int = 10, **other: object) -> TurnRequest:
    fields: dict[str, object] = {"home": 0, "requested_at": 0.0, "deadline": 1e9, **other}
    return TurnRequest(
        trajectory_id=trajectory,
        group_id=trajectory.partition(":")[0],
        turn=turn,
        context=bytes(4 * context),
        sampling=Sampling(max_tokens=max_tokens),
        **fields,  # type: ignore[arg-type]
    )


def heartbeat(worker: int, **other: object) -> SlackHeartbeat:
    fields: dict[str, object] = {
        "incarnation": 1,
        "sequence": 0,
        "state": ExecutorState.READY,
        "policy_version": 0,
        "hardware": Hardware(prefill_tokens_per_second=1000.0, decode_tokens_per_second=100.0),
        "max_turns": 4,
        "token_budget": 1000,
        **other,
    }
    return SlackHeartbeat(
        worker=f"w{worker}",
        slot=worker,
        worker_class=WorkerClass.DEDICATED,
        kv_bytes_total=0,
        kv_bytes_free=0,
        kv_bytes_per_token=0,
        ttl_seconds=TTL_SECONDS,
        sent_at=0.0,
        **fields,  # type: ignore[arg-type]
    )


def result(dispatch: TurnDispatch, outcome: TurnOutcome = TurnOutcome.COMPLETED, tokens: int = 5) -> TurnResult:
    asked = dispatch.request
    return TurnResult(
        trajectory_id=asked.trajectory_id,
        group_id=asked.group_id,
        home=asked.home,
        turn=asked.turn,
        attempt=asked.attempt,
        outcome=outcome,
        worker=dispatch.worker,
        incarnation=dispatch.incarnation,
        tokens=bytes(4 * tokens),
        spans=(VersionSpan(0, tokens, 0),),
    )


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        model_id="m", version=version, step=version, tensors=(), slices=(), digest=bytes(16), published_at=0.0
    )


@dataclass
class World:
    """Feeds a router and checks its laws. `log` is what the topics would hold, `history` what the router heard."""

    router: Router = field(default_factory=lambda: Router(CONFIG))
    now: float = 0.0
    version: int = 0
    beats: dict[str, tuple[SlackHeartbeat, float]] = field(default_factory=dict)
    """The newest of each worker, and when it was heard."""
    incarnations: dict[int, int] = field(default_factory=dict)
    held: dict[str, TurnDispatch] = field(default_factory=dict)
    """By trajectory: the dispatch that the books say is being run."""
    owed: dict[str, int] = field(default_factory=dict)
    """By trajectory: the attempt that must be its next, because the one before was lost."""
    asked: dict[str, TurnRequest] = field(default_factory=dict)
    """By trajectory: its newest request, as it was asked."""
    done: dict[str, int] = field(default_factory=dict)
    """By trajectory: its newest finished turn."""
    ended: int = 0
    history: list[tuple[float, Record | None]] = field(default_factory=list)
    """None is a tick."""
    log: list[Record] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def feed(self, event: Record | None) -> list[Decision]:
        """Let the router hear something (None: time has passed) and check everything that must hold."""
        self.history.append((self.now, event))
        if event is not None:
            self.log.append(event)
        decisions = self.router.tick(self.now) if event is None else self.router.on(event, self.now)
        self._note_departures()
        for decision in decisions:
            self._note(decision)
        self.decisions += decisions
        self.log += decisions
        self._check_books()
        self._check_nobody_waits_for_nothing()
        return decisions

    def ask(self, asked: TurnRequest) -> None:
        self.asked[asked.trajectory_id] = asked
        self.feed(asked)

    def beat(self, worker: int, *, restart: bool = False, **other: object) -> None:
        self.incarnations[worker] = self.incarnations.get(worker, 1) + restart
        beat = heartbeat(worker, incarnation=self.incarnations[worker], **other)
        known = self.beats.get(beat.worker)
        if known is not None and known[0].incarnation < beat.incarnation:
            self._lose(beat.worker)
        self.beats[beat.worker] = (beat, self.now)
        self.feed(beat)

    def complete(self, dispatch: TurnDispatch) -> None:
        asked = dispatch.request
        if self.asked[asked.trajectory_id].turn == asked.turn and self.done.get(asked.trajectory_id, -1) < asked.turn:
            self._settle(asked.trajectory_id, asked.turn)
        self.feed(result(dispatch))

    def reject(self, dispatch: TurnDispatch, outcome: TurnOutcome) -> None:
        trajectory = dispatch.request.trajectory_id
        if self.held.get(trajectory) is dispatch:
            del self.held[trajectory]
            self.owed[trajectory] = dispatch.request.attempt + 1
        self.feed(result(dispatch, outcome))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(None)

    def _note_departures(self) -> None:
        for worker, executor in self.router.liveness.executors.items():
            if executor.standing is Standing.GONE:
                beat, heard = self.beats[worker]
                assert self.now >= heard + beat.ttl_seconds, "an executor was given up within its TTL"
                self._lose(worker)

    def _lose(self, worker: str) -> None:
        for trajectory, dispatch in list(self.held.items()):
            if dispatch.worker == worker:
                del self.held[trajectory]
                self.owed[trajectory] = dispatch.request.attempt + 1

    def _note(self, decision: Decision) -> None:
        trajectory = decision.request.trajectory_id if isinstance(decision, TurnDispatch) else decision.trajectory_id
        assert trajectory not in self.held, "a turn was decided on while an executor has it"
        if isinstance(decision, TurnResult):
            assert decision.outcome is TurnOutcome.FAILED
            self._settle(trajectory, decision.turn)
            return
        request = decision.request
        assert request.attempt == self.owed.pop(trajectory, 0), "a lost attempt is followed by the next one, once"
        assert request.attempt < CONFIG.max_attempts
        assert request.deadline > self.now
        beat, heard = self.beats[decision.worker]
        assert (decision.incarnation, decision.slot) == (beat.incarnation, beat.slot)
        assert beat.state is ExecutorState.READY and self.now < heard + beat.ttl_seconds
        assert self.router.liveness.executors[decision.worker].standing is Standing.LIVE
        assert 0 <= self.version - beat.policy_version <= CONFIG.max_lag_versions
        assert request.min_policy_version <= beat.policy_version
        self.held[trajectory] = decision
        turns, tokens = self.load(decision.worker)
        assert turns <= beat.max_turns and tokens <= beat.token_budget, "an executor was overfilled"

    def load(self, worker: str) -> tuple[int, int]:
        """Turns and tokens that the books say it holds."""
        at = [dispatch.request for dispatch in self.held.values() if dispatch.worker == worker]
        return len(at), sum(len(asked.context) // 4 + asked.sampling.max_tokens for asked in at)

    def _settle(self, trajectory: str, turn: int) -> None:
        self.held.pop(trajectory, None)
        self.owed.pop(trajectory, None)
        self.done[trajectory] = turn
        self.ended += 1

    def _check_books(self) -> None:
        counters, router = self.router.counters, self.router
        assert counters.requested == counters.finished + counters.failed + router.outstanding + len(router.waiting)
        assert counters.finished + counters.failed == self.ended
        assert {name: turn.worker for name, turn in router.turns.items() if turn.worker} == {
            name: dispatch.worker for name, dispatch in self.held.items()
        }
        for worker, executor in router.liveness.executors.items():
            assert set(executor.holds) == {name for name, at in self.held.items() if at.worker == worker}

    def _check_nobody_waits_for_nothing(self) -> None:
        """The first waiting turn that some open executor could run finds no room: it is next, and nobody passes."""
        waiting = [turn.request for turn in self.router.turns.values() if not turn.worker]
        for asked in sorted(waiting, key=lambda asked: (asked.deadline, -asked.turn)):
            need = len(asked.context) // 4 + asked.sampling.max_tokens
            able = [
                executor.beat
                for executor in self.router.liveness.executors.values()
                if executor.open
                and executor.beat is not None
                and executor.beat.max_turns > 0
                and executor.beat.token_budget >= need
                and executor.beat.policy_version >= asked.min_policy_version
            ]
            if able:
                for beat in able:
                    turns, tokens = self.load(beat.worker)
                    assert turns >= beat.max_turns or tokens + need > beat.token_budget, "a turn waits beside room"
                return
