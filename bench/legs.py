"""Measures where the bus time of a turn goes: a small run with real roles, and every leg of its turns.

    python -m bench.legs                              on the embedded broker
    KAFKA_HOME=... python -m bench.legs               on Apache Kafka

The run has one engine, one environment worker, one router and a trainer. One group of eight trajectories is in flight
at a time: the next prompt is sent once all samples of the previous prompt are on the log. The trainer takes its only
step after the last group, because it has no machine of its own here. Each prompt meets an idle bus.
The bus time of a turn runs from the request to the inbox, without the wait for room, and from the last token until the
result is applied. The floor is measured before on the same broker: a transaction with one request and the offsets of
its input, not directly after another transaction, and three hops of a record from a producer to a consumer.
`--json FILE` writes one object with `checks`, the legs and the floor.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from importlib.resources import files
from pathlib import Path

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from bench.broker import scratch_broker
from bench.check import Check, keep, options
from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.demo import CONFIGURATION, training_prompts
from rose.pipeline.replay.description import latency_stages
from rose.pipeline.simulation.recorded_run import on_the_bus
from rose.schemas.prompts import Prompt
from rose.schemas.samples import Sample
from rose.schemas.turns import TurnTimes
from rose.topics.admin import create_topics
from rose.topics.catalog import DISPATCHED, PROMPTS, REQUESTED, SAMPLES, Partitions, home_partition
from rose.topics.processes import die_with_parent
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

TRAJECTORIES = 8
"""Number of trajectories in flight."""
FIRST_GROUPS = 5
"""Number of groups at the start that are not counted, because processes and caches are cold."""
FLOOR_ROUNDS, FLOOR_COLD = 250, 50
"""Number of rounds, and of rounds at the start that are not counted."""
FLOOR_BYTES = 600
HOPS = 3
"""Number of hops: request to router, dispatch to inbox, result to environment worker."""
FLOOR_PAUSE_SECONDS = 0.02
"""Pause before each transaction: otherwise the broker would first have to end the previous transaction."""
SILENT_SECONDS = 120.0
"""Time without a sample after which the run counts as stalled."""
LEAVE_SECONDS = 60.0
"""Time that a run may take to end."""
MEDIAN_MILLISECONDS, P99_MILLISECONDS = 20.0, 80.0


def settings_of(groups: int) -> dict[str, object]:
    """Return the settings that differ from the demo's configuration."""
    return {
        "run.lenders": 0,
        "run.executors": 1,
        "tasks.group_size": TRAJECTORIES,
        "environment.window_groups": groups,
        "trainer.groups_per_step": groups,
        "trainer.total_groups": groups,
    }


def floor(settings: BusSettings) -> dict[str, dict[str, float]]:
    """Measure the floor: a bare transaction and a bare hop, with one client each."""
    create_topics(settings, Partitions())
    requests, inbox = settings.topic(REQUESTED), settings.topic(DISPATCHED)
    reader = Consumer(settings.consumer("bench-floor", "floor"))
    reader.assign([TopicPartition(inbox, 0, 0)])
    plain = Producer(settings.producer("bench-floor"))
    asking = Producer(settings.transactional("bench-floor", "floor"))
    asking.init_transactions(30)
    transactions, hops = [], []
    for offset in range(FLOOR_ROUNDS):
        began = time.perf_counter()
        asking.begin_transaction()
        asking.produce(requests, bytes(FLOOR_BYTES), partition=0)
        done = [TopicPartition(inbox, 0, offset)]
        asking.send_offsets_to_transaction(done, reader.consumer_group_metadata(), 30)
        asking.commit_transaction(30)
        transactions.append(time.perf_counter() - began)
        began = time.perf_counter()
        plain.produce(inbox, bytes(FLOOR_BYTES), partition=0)
        while reader.poll(1.0) is None:
            pass
        hops.append(time.perf_counter() - began)
        time.sleep(FLOOR_PAUSE_SECONDS)  # no client reports that the broker has ended the transaction
    reader.close()
    return {"transaction": percentiles(transactions[FLOOR_COLD:]), "hop": percentiles(hops[FLOOR_COLD:])}


def run(settings: BusSettings, folder: Path, groups: int) -> list[TurnTimes]:
    """Return the times of each applied turn, in the order of the requests. Raises the exceptions of `played`."""
    values = {**settings_of(groups), "run.folder": folder, "broker.embedded": str(settings.embedded).lower()}
    settled = [f"{key}={value}" for key, value in values.items()]
    configuration = Path(str(files("rose.pipeline.local") / CONFIGURATION))
    config = load(Common(config=configuration, settings=settled))
    create_topics(settings, config.partitions)
    prompts = training_prompts(config.settings.tasks, run="legs", seed=0, groups=groups)
    flags = [word for each in settled for word in ("--set", each)]
    where = ["--config", str(configuration), "--bootstrap-server", settings.bootstrap]
    command = [sys.executable, "-m", "rose.pipeline.cli.main", "up", "--name", "legs", *where, *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent(os.getpid(), signal.SIGTERM)
    )
    try:
        samples = list(played(settings, prompts, process))
        if process.wait(LEAVE_SECONDS):
            raise subprocess.CalledProcessError(process.returncode, command)
    finally:
        process.terminate()
        try:
            process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    return sorted((turn.times for each in samples for turn in each.turns), key=lambda times: times.requested_at)


def played(settings: BusSettings, prompts: Iterable[Prompt], process: subprocess.Popen[bytes]) -> Iterator[Sample]:
    """Send each prompt once all samples of the previous prompt are on the log, and yield the samples.

    Raises CalledProcessError if the run has ended, TimeoutError if no sample comes for SILENT_SECONDS.
    """
    with closing(Reader(settings, "bench-legs")) as reader, closing(Writer(settings, "bench-legs")) as writer:
        homes = writer.partition_count(PROMPTS)
        reader.assign({(SAMPLES, each): OFFSET_BEGINNING for each in range(reader.partition_count(SAMPLES))})
        for prompt in prompts:
            writer.write(PROMPTS, prompt, key=prompt.group_id, partition=home_partition(prompt.group_id, homes))
            writer.flush()
            missing, last_sample_at = prompt.group_size, time.monotonic()
            while missing:
                items = reader.read(missing, 1.0)
                if not items and process.poll() is not None:
                    raise subprocess.CalledProcessError(process.returncode, process.args)
                if items:
                    last_sample_at = time.monotonic()
                elif time.monotonic() - last_sample_at > SILENT_SECONDS:
                    raise TimeoutError(f"no sample of {prompt.group_id} came for {SILENT_SECONDS:.0f} s")
                for item in items:
                    if isinstance(item, Envelope) and isinstance(item.record, Sample):
                        missing -= 1
                        yield item.record


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and p99 in milliseconds."""
    p99 = statistics.quantiles(seconds, n=100)[98]
    return {"median": round(1000 * statistics.median(seconds), 2), "p99": round(1000 * p99, 2)}


def checks_of(turns: Sequence[TurnTimes]) -> tuple[list[Check], dict[str, dict[str, float]]]:
    """Return the checks, and the figures of each leg."""
    legs: dict[str, list[float]] = {}
    for times in turns:
        for leg in latency_stages(times):
            legs.setdefault(leg.name, []).append(leg.seconds)
    figures = percentiles([on_the_bus(times) for times in turns])
    bounds = {"median": MEDIAN_MILLISECONDS, "p99": P99_MILLISECONDS}
    against = f"{TRAJECTORIES} trajectories in flight, one engine, {len(turns)} turns"
    checks = [Check(f"bus_{name}", figures[name], "ms", bound, "max", against) for name, bound in bounds.items()]
    return checks, {name: percentiles(seconds) for name, seconds in legs.items()}


def main() -> None:
    """Run the benchmark; see the module."""
    parser = options(__doc__)
    parser.add_argument("--groups", type=int, default=60, help="groups of trajectories, one after another")
    arguments = parser.parse_args()
    if arguments.groups < 2 * FIRST_GROUPS:
        parser.error(f"--groups is at least {2 * FIRST_GROUPS}: the first {FIRST_GROUPS} are not counted")
    with scratch_broker() as broker, tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        bare = floor(broker.settings("floor."))
        turns = run(broker.settings(), Path(folder), arguments.groups)
        checks, legs = checks_of(turns[len(turns) * FIRST_GROUPS // arguments.groups :])
    if keep({"broker": broker.name, "checks": checks, "legs": legs, "floor": bare}, arguments.json):
        return
    print(f"broker: {broker.name}")
    least = bare["transaction"]["median"] + HOPS * bare["hop"]["median"]
    print(
        f"floor: {least:.2f} ms median, a transaction of {bare['transaction']} ms and {HOPS} hops of {bare['hop']} ms"
    )
    for name, leg in legs.items():
        print(f"  {name:16} {leg['median']:9.2f} ms median {leg['p99']:9.2f} ms p99")
    for check in checks:
        print(f"{check.name:12} {check.value:9.2f} ms (at most {check.bound:g}: {'met' if check.met else 'MISSED'})")


if __name__ == "__main__":
    main()
