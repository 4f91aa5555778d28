"""Measures the cost of traces for a written record: `python -m bench.tracing`.

The measure is the writer's processor time to hand a turn's request to the Kafka client, in alternating rounds: without
a collector (off), without the check for a collector (blind), and with a running collector (on). The ratio of off and
blind is the cost for all users, the ratio of on and blind the cost for users of tracing. `--json FILE` stores the
result.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from bench.broker import scratch_broker
from bench.check import Check, options, tell
from rose.schemas.arrays import pack_tokens
from rose.schemas.prompts import Sampling
from rose.schemas.record import Record
from rose.schemas.turns import TurnRequest, context_fields
from rose.schemas.wire import EncodedRecord, encoded, headers_of
from rose.topics import counts, tracing
from rose.topics.admin import create_topics
from rose.topics.catalog import REQUESTED, Partitions, Topic
from rose.topics.writer import Writer
from tests.support.otlp_collector import collector

ROUNDS = 41
RECORDS = 1_000
"""Records of a round; the export queue has room for as many spans."""

CONTEXT = pack_tokens(range(150))
SAMPLING = Sampling(temperature=1.0, max_tokens=32)


class Blind(Writer):
    """A writer without the check for an exporter."""

    def write(
        self,
        topic: Topic,
        record: Record | EncodedRecord[Any],
        *,
        key: str,
        partition: int | None = None,
        trajectory_id: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        on_delivery: Callable[[int, int], None] | None = None,
    ) -> None:
        ready = record if isinstance(record, EncodedRecord) else encoded(record)
        own_headers = [*headers_of(ready.record, trajectory_id), *(headers or {}).items()]
        self._produce(
            self._settings.topic(topic),
            key.encode(),
            ready.wire,
            partition,
            own_headers,
            on_delivery,
            counts.written(topic),
        )


def request(number: int) -> TurnRequest:
    return TurnRequest(
        trajectory_id=f"group-{number // 16}:{number % 16}",
        group_id=f"group-{number // 16}",
        home=0,
        environment="calculator",
        turn=0,
        **context_fields(CONTEXT),
        sampling=SAMPLING,
        requested_at=1.0,
        patience_seconds=60.0,
    )


def one_round(writer: Writer, requests: list[TurnRequest]) -> float:
    """Return the processor seconds of this thread per record."""
    began = time.thread_time()
    for each in requests:
        name = each.trajectory_id
        writer.write(REQUESTED, each, key=name, partition=0, trajectory_id=name)
    took = time.thread_time() - began
    writer.flush()
    return took / len(requests)


def main() -> None:
    arguments = options(__doc__).parse_args()
    requests = [request(number) for number in range(RECORDS)]
    taken: dict[str, list[float]] = {"blind": [], "off": [], "on": []}
    with scratch_broker() as broker, collector() as found:
        settings = broker.settings()
        create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1))
        with closing(Blind(settings, "blind")) as blind, closing(Writer(settings, "writer")) as writer:
            for number in range(ROUNDS):
                ways = [("blind", blind), ("off", writer)]
                for name, way in ways[:: 1 if number % 2 else -1]:  # the first has colder caches
                    taken[name].append(one_round(way, requests))
                with tracing.export_traces(found.endpoint, 1.0, role="bench"):
                    taken["on"].append(one_round(writer, requests))
    micros = {name: round(1e6 * statistics.median(rounds[1:]), 2) for name, rounds in taken.items()}
    spread = [1e6 * each for each in statistics.quantiles(taken["blind"][1:], n=4)]
    details = {
        **{f"{name}_microseconds": value for name, value in micros.items()},
        "blind_quartiles_microseconds": [round(spread[0], 2), round(spread[2], 2)],
    }
    check = Check(
        name="tracing_off_ratio",
        value=round(micros["off"] / micros["blind"], 3),
        unit="of a writer that cannot trace",
        bound=1.02,
        direction="max",
        against=f"median processor time of a record, {ROUNDS - 1} interleaved rounds of {RECORDS} each",
        details=details,
    )
    tell([check], broker=broker.name, file=arguments.json)


if __name__ == "__main__":
    main()
