"""The events of a routing simulation, one step at a time, for property tests."""

from hypothesis import strategies as st

from rose.schemas.heartbeats import ExecutorState
from rose.schemas.turns import Refusal, TurnOutcome
from tests.support.routing_fixtures import RoutingSimulation, request, result

WORKERS = st.integers(0, 2)
TRAJECTORIES = st.sampled_from([f"g{group}:{index}" for group in range(3) for index in range(3)])
REJECTIONS = st.sampled_from(
    [
        (TurnOutcome.PREEMPTED, None),
        (TurnOutcome.REFUSED, Refusal.ROOM),
        (TurnOutcome.REFUSED, Refusal.VERSION),
        (TurnOutcome.REFUSED, Refusal.ENGINE),
        (TurnOutcome.REFUSED, Refusal.CONTEXT),
    ]
)
STEPS = st.one_of(
    st.tuples(st.just("ask"), TRAJECTORIES, st.integers(1, 60), st.integers(1, 40), st.sampled_from([5.0, 20.0, 1e9])),
    st.tuples(st.just("ask"), TRAJECTORIES, st.integers(1, 60), st.integers(1, 40), st.just(1e9)),
    st.tuples(st.just("ask_again"), TRAJECTORIES),
    st.tuples(st.just("overtake"), st.integers(0, 20)),
    st.tuples(
        st.just("beat"),
        WORKERS,
        st.integers(0, 4),
        st.integers(0, 200),
        st.sampled_from(ExecutorState),
        st.integers(-1, 2),
    ),
    st.tuples(st.just("beat_unread"), WORKERS),
    st.tuples(st.just("beats")),
    st.tuples(st.just("beats_of"), st.sets(WORKERS), st.integers(1, 40)),
    st.tuples(st.just("restart"), WORKERS),
    st.tuples(st.just("hand_back"), WORKERS),
    st.tuples(st.just("read_on")),
    st.tuples(st.just("complete"), st.integers(0, 20)),
    st.tuples(st.just("reject"), st.integers(0, 20), REJECTIONS),
    st.tuples(st.just("echo"), st.integers(0, 200), st.booleans()),
    st.tuples(st.just("withdraw"), TRAJECTORIES),
    st.tuples(st.just("hold"), TRAJECTORIES),
    st.tuples(st.just("resume"), TRAJECTORIES),
    st.tuples(st.just("mend")),
    st.tuples(st.just("lose")),
    st.tuples(st.just("publish")),
    st.tuples(st.just("time"), st.sampled_from([0.05, 0.3, 1.0, 2.5, 6.0, 70.0])),
)


def step(simulation: RoutingSimulation, what: str, *values: object) -> None:
    """Apply one event to the simulation. An impossible step does nothing."""
    match what, *values:
        case "ask", str(trajectory), int(context), int(most), float(patience):
            ask_next(simulation, trajectory, context=context, max_tokens=most, patience_seconds=patience)
        case "ask_again", str(trajectory):
            if trajectory in simulation.requested:
                simulation.held_back.discard(trajectory)
                simulation.feed(simulation.requested[trajectory][0])
        case "overtake", int(which):
            if simulation.running:  # a result and the request that follows it are in two partitions
                done = simulation.running[which % len(simulation.running)]
                trajectory, turn = done.request.trajectory_id, done.request.turn
                if simulation.requested[trajectory][0].turn == turn and simulation.done.get(trajectory, -1) < turn:
                    del simulation.executors[done.worker].held[done.key]
                    simulation.ask(request(trajectory, turn + 1))
                    simulation.feed(result(done))
        case "beat", int(worker), int(turns), int(tokens), ExecutorState() as state, int(lag):
            version = -1 if lag < 0 else max(-1, simulation.version - lag)
            simulation.beat(worker, max_turns=turns, token_budget=tokens, state=state, policy_version=version)
        case "beat_unread", int(worker):
            simulation.beat_unread(worker)
        case ("beats",):
            for worker in range(3):
                simulation.beat(worker, policy_version=simulation.version)
        case "beats_of", set(workers), int(times):
            for _ in range(times):
                simulation.pass_time(0.2)
                for worker in sorted(workers):
                    simulation.beat(worker, policy_version=simulation.version)
        case "restart", int(worker):
            simulation.beat(worker, restart=True, state=ExecutorState.STARTING, policy_version=-1)
        case "hand_back", int(worker):
            simulation.hand_back(worker)
        case ("read_on",):
            simulation.read_on()
        case "complete", int(which):
            if simulation.running:
                simulation.complete(simulation.running[which % len(simulation.running)])
        case "reject", int(which), (TurnOutcome() as outcome, (Refusal() | None) as refusal):
            if simulation.running:
                rejected = simulation.running[which % len(simulation.running)]
                if refusal is not Refusal.CONTEXT or rejected.request.chain:
                    simulation.reject(rejected, outcome, refusal)
        case "echo", int(which), bool(completed):
            sent = [each for each in simulation.sent.values() if each.key not in simulation.executors[each.worker].held]
            if sent and completed:
                simulation.complete(sent[which % len(sent)])
            elif sent:
                simulation.reject(sent[which % len(sent)], TurnOutcome.PREEMPTED)
        case "withdraw", str(trajectory):
            if trajectory in simulation.requested:
                simulation.withdraw(trajectory)
        case "hold", str(trajectory):
            if trajectory in simulation.requested:
                simulation.hold(trajectory)
        case "resume", str(trajectory):
            if trajectory in simulation.held_back:
                simulation.resume(trajectory)
        case ("mend",):
            simulation.mend()
        case ("lose",):
            simulation.loses = True
        case ("publish",):
            simulation.version += 1
        case "time", float(seconds):
            simulation.pass_time(seconds)


def ask_next(simulation: RoutingSimulation, trajectory: str, **fields: object) -> None:
    turn = simulation.requested[trajectory][0].turn + 1 if trajectory in simulation.requested else 0
    if turn == simulation.done.get(trajectory, -1) + 1 and trajectory not in simulation.withdrawn:
        simulation.ask(request(trajectory, turn, **fields))  # type: ignore[arg-type]


def started() -> RoutingSimulation:
    simulation = RoutingSimulation()
    step(simulation, "beats")
    return simulation


def settle(simulation: RoutingSimulation) -> None:
    """Keep the fleet healthy until every turn has ended."""
    simulation.loses = False
    simulation.read_on()
    for trajectory in sorted(simulation.held_back):
        simulation.resume(trajectory)
    for _ in range(200):
        step(simulation, "beats_of", {0, 1, 2}, 1)
        simulation.mend()
        for dispatch in simulation.running:
            simulation.complete(dispatch)
        if not simulation.router.turns and not simulation.running:
            return
    raise AssertionError(f"{len(simulation.router.turns)} turns never end")
