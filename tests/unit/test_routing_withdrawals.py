"""Stops of withdrawn turns: every execution that may run is told to stop, once however often routers restart."""

from rose.schemas.turns import TurnDispatch
from tests.support.routing_fixtures import RoutingSimulation, request
from tests.support.routing_machine import started


def stops(simulation: RoutingSimulation) -> list[TurnDispatch]:
    return [each for each in simulation.decisions if isinstance(each, TurnDispatch) and each.withdrawn]


def given(simulation: RoutingSimulation, trajectory: str) -> TurnDispatch:
    """Ask for a turn and return its dispatch."""
    simulation.ask(request(trajectory))
    [dispatch] = [each for each in simulation.running if each.request.trajectory_id == trajectory]
    return dispatch


def silence(simulation: RoutingSimulation, dispatch: TurnDispatch) -> None:
    """Freeze the executor of a dispatch until its turns are taken from it."""
    others = [int(name[1:]) for name in simulation.executors if name != dispatch.worker]
    for _ in range(30):
        simulation.pass_time(0.2)
        for worker in others:
            simulation.beat(worker)


def test_withdrawn_turn_is_also_stopped_at_a_silent_executor_that_it_was_taken_from() -> None:
    simulation = started()
    first = given(simulation, "g:0")
    silence(simulation, first)
    second = simulation.held["g:0"]
    assert second.worker != first.worker
    simulation.withdraw("g:0")
    assert {(stop.worker, stop.attempt) for stop in stops(simulation)} == {
        (first.worker, first.attempt),
        (second.worker, second.attempt),
    }


def test_stop_carries_no_context_and_names_the_execution() -> None:
    simulation = started()
    dispatch = given(simulation, "g:0")
    simulation.withdraw("g:0")
    [stop] = stops(simulation)
    assert stop.key == dispatch.key and (stop.worker, stop.incarnation) == (dispatch.worker, dispatch.incarnation)
    assert stop.request.appended == b"" and stop.request.withdrawn


def test_restarted_routers_do_not_repeat_a_stop_that_is_on_the_log() -> None:
    simulation = started()
    given(simulation, "g:0")
    given(simulation, "h:0")
    simulation.withdraw("g:0")
    for _ in range(4):
        simulation.restart_router()
    assert len(stops(simulation)) == 1


def test_restarted_router_stops_what_the_router_before_it_has_not_stopped() -> None:
    simulation = started()
    dispatch = given(simulation, "g:0")
    simulation.withdraw("g:0")
    simulation.log = [each for each in simulation.log if not (isinstance(each, TurnDispatch) and each.withdrawn)]
    simulation.unread.clear()
    simulation.restart_router()
    assert [stop.key for stop in stops(simulation)] == 2 * [dispatch.key]


def test_restarted_router_stops_no_execution_that_was_answered() -> None:
    simulation = started()
    dispatch = given(simulation, "g:0")
    simulation.withdraw("g:0")
    simulation.log = [each for each in simulation.log if not (isinstance(each, TurnDispatch) and each.withdrawn)]
    simulation.read_on()
    simulation.restart_router()
    assert [stop.key for stop in stops(simulation)] == [dispatch.key]
