"""A rolling upgrade under load: from the wheel of this version to the next version and back.

No stall is excused: there are two processes of every role except the trainer, and one of them is always healthy.

ROSE_CHAOS_SEED repeats a seed.
"""

import os
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from rose.topics.catalog import (
    DISPATCHED,
    EVALUATION_RESULTS,
    EVALUATIONS,
    GRANTS,
    PROMPTS,
    RECORD_TOPICS,
    REQUESTED,
    SETTLES,
)
from rose.topics.settings import BusSettings
from tests.support.brokers import KAFKA, start
from tests.support.installed_versions import build, install
from tests.support.storm.log_checks import read_all
from tests.support.storm.run import NAMESPACE, Report, blow
from tests.support.storm.shape import Shape
from tests.upgrade.next_version import FIELD, ROOT, VALUE, make_next
from tests.upgrade.rolling import FLEET, rolling

SEED = int(os.environ.get("ROSE_CHAOS_SEED", random.randrange(2**20)))

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed: it produces the prompts"),
]

READ = """
import sys
from confluent_kafka import OFFSET_BEGINNING
from rose.topics.catalog import RECORD_TOPICS
from rose.topics.log_reader import read_to_end
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
settings, spoiled = BusSettings(*sys.argv[1:]), []
reader = Reader(settings, "test")
places = {(topic, part): OFFSET_BEGINNING for topic in RECORD_TOPICS for part in range(reader.partition_count(topic))}
read = sum(1 for each in read_to_end(settings, places, on_invalid=spoiled.append))
assert read and not spoiled, spoiled
"""
"""Program that reads every record on the log, of either version."""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """This version and the next version, each installed from its wheel into its own folder."""
    folder = tmp_path_factory.mktemp("versions")
    make_next(folder / "next")
    for name, source in (("this", ROOT), ("next", folder / "next")):
        install(build(source, folder / f"{name}-wheel"), folder / f"{name}-site")
    return folder / "this-site", folder / "next-site"


def clean(report: Report) -> None:
    print(report)
    assert not report.breaches and not report.crashes and not report.letters, str(report)
    assert report.left.keys() == {0}, report.left


def test_every_role_is_upgraded_and_downgraded_under_load(tmp_path: Path, sites: tuple[Path, Path]) -> None:
    """The processes run from wheels on Apache Kafka and are replaced one by one, a lending server among them."""
    print(f"ROSE_CHAOS_SEED={SEED}")
    shape = Shape(nodes=0, lenders=1, round_seconds=300.0, groups_per_second=0.7, blocking_groups=0)
    plan = rolling(SEED, shape, FLEET, [*FLEET, *FLEET])
    with start(KAFKA, tmp_path / "broker") as broker:
        report = blow(tmp_path / "roles", plan, broker, sites=sites)
        clean(report)
        assert sum(report.faults.values()) == len(plan.planned_faults) // 2
        settings = broker.settings(NAMESPACE)
        for site in sites:
            subprocess.run(
                [sys.executable, "-P", "-c", READ, settings.bootstrap, NAMESPACE],
                env={**os.environ, "PYTHONPATH": str(site)},
                check=True,
            )
        both_hands_wrote(settings)
        requests_passed_unharmed(settings)


def both_hands_wrote(settings: BusSettings) -> None:
    """Assert that both versions wrote every kind of record, except those that users, a control app and an evaluator
    write."""
    left = (GRANTS, PROMPTS, SETTLES, EVALUATIONS, EVALUATION_RESULTS)
    topics = {settings.topic(topic): topic for topic in RECORD_TOPICS if topic not in left}
    hands: defaultdict[object, Counter[object]] = defaultdict(Counter)
    for found in read_all(settings, [*topics]):
        if found.value is None:
            continue
        hands[topics[found.topic].name][found.record.get(FIELD)] += 1
    print({name: dict(counts) for name, counts in hands.items()})
    assert len(hands) == len(topics)
    for name, counts in hands.items():
        assert counts.keys() == {None, VALUE}, (name, counts)


def requests_passed_unharmed(settings: BusSettings) -> None:
    """Assert that executors read each request as the environment worker wrote it, through routers of either version."""
    requested: dict[tuple[str, int], object] = {}
    sent: Counter[tuple[bool, bool]] = Counter()
    dispatches = []
    for found in read_all(settings, [settings.topic(REQUESTED), settings.topic(DISPATCHED)]):
        if found.value is None or found.record.get("withdrawn"):
            continue
        if found.topic == settings.topic(REQUESTED):
            requested[found.record["trajectory_id"], found.record["turn"]] = found.record
        else:
            dispatches.append(found.record)
    for dispatch in dispatches:
        request = dispatch["request"]
        assert request == requested[request["trajectory_id"], request["turn"]]
        sent[FIELD in request, FIELD in dispatch] += 1
    print(f"dispatches, by whether the request and the dispatch are of the next version: {dict(sent)}")
    assert sent.keys() == {(False, False), (False, True), (True, False), (True, True)}
