"""Measures contexts by reference: bytes on the bus, turns a second, memory of the router, and reading a context back.

Keeps true: a trajectory of `TURNS` turns grows evenly to its context. Sampled and observed tokens are random, so no
bytes are saved by chance. Bytes are the bytes of request and dispatch, with keys and headers, before compression.
"Whole" is the same pair of records with the full context and without the fields that refer to it.
"""

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from functools import partial

import msgspec
import numpy as np

from bench.check import Check
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.router import Router
from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.schemas.arrays import pack_tokens
from rose.schemas.heartbeats import ExecutorState, Hardware, SlackHeartbeat, WorkerClass
from rose.schemas.limits import MAX_CHAIN
from rose.schemas.prompts import Sampling
from rose.schemas.record import Record
from rose.schemas.turns import ContextMissing, TurnDispatch, TurnRequest, context_fields
from rose.schemas.wire import encode, headers_of
from rose.topics.catalog import REQUESTED
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.executor.contexts import ContextStore

TURNS = 20
LONG = 16_000
"""Context length in tokens. From this length on the bytes are compared with the bytes of the new tokens, for shorter
contexts with the bytes of whole contexts."""
PREFILL_TOKENS_PER_SECOND = 20_000.0
"""Prefill rate of the executor to which a read-back is compared: about 1.6 s for 32,000 tokens."""
LIVE = 2_000
"""Number of trajectories by which the router's memory is divided."""
MISSES = 100
STRIDE = 500
"""Number of trajectories in a home, and therefore of records between two requests of one trajectory."""


def trajectory(
    name: str, context: int, rng: np.random.Generator, *, turns: int = TURNS, offset: int = 10**6
) -> list[tuple[int, TurnRequest]]:
    """Return the requests of one trajectory, each with its offset."""
    tokens = pack_tokens(rng.integers(0, 150_000, context))
    requests: list[tuple[int, TurnRequest]] = []
    chain, known = tuple[int, ...](), 0
    for turn in range(turns):
        length = context * (turn + 1) // turns
        request = TurnRequest(
            trajectory_id=name,
            group_id=name.partition(":")[0],
            home=0,
            environment="calculator",
            turn=turn,
            **context_fields(tokens[: 4 * length], chain, known_tokens=known),
            sampling=Sampling(max_tokens=256, stop_token_ids=(2,)),
            requested_at=1.7e9 + turn,
            patience_seconds=300.0,
        )
        requests.append((offset, request))
        chain, known = (*chain, offset), length
        offset += int(rng.integers(1, 2 * STRIDE))
    return requests


def bytes_a_turn(contexts: Sequence[int]) -> list[Check]:
    """Measure the bytes per turn for each context length."""
    return [_bytes_at(context) for context in contexts]


def _bytes_at(context: int) -> Check:
    by_reference = whole = new = 0
    for offset, request in trajectory("group-1234:5", context, np.random.default_rng(0)):
        router = _router()
        (dispatch,) = router.on_event(ReceivedRequest.from_record(request, offset), 1.0)
        assert isinstance(dispatch, TurnDispatch)
        new += len(request.appended)
        by_reference += _on_the_bus(request, encode(request)) + _on_the_bus(dispatch, encode(dispatch))
        fields = msgspec.structs.asdict(request)
        for name in ("appended", "context_tokens", "digest", "chain"):
            del fields[name]
        whole_request = msgspec.msgpack.encode({**fields, "context": bytes(4 * request.context_tokens)})
        sent = msgspec.msgpack.decode(encode(dispatch))
        del sent["offset"], sent["cut"]
        sent["request"] = msgspec.Raw(whole_request)
        whole += _on_the_bus(request, whole_request) + _on_the_bus(dispatch, msgspec.msgpack.encode(sent))
    short = context < LONG
    return Check(
        name=f"bytes_{context}",
        value=round(by_reference / (whole if short else new), 3),
        unit="of whole contexts" if short else "of new tokens",
        bound=1.0 if short else 3.0,
        direction="max",
        against=f"request and dispatch of each of {TURNS} turns",
        details={
            "a_turn": round(by_reference / TURNS),
            "whole_a_turn": round(whole / TURNS),
            "new_tokens_a_turn": round(new / TURNS),
        },
    )


def _on_the_bus(record: Record, wire: bytes) -> int:
    name = record.request.trajectory_id if isinstance(record, TurnDispatch) else getattr(record, "trajectory_id", "")
    return len(wire) + len(name) + sum(len(key) + len(value) for key, value in headers_of(record, name))


def memory(context: int) -> Check:
    """Measure the core's memory per trajectory with a dispatched turn: with the longest chain, and with half of it."""
    longest, halfway = _held(context, MAX_CHAIN + 1, MAX_CHAIN), _held(context, TURNS, TURNS // 2)
    return Check(
        name="router_memory",
        value=round(longest),
        unit="bytes a live trajectory",
        bound=4096,
        direction="max",
        against=f"{LIVE} trajectories of {context} tokens, each with a chain of {MAX_CHAIN} and a turn at an executor",
        details={f"with_a_chain_of_{TURNS // 2}": round(halfway)},
    )


def _held(context: int, turns: int, turn: int) -> float:
    """Return the bytes per trajectory of this many turns, at turn `turn`."""
    rng = np.random.default_rng(0)
    wires: list[tuple[bytes, int]] = []
    for number in range(LIVE):
        offset, request = trajectory(f"group-{number // 8}:{number % 8}", context, rng, turns=turns)[turn]
        wires.append((encode(request), offset))
    decoder = msgspec.msgpack.Decoder(TurnRequest)
    gc.collect()
    tracemalloc.start()
    router = _router(turns=LIVE)
    before = tracemalloc.get_traced_memory()[0]
    for wire, offset in wires:
        # As read from the log: the bytes have no other reference.
        router.on_event(ReceivedRequest(decoder.decode(wire), bytes(bytearray(wire)), offset), 1.0)
    assert router.outstanding == LIVE
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return held / LIVE


def read_back(settings: BusSettings, context: int) -> Check:
    """Measure the read-back of a context that the executor does not hold, from the dispatch to the last token.

    The first read-back is left out, because it connects.
    """
    rng = np.random.default_rng(0)
    chains = _written(settings, context, rng)
    router = _router(turns=MISSES)
    seconds = []
    with closing(ContextStore(settings, "bench")) as contexts:
        for offset, last in chains:
            (dispatch,) = router.on_event(ReceivedRequest.from_record(last, offset), 1.0)
            assert isinstance(dispatch, TurnDispatch)
            began = time.perf_counter()
            assert contexts.find(dispatch) is None, "nothing is kept of it"
            while not (found := list(contexts.take_found())):
                time.sleep(0.0005)  # no event reports a found context, and an executor's loop polls too, every 2 ms
            seconds.append(time.perf_counter() - began)
            assert not isinstance(found[0][1], ContextMissing), found[0][1]
    p99 = statistics.quantiles(seconds[1:], n=100)[98]
    prefill = context / PREFILL_TOKENS_PER_SECOND
    return Check(
        name="read_back",
        value=round(p99 / prefill, 4),
        unit="of the prefill that it precedes",
        bound=0.1,
        direction="max",
        against=f"{context} tokens at {PREFILL_TOKENS_PER_SECOND:,.0f} tokens/s, p99 of {MISSES} misses",
        details={
            "p50_milliseconds": round(1000 * statistics.median(seconds), 2),
            "p99_milliseconds": round(1000 * p99, 2),
            "prefill_milliseconds": round(1000 * prefill),
            "first_milliseconds": round(1000 * seconds[0], 2),
            "requests_wanted": TURNS - 1,
            "records_between": (TURNS - 2) * STRIDE,
        },
    )


def _written(settings: BusSettings, context: int, rng: np.random.Generator) -> list[tuple[int, TurnRequest]]:
    """Write STRIDE interleaved trajectories to one home.

    Leave out the last request of MISSES of them, which is sent later.
    """
    lives = [trajectory(f"group-{number}:0", context, rng) for number in range(STRIDE)]
    places: list[list[int]] = [[] for _ in lives]
    with closing(Writer(settings, "bench")) as writer:
        for turn in range(TURNS - 1):
            for number in random.Random(turn).sample(range(STRIDE), STRIDE):
                request = msgspec.structs.replace(lives[number][turn][1], chain=tuple(places[number]))
                writer.write(
                    REQUESTED,
                    request,
                    key=request.trajectory_id,
                    partition=0,
                    on_delivery=partial(_note, places[number]),
                )
            writer.flush()
    return [
        (10**6 + number, msgspec.structs.replace(life[-1][1], chain=tuple(places[number])))
        for number, life in enumerate(lives[:MISSES])
    ]


def _note(places: list[int], _partition: int, offset: int) -> None:
    places.append(offset)


def _router(turns: int = 8) -> Router:
    router = Router(RouterConfig())
    for slot in range(-(-turns // 128)):
        heartbeat = SlackHeartbeat(
            worker=f"executor-{slot}",
            incarnation=1,
            slot=slot,
            sequence=1,
            worker_class=WorkerClass.DEDICATED,
            state=ExecutorState.READY,
            policy_version=0,
            hardware=Hardware(prefill_tokens_per_second=PREFILL_TOKENS_PER_SECOND, decode_tokens_per_second=200.0),
            kv_bytes_total=10**12,
            kv_bytes_free=10**12,
            kv_bytes_per_token=10_000,
            max_turns=128,
            token_budget=10**8,
            ttl_seconds=2.0,
            sent_at=1.0,
        )
        router.on_event(heartbeat, 1.0)
    return router
