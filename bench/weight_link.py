"""Measures the time from the optimizer's step until the last of four receivers has a version, over a slow link.

Each rate has its own network namespace (`unshare`, which needs root), in which the broker's output is throttled to the
rate (`tc`): the link from the broker to the fleet. The namespace holds a broker (Apache Kafka with KAFKA_HOME, which
slow links need: the embedded broker answers with whole partitions), a publisher, and one process with four receivers.
A receiver has *swapped* to a version once it has fetched, decoded and verified the version and has copied it into
tensors that stay in place, as an engine's tensors do. The updates are real: the update that `bench.weights --only
sizes` kept, forward and backward. Then the same versions are sent as anchors, as in a dense broadcast. The limit of
both is the payload of all receivers divided by the rate.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import structlog
import torch
from torch import Tensor

from bench.broker import scratch_broker
from bench.check import Check, Section
from bench.weight_speeds import kept
from rose.schemas.errors import RoseError
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.settings import BusSettings
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.publish import WeightPublisher
from rose.workers.weights.receive import WeightReceiver
from rose.workers.weights.trust import make_trust

RATES = (20, 100, 1000)
"""Rates in Mbit/s."""

RECEIVERS = 4
MODEL = "bench"
DELTAS, DENSE = 4, 1
"""Number of measured versions of each kind: a dense version takes minutes on the slowest link."""

PATIENCE_SECONDS = 1200.0


def link(folder: Path) -> Section:
    """Measure every rate in its own namespace. Raises RoseError."""
    kept(folder)
    section = Section("link")
    for rate in RATES:
        command = [sys.executable, "-m", "bench.weight_link", "measure", str(folder), str(rate)]
        done = subprocess.run(["unshare", "--net", *command], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise RoseError("a throttled link needs root, `unshare` and `tc` (htb, u32): see the error above")
        row: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
        section.rows.append(row)
        section.checks.append(
            Check(
                name=f"link_{rate}_mbit",
                value=round(float(row["delta_seconds"]) / float(row["dense_seconds"]), 4),
                unit="of a dense broadcast's time",
                bound=1.0,
                direction="max",
                against="the same versions as anchors, same link, same run",
                details={name: value for name, value in row.items() if name != "rate_mbit"},
            )
        )
    return section


def measure(folder: Path, rate: int) -> dict[str, float | str]:
    """Measure one rate; this process is in its own namespace."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    versions = [
        {name: torch.from_numpy(words).view(torch.bfloat16) for name, words in each.items()} for each in kept(folder)
    ]
    dense_bytes = sum(tensor.nbytes for tensor in versions[0].values())
    with scratch_broker() as broker:
        settings = broker.settings()
        create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=4))
        with (
            WeightPublisher(settings, MODEL, anchor_every=DELTAS) as deltas,
            WeightPublisher(settings, MODEL, anchor_every=0) as anchors,
            receivers(folder, settings) as fleet,
        ):
            deltas.publish(versions[0].items(), 0).result()
            fleet.all_at(0)
            throttle(broker.bootstrap, rate)
            sparse = [_publish(deltas, versions[number % 2], number, fleet) for number in range(1, 1 + DELTAS)]
            begin = 1 + DELTAS
            dense = [_publish(anchors, versions[number % 2], number, fleet) for number in range(begin, begin + DENSE)]
    delta_bytes = statistics.median(size for _, size in sparse)
    return {
        "rate_mbit": rate,
        "delta_seconds": round(statistics.median(seconds for seconds, _ in sparse), 3),
        "delta_limit_seconds": round(RECEIVERS * delta_bytes * 8 / (rate * 1e6), 3),
        "delta_megabytes": round(delta_bytes / 1e6, 3),
        "dense_seconds": round(statistics.median(seconds for seconds, _ in dense), 2),
        "dense_limit_seconds": round(RECEIVERS * dense_bytes * 8 / (rate * 1e6), 2),
        "dense_megabytes": round(dense_bytes / 1e6, 1),
    }


def _publish(publisher: WeightPublisher, tensors: dict[str, Tensor], version: int, fleet: "Fleet") -> tuple[float, int]:
    """Publish a version; return the seconds until the last receiver's swap, and the payload in bytes."""
    began = time.time()
    manifest = publisher.publish(tensors.items(), version).result()
    return fleet.all_at(version) - began, manifest.payload_bytes


def throttle(bootstrap: str, rate: int) -> None:
    """Limit the broker's output in this namespace to one link of this rate, except packets under 512 bytes.

    Small packets are acknowledgements to the publisher, which is not behind the link: they must not queue behind
    megabytes for the receivers.
    """
    sent = f"protocol ip u32 match ip sport {bootstrap.rpartition(':')[2]} 0xffff"
    for command in (
        "qdisc add dev lo root handle 1: htb default 1",
        f"class add dev lo parent 1: classid 1:2 htb rate {rate}mbit quantum 65536",
        "class add dev lo parent 1: classid 1:3 htb rate 10gbit quantum 65536",
        f"filter add dev lo parent 1: prio 1 {sent} match u16 0 0xfe00 at 2 flowid 1:3",
        f"filter add dev lo parent 1: prio 2 {sent} flowid 1:2",
    ):
        subprocess.run(["tc", *command.split()], check=True, capture_output=True)


class Fleet:
    """The process with the receivers, which reports each swap with receiver, version and time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self._lines = process.stdout

    def all_at(self, version: int) -> float:
        """Return the time, in unix seconds, when the last receiver had swapped to `version`."""
        at: dict[int, float] = {}
        while len(at) < RECEIVERS:
            line = self._lines.readline()
            if not line:
                raise RoseError("the receivers ended")
            swap = json.loads(line)
            if swap["version"] >= version:
                at[swap["receiver"]] = swap["at"]
        return max(at.values())


@contextmanager
def receivers(folder: Path, settings: BusSettings) -> Iterator[Fleet]:
    command = [sys.executable, "-m", "bench.weight_link", "receive", str(folder), json.dumps(asdict(settings))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Fleet(process)
    finally:
        process.terminate()
        process.wait(60)


def receive(folder: Path, settings: BusSettings) -> None:
    """Run the receivers until the process is terminated; write one line for every swap."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    shapes = {name: words.shape for name, words in kept(folder)[0].items()}
    threads = [Thread(target=_follow, args=(number, settings, shapes)) for number in range(RECEIVERS)]
    for thread in threads:
        thread.start()


def _follow(number: int, settings: BusSettings, shapes: Mapping[str, Sequence[int]]) -> None:
    resident = {name: torch.zeros(tuple(shape), dtype=torch.bfloat16) for name, shape in shapes.items()}
    trust = make_trust(settings, MODEL, WeightsConfig())
    receiver = WeightReceiver(settings, trust, shapes=shapes, client_id=f"receiver-{number}")
    receiver.start()
    while (staged := receiver.staged(PATIENCE_SECONDS)) is not None:
        for name, tensor in staged.tensors.items():
            resident[name].copy_(tensor)
        swap = {"receiver": number, "version": staged.version, "at": time.time()}
        print(json.dumps(swap) + "\n", end="", flush=True)  # one write: the receivers share the pipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=["measure", "receive"], help="what `bench.weights --only link` starts")
    parser.add_argument("folder", type=Path)
    parser.add_argument("where", help="Mbit/s to measure, or BusSettings as JSON to receive from")
    arguments = parser.parse_args()
    if arguments.program == "receive":
        receive(arguments.folder, BusSettings(**json.loads(arguments.where)))
    else:
        print(json.dumps(measure(arguments.folder, int(arguments.where))))


if __name__ == "__main__":
    main()
