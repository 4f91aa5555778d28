"""A live router whose choice is a policy of the simulator, to compare what a simulation says with a real run.

    python -m bench.fleet.policy_router round_robin SETTINGS.json       (as `bench.what_if` starts it)

Keeps true: it dispatches what `PolicyRouter` decides and nothing else. It has no fencing token, no journal, and no
state that survives it: one of them runs at a time, for one run.
"""

import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
from confluent_kafka import OFFSET_BEGINNING

from rose.pipeline.process_setup import stop_on_signals
from rose.pipeline.routing.cell_session import received_request
from rose.pipeline.simulation.policies import PolicyRouter
from rose.schemas.turns import TurnDispatch, TurnRequest, TurnResult
from rose.topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, REQUESTED
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

NAME = "bench-policy-router"

BATCH, WAIT_SECONDS = 500, 0.02


def main() -> None:
    """Route until a signal comes."""
    policy, file = sys.argv[1:]
    settings = msgspec.json.decode(Path(file).read_bytes(), type=BusSettings)
    stopping = stop_on_signals()
    router = PolicyRouter(policy)
    with closing(Reader(settings, NAME)) as reader, closing(Writer(settings, NAME)) as writer:
        topics = (REQUESTED, COMPLETED, HEARTBEATS)
        places = {(topic, part): OFFSET_BEGINNING for topic in topics for part in range(reader.partition_count(topic))}
        reader.assign(places)
        print("ready", flush=True)
        while not stopping.is_set():
            decisions = list(router.tick(time.time()))
            for item in reader.read(BATCH, WAIT_SECONDS):
                if isinstance(item, Envelope) and item.record is not None:
                    event = received_request(item) if isinstance(item.record, TurnRequest) else item.record
                    decisions += router.on_event(event, time.time())
            for decision in decisions:
                _write(writer, decision)
            writer.poll()


def _write(writer: Writer, decision: TurnDispatch | TurnResult) -> None:
    if isinstance(decision, TurnDispatch):
        name = decision.request.trajectory_id
        writer.write(DISPATCHED, decision, key=name, partition=decision.slot, trajectory_id=name)


if __name__ == "__main__":
    main()
