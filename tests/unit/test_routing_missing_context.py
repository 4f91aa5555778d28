"""A turn whose context no executor can read back waits for its anchor, and no other turn waits for it."""

import msgspec

from rose.pipeline.routing.router import Router
from rose.pipeline.routing.turn import MAX_KEPT_BYTES
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.limits import MAX_CHAIN
from rose.schemas.prompts import Sampling
from rose.schemas.turns import Refusal, TurnDispatch, TurnOutcome, TurnRequest, context_fields
from rose.schemas.wire import decode, encode
from tests.support.routing_fixtures import CONFIG, heartbeat, packed, request, result


def chained(patience_seconds: float = 100.0) -> TurnRequest:
    turn_request = request("g0:0", 1, context=30, patience_seconds=patience_seconds)
    assert turn_request.chain
    return turn_request


def anchored(turn_request: TurnRequest) -> TurnRequest:
    return msgspec.structs.replace(turn_request, **context_fields(bytes(4 * turn_request.context_tokens)))


def torn(dispatch: TurnDispatch, *routers: Router, now: float = 0.1) -> None:
    for router in routers:
        assert router.on_event(result(dispatch, TurnOutcome.REFUSED, refusal=Refusal.CONTEXT), now) == []


def dispatch_of(router: Router, turn_request: TurnRequest, now: float = 0.0, offset: int = 5) -> TurnDispatch:
    (sent,) = router.on_event(ReceivedRequest.from_record(turn_request, offset), now)
    assert isinstance(sent, TurnDispatch)
    return sent


def test_turn_without_context_is_dispatched_again_after_an_anchor_without_a_failure() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    sent = dispatch_of(router, chained())
    torn(sent, router)
    assert (len(router.queue), router.outstanding, router.counters.context_missing) == (1, 0, 1)
    assert router.on_event(heartbeat(0), 0.2) == [], "no executor is tried again with what it cannot read"
    again = dispatch_of(router, anchored(chained()), 0.3, offset=9)
    assert (again.request.is_anchor, again.offset, again.attempt, again.failures) == (True, 9, 1, 0)


def test_turn_without_context_lets_others_pass() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0, max_turns=1), 0.0)
    torn(dispatch_of(router, chained()), router)
    assert dispatch_of(router, request("g1:0"), 0.2).request.trajectory_id == "g1:0"


def test_anchor_that_arrives_first_serves_the_next_dispatch() -> None:
    """The refusal and the following request are in two topics, and may be read in either order."""
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    sent = dispatch_of(router, chained())
    assert router.on_event(ReceivedRequest.from_record(anchored(chained()), 9), 0.1) == [], (
        "its executor may have the context"
    )
    (again,) = router.on_event(result(sent, TurnOutcome.REFUSED, refusal=Refusal.CONTEXT), 0.2)
    assert isinstance(again, TurnDispatch)
    assert (again.request.is_anchor, again.offset, again.failures) == (True, 9, 0)
    assert router.counters.context_missing == 0


def test_turn_without_context_fails_if_no_anchor_arrives() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    torn(dispatch_of(router, chained(patience_seconds=10.0)), router)
    router.tick(5.0)
    (failed,) = router.tick(10.2)
    assert failed.outcome is TurnOutcome.FAILED and "cannot be read" in failed.reason  # type: ignore[union-attr]


def test_anchor_of_another_context_does_not_release_the_turn() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    torn(dispatch_of(router, chained()), router)
    for other in (request("g0:0", 1, context=31, anchors=True), msgspec.structs.replace(chained(), chain=())):
        other = msgspec.structs.replace(other, digest=bytes(16))
        assert router.on_event(ReceivedRequest.from_record(other, 9), 0.2) == []
    assert router.counters.duplicate == 2 and dispatch_of(router, anchored(chained()), 0.3, offset=11).offset == 11


def test_capacity_is_reserved_for_the_anchored_request() -> None:
    """The anchor may come from a worker with another `max_context_tokens`, which bounds the sampled tokens."""
    router = Router(CONFIG)
    router.on_event(heartbeat(0, token_budget=100), 0.0)
    sent = dispatch_of(router, chained())
    more = msgspec.structs.replace(anchored(chained()), sampling=Sampling(max_tokens=60))
    assert router.on_event(ReceivedRequest.from_record(more, 9), 0.1) == []
    (again,) = router.on_event(result(sent, TurnOutcome.REFUSED, refusal=Refusal.CONTEXT), 0.2)
    assert router.on_event(request("g1:0", context=2, max_tokens=9), 0.3) == [], "90 of 100 tokens are taken"
    assert isinstance(again, TurnDispatch)
    assert len(router.on_event(result(again), 0.4)) == 1
    assert router.placement.candidates["w0"].held_tokens == 11


def test_restored_router_also_holds_a_turn_without_context() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    sent = dispatch_of(router, chained())
    refusal = result(sent, TurnOutcome.REFUSED, refusal=Refusal.CONTEXT)
    restored = Router(CONFIG)
    assert restored.restore([ReceivedRequest.from_record(chained(), 5)], [sent], [refusal], lambda: 0.0) == []
    assert restored.on_event(heartbeat(0), 0.1) == []
    assert dispatch_of(restored, anchored(chained()), 0.2, offset=9).offset == 9
    mended = Router(CONFIG)
    turn_request = [ReceivedRequest.from_record(chained(), 5), ReceivedRequest.from_record(anchored(chained()), 9)]
    assert mended.restore(turn_request, [sent], [refusal], lambda: 0.0) == []
    (again,) = mended.on_event(heartbeat(0), 0.1)
    assert isinstance(again, TurnDispatch) and again.offset == 9


def test_turn_listed_as_running_no_longer_waits_for_an_anchor() -> None:
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    first = dispatch_of(router, chained(patience_seconds=10.0))
    second: list[TurnDispatch] = []
    for number in range(1, 100):
        router.on_event(heartbeat(1, max_turns=1), number / 10)
        second += [each for each in router.tick(number / 10) if isinstance(each, TurnDispatch)]
        if second:
            break
    torn(second[0], router, now=number / 10)
    assert (router.outstanding, router.queue.waiting_for_room) == (0, 0)
    router.on_event(heartbeat(0, holds=packed([first])), 10.0)
    assert router.outstanding == 1
    router.on_event(heartbeat(1, state=ExecutorState.PAUSED), 10.1)
    assert router.on_event(heartbeat(0, incarnation=2, state=ExecutorState.STARTING), 10.1) == []
    assert (router.outstanding, router.queue.waiting_for_room) == (0, 1)
    (failed,) = router.tick(20.2)
    assert "no executor has taken it up" in failed.reason  # type: ignore[union-attr]


def test_appended_tokens_of_a_large_request_are_held_until_dispatch() -> None:
    router = Router(CONFIG)
    large = request("g0:0", context=400, max_tokens=10)
    router.on_event(ReceivedRequest.from_record(large), 0.0)
    (turn,) = router.turns.values()
    assert len(turn.request_bytes) == len(encode(large)) > MAX_KEPT_BYTES
    (sent,) = router.on_event(heartbeat(0), 0.1)
    assert isinstance(sent, TurnDispatch) and sent.request == large and not sent.cut
    assert len(turn.request_bytes) < MAX_KEPT_BYTES and turn.by_reference


def test_offsets_of_the_longest_chain_are_held_once_in_encoded_form() -> None:
    """A tuple of 64 offsets takes more memory than the rest of a turn."""
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    chained = msgspec.structs.replace(request("g0:0", 1), chain=tuple(range(10**6, 10**6 + MAX_CHAIN)))
    sent = dispatch_of(router, chained)
    (turn,) = router.turns.values()
    assert sent.request.chain == chained.chain and not turn.is_anchor
    assert turn.request_bytes == encode(chained) and len(turn.request_bytes) < MAX_KEPT_BYTES


def test_unknown_fields_are_unchanged_in_a_dispatch_without_tokens() -> None:
    """Numbers of 4 bytes were once rewritten with 8 bytes: no dispatch of a large request could be written."""
    turn_request = request("g0:0", context=400, max_tokens=10)
    fields = {
        name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in msgspec.structs.asdict(turn_request).items()
    }
    news = b"\xdd" + (50_000).to_bytes(4, "big") + b"\xca\x3f\x80\0\0" * 50_000
    wire = msgspec.msgpack.encode({**fields, "news": msgspec.Raw(news)})
    router = Router(CONFIG)
    router.on_event(heartbeat(0), 0.0)
    (sent,) = router.on_event(ReceivedRequest(decode(TurnRequest, wire), wire, 5), 0.1)
    assert isinstance(sent, TurnDispatch)
    router.on_event(result(sent, TurnOutcome.PREEMPTED), 0.2)
    (again,) = router.on_event(heartbeat(0, sequence=1), 0.3)
    assert isinstance(again, TurnDispatch) and again.cut
    cut = bytes(again.request_wire)
    assert (
        news in cut and len(cut) == len(wire) - len(turn_request.appended) - 1
    )  # and one of the two fields with their number
    assert again.request == msgspec.structs.replace(turn_request, appended=b"")
