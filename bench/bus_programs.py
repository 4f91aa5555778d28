"""The two programs that the bus benchmark compares, each in its own process.

`router` is ROSE's router as its command runs it. `bare` is the simplest replacement of the router: plain clients with
the same settings, which never pause and copy every request into an inbox unchanged and undecoded.
"""

import argparse
import json
import threading

from confluent_kafka import Consumer, Producer, TopicPartition

from rose.pipeline.cli.roles import freeze_imports
from rose.pipeline.process_setup import stop_on_signals
from rose.pipeline.routing.config import RouterConfig
from rose.pipeline.routing.service import IDLE_SECONDS, READ_LIMIT, run_router
from rose.topics.catalog import DISPATCHED, LOG_GROUP, REQUESTED
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings


def run_bare(settings: BusSettings, stop: threading.Event) -> None:
    """Consume and produce, and do nothing else."""
    counter = Reader(settings, "bench-bare")
    homes, slots = counter.partition_count(REQUESTED), counter.partition_count(DISPATCHED)
    counter.close()
    consumer = Consumer(settings.consumer("bench-bare", LOG_GROUP))
    producer = Producer(settings.producer("bench-bare"))
    consumer.assign([TopicPartition(settings.topic(REQUESTED), home, 0) for home in range(homes)])
    name = settings.topic(DISPATCHED)
    sent = 0
    while not stop.is_set():
        first = consumer.poll(IDLE_SECONDS)
        if first is None:
            continue
        for message in [first, *consumer.consume(READ_LIMIT - 1, 0)]:
            if message.error() is None:
                producer.produce(name, value=message.value(), key=message.key(), partition=sent % slots)
                sent += 1
        producer.poll(0)
    producer.flush()
    consumer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=["router", "bare"])
    parser.add_argument("settings", help="BusSettings as JSON")
    parser.add_argument("--number", type=int, default=0, help="number of the router, if there are several")
    arguments = parser.parse_args()
    settings = BusSettings(**json.loads(arguments.settings))
    stop = stop_on_signals()
    freeze_imports()
    if arguments.program == "router":
        run_router(settings, RouterConfig(), stop, f"router-{arguments.number}")
    else:
        run_bare(settings, stop)


if __name__ == "__main__":
    main()
