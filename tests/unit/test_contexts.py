"""Contexts by reference: a cached, carried or read-back context is complete, or reported as missing."""

import tracemalloc
from collections.abc import Iterator
from unittest.mock import Mock

import msgspec
import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.arrays import pack_tokens
from rose.schemas.limits import MAX_CHAIN
from rose.schemas.turns import ContextMissing, TurnDispatch, TurnRequest, assemble_context, context_fields
from rose.schemas.wire import decode, encode
from rose.topics.errors import BusError
from rose.topics.records import Envelope, Place
from rose.topics.settings import BusSettings
from rose.workers.executor.contexts import ENTRY_BYTES, ContextCache, ContextReadBack, ContextStore
from tests.support.routing_fixtures import dispatched, request
from tests.support.waiting import until

APPENDED = st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5), min_size=1, max_size=8)


def requests_of(parts: list[list[int]], anchors: frozenset[int] = frozenset({0})) -> list[TurnRequest]:
    """Return the requests of a trajectory whose context grows by these parts, at offsets 10, 20 and so on."""
    requests: list[TurnRequest] = []
    context, chain, known = b"", tuple[int, ...](), 0
    for turn, part in enumerate(parts):
        context += pack_tokens(part)
        if turn in anchors:
            chain, known = (), 0
        fields = context_fields(context, chain, known_tokens=known)
        requests.append(msgspec.structs.replace(request("g0:0"), turn=turn, **fields))
        chain, known = (*chain, 10 + 10 * turn), fields["context_tokens"]
    return requests


def whole(parts: list[list[int]]) -> bytes:
    return pack_tokens([token for part in parts for token in part])


def links_of(requests: list[TurnRequest]) -> dict[int, TurnRequest]:
    return {10 + 10 * turn: each for turn, each in enumerate(requests)}


@given(APPENDED, st.frozensets(st.integers(1, 7)))
def test_chain_resolves_to_the_whole_context(parts: list[list[int]], anchors: frozenset[int]) -> None:
    requests = [decode(TurnRequest, encode(each)) for each in requests_of(parts, anchors | {0})]
    assert [each.is_anchor for each in requests] == [turn in anchors | {0} for turn in range(len(parts))]
    for turn, each in enumerate(requests):
        assert assemble_context(each, links_of(requests)) == whole(parts[: turn + 1])


@given(APPENDED.filter(lambda parts: len(parts) > 1), st.data())
def test_altered_chain_is_reported_as_missing_context(parts: list[list[int]], data: st.DataObject) -> None:
    requests = requests_of(parts)
    links = links_of(requests)
    last = requests[-1]
    gone = data.draw(st.sampled_from(last.chain))
    with pytest.raises(ContextMissing, match=f"offset {gone}"):
        assemble_context(last, {offset: each for offset, each in links.items() if offset != gone})
    other = msgspec.structs.replace(links[gone], trajectory_id="g1:0")
    with pytest.raises(ContextMissing, match=f"offset {gone}"):
        assemble_context(last, links | {gone: other})
    bent = bytearray(links[gone].appended)
    bent[data.draw(st.integers(0, len(bent) - 1))] ^= 1
    with pytest.raises(ContextMissing, match="are not its"):
        assemble_context(last, links | {gone: msgspec.structs.replace(links[gone], appended=bytes(bent))})


@given(APPENDED, st.data())
def test_executor_holds_the_context_or_reads_it_back(parts: list[list[int]], data: st.DataObject) -> None:
    """Turns are served here or elsewhere, dispatched with tokens or by reference, once or repeatedly."""
    kept, requests = ContextCache(), requests_of(parts)
    links = links_of(requests)
    for turn, each in enumerate(requests):
        for _ in range(data.draw(st.integers(0, 2), label=f"times that turn {turn} comes here")):
            cut = data.draw(st.booleans())
            carried = msgspec.structs.replace(each, appended=b"") if cut else each
            dispatch = msgspec.structs.replace(
                dispatched(each),
                request_wire=msgspec.Raw(msgspec.msgpack.encode(carried)),
                offset=10 + 10 * turn,
                cut=cut,
            )
            context = kept.lookup(dispatch)
            if context is None:
                back = ContextReadBack(dispatch)
                assert back.offsets, "there is something to read back"
                for offset in back.offsets:
                    back.on_request(offset, links[offset])
                read = back.context()
                assert isinstance(read, bytes)
                context = read
                kept.store(each.trajectory_id, context)
            assert context == whole(parts[: turn + 1])


def test_served_contexts_are_cached_and_evicted_least_recently_used_first() -> None:
    kept = ContextCache(most_bytes=2 * (ENTRY_BYTES + 16) + 8)
    for number in (0, 1, 0, 2):
        carried = msgspec.structs.replace(request(f"g{number}:0"), **context_fields(pack_tokens([number] * 4)))
        assert kept.lookup(dispatched(carried)) == pack_tokens([number] * 4)
    assert (len(kept), kept.size) == (2, 2 * (ENTRY_BYTES + 16))
    (_, later) = requests_of([[0] * 4, [9]])
    assert kept.lookup(dispatched(later)) == pack_tokens([0, 0, 0, 0, 9]), "the trajectory that was served since"
    assert kept.lookup(dispatched(msgspec.structs.replace(later, trajectory_id="g1:0"))) is None


def test_empty_contexts_are_limited_by_cache_capacity() -> None:
    kept = ContextCache(most_bytes=10 * ENTRY_BYTES)
    for number in range(100):
        nothing = msgspec.structs.replace(request(f"g{number}:0"), **context_fields(b""))
        assert kept.lookup(dispatched(nothing)) == b""
    assert len(kept) <= 10


def test_context_with_a_wrong_digest_is_never_served() -> None:
    (first, second) = requests_of([[1, 2], [3]])
    kept = ContextCache()
    assert kept.lookup(dispatched(first)) == pack_tokens([1, 2])
    wrong = msgspec.structs.replace(second, digest=bytes(16))
    assert kept.lookup(dispatched(wrong)) is None
    with pytest.raises(ContextMissing):
        assemble_context(wrong, links_of([first, wrong]))
    assert kept.lookup(dispatched(second)) == pack_tokens([1, 2, 3])


def cut_of(requests_of: TurnRequest, offset: int) -> TurnDispatch:
    carried = msgspec.msgpack.encode(msgspec.structs.replace(requests_of, appended=b""))
    return msgspec.structs.replace(dispatched(requests_of), request_wire=msgspec.Raw(carried), offset=offset, cut=True)


def test_read_back_of_a_forged_chain_is_bounded_and_reported_as_missing_context() -> None:
    """A forged chain of 64 anchors of 65,536 tokens took 16 MB for each short turn that was read back."""
    long, own = pack_tokens([7] * 1000), requests_of([[1], [2]])[-1]
    forged = msgspec.structs.replace(own, chain=tuple(range(MAX_CHAIN)))
    back = ContextReadBack(dispatched(forged))
    tracemalloc.start()
    for offset in back.offsets:
        back.on_request(offset, msgspec.structs.replace(own, **context_fields(bytes(bytearray(long)))))
        held, _ = tracemalloc.get_traced_memory()
        assert held < 2 * len(long)
    tracemalloc.stop()
    assert isinstance(torn := back.context(), ContextMissing) and "more than its 2 tokens" in str(torn)


def test_dispatch_by_reference_is_served_only_with_its_own_context() -> None:
    """The executor once took the length and digest that it found: of a context without reserved room."""
    (first,) = requests_of([[1, 2]])
    (longer,) = requests_of([[1, 2, 3]])
    (same,) = requests_of([[3, 4]])
    for there in (longer, same):
        back = ContextReadBack(cut_of(first, 10))
        back.on_request(10, there)
        assert isinstance(back.context(), ContextMissing)
    back = ContextReadBack(cut_of(first, 10))
    back.on_request(10, first)
    assert back.context() == pack_tokens([1, 2])


FLAWS: dict[str, dict[str, object]] = {
    "contradicts its length": {"appended": b"\x00" * 400},
    "half a token": {"appended": b"\x00" * 7, "chain": (3,)},
    "an anchor that lacks its beginning": {"appended": b"", "chain": ()},
    "a chain that goes back": {"chain": (7, 3)},
    "a place twice": {"chain": (7, 7)},
}


@pytest.mark.parametrize("fields", FLAWS.values(), ids=FLAWS)
def test_inconsistent_request_is_distinguished_from_a_valid_request(fields: dict[str, object]) -> None:
    sound = requests_of([[1, 2], [3]])[-1]
    wrong = type(sound)(**{**msgspec.structs.asdict(sound), **fields})
    assert not sound.validation_error and decode(TurnRequest, encode(wrong)).validation_error


def test_dispatch_without_tokens_is_decoded() -> None:
    (sound,) = requests_of([[1, 2]])
    read = decode(TurnDispatch, encode(cut_of(sound, 10)))
    assert (read.request.context_tokens, ContextReadBack(read).offsets) == (2, (10,))


def test_unreadable_home_does_not_block_other_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is read once the leader of the home is back."""
    away = {0}

    class EmptyLog:
        """A log without requests, in which some homes are unreachable."""

        def __init__(self, _reader: object, offsets: dict[Place, list[int]], **_: object) -> None:
            self._homes = {home for _, home in offsets}

        def __iter__(self) -> Iterator[Envelope]:
            if self._homes & away:
                raise BusError("reading the ends", KafkaError(KafkaError._TIMED_OUT))
            return iter(())

    monkeypatch.setattr("rose.workers.executor.contexts.Reader", Mock())
    monkeypatch.setattr("rose.workers.executor.contexts.RecordFetch", EmptyLog)
    monkeypatch.setattr("rose.workers.executor.contexts.RETRY_SECONDS", 0.01)
    contexts = ContextStore(BusSettings("nowhere"), "executor")
    answered: list[int] = []

    def requests_of(home: int, number: int) -> None:
        cut = msgspec.structs.replace(request(f"g{number}:0", 1, home=home), appended=b"")
        assert contexts.find(dispatched(cut, cut=True)) is None

    def so_far() -> list[int]:
        answered.extend(dispatch.home for dispatch, _, _ in contexts.take_found())
        return sorted(answered)

    try:
        for number, home in enumerate((0, 1, 2)):
            requests_of(home, number)
        until(lambda: so_far() == [1, 2])
        for number, home in enumerate((0, 1), start=3):
            requests_of(home, number)
        until(lambda: so_far() == [1, 1, 2])
        away.clear()
        until(lambda: so_far() == [0, 0, 1, 1, 2])
        assert not contexts.is_reading
    finally:
        contexts.close()
