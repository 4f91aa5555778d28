"""A real Prometheus scrapes a run with a control app, a lending server and its users: every panel shows data."""

import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose.pipeline.observability.__main__ import FOLDER
from rose.pipeline.observability.dashboards import DASHBOARDS
from rose.pipeline.observability.grafana import RATE
from rose.pipeline.observability.reference import metrics
from rose.topics.local_broker import free_ports
from tests.support.brokers import EMBEDDED
from tests.support.rose_command import Rose, small
from tests.support.waiting import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus, a package of Debian, is not there"),
]

ROOT = Path(__file__).parents[2]

WINDOW = "15s"
"""Rate window of a run that lasts one or two minutes."""

START_SECONDS = 600.0
"""Time that a server may take to start on a busy machine."""

CONTROL = ("--set", "control.page_port=0")

NOTHING_WAITED = {"Slack of serving's steps": "nothing may wait for a step at the moment of any scrape"}
"""Panels whose values may all be NaN in such a short run, with the reason."""

OF_A_SERVER = ("vLLM server", "observed server")
"""Rows of the table that no role of this run exports: those of vLLM, and of an observed server (`test_lend.py`)."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A Prometheus that scrapes the targets of the file."""

    url: str
    targets: Path

    def scrape(self, roles: dict[str, int]) -> None:
        """Set the targets: each role by its port on loopback, under the label `role`."""
        targets = [{"targets": [f"127.0.0.1:{port}"], "labels": {"role": role}} for role, port in roles.items()]
        new = self.targets.with_suffix(".new")
        new.write_text(json.dumps(targets))
        new.rename(self.targets)

    def ask(self, path: str, **arguments: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.loads(answer.read())["data"]

    def values(self, query: str, *, since: float) -> list[list[float]]:
        """Return the values of each series of the query, once per second since the start."""
        found = self.ask("query_range", query=query, start=str(since), end=str(time.time()), step="1")
        return [[float(value) for _, value in series["values"]] for series in found["result"]]


@contextmanager
def prometheus(folder: Path) -> Iterator[Prometheus]:
    [port] = free_ports(1)
    targets, config = folder / "targets.json", folder / "prometheus.yml"
    targets.write_text("[]")
    job = {"job_name": "rose", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
    timing = {"scrape_interval": "1s", "evaluation_interval": "5s"}
    rules = [str(ROOT / "deploy" / "alerts" / "rose.yaml")]
    config.write_text(yaml.safe_dump({"global": timing, "rule_files": rules, "scrape_configs": [job]}))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    found = Prometheus(f"http://127.0.0.1:{port}", targets)
    try:
        until(lambda: process.poll() is None and ready(found))
        yield found
    finally:
        process.terminate()
        process.wait()


def ready(found: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{found.url}/-/ready", timeout=5):
            return True
    except OSError:
        return False


def neighbours() -> int:
    """Return the first of two consecutive free ports: executors count up from the first port."""
    while True:
        [port] = free_ports(1)
        with socket.socket() as second, suppress(OSError):
            second.bind(("127.0.0.1", port + 1))
            return port


def server_port(users_log: Path) -> int | None:
    """Return the port of the vLLM server once its users have started."""
    found = re.search(r"server=http://127\.0\.0\.1:(\d+)", users_log.read_text() if users_log.exists() else "")
    return int(found[1]) if found else None


@pytest.mark.parametrize("broker_kind", [EMBEDDED], indirect=True)
def test_every_panel_shows_a_run_and_every_role_exports_the_metrics_of_the_table(rose: Rose, tmp_path: Path) -> None:
    router, trainer, environment, control, evaluator = free_ports(5)
    executor = neighbours()
    ports = {"router": router, "trainer": trainer, "environment worker": environment}
    ports |= {"executor": executor, "lender": executor + 1, "control app": control, "evaluator": evaluator}
    settings_values = [f"metrics.router={router}", f"metrics.trainer={trainer}", f"metrics.environment={environment}"]
    settings_values += [f"metrics.executor={executor}", f"metrics.evaluator={evaluator}"]
    settings_values += ["evaluation.every_versions=6", "evaluation.tasks=4", "evaluation.samples=2"]
    settings = [word for each in settings_values for word in ("--set", each)]
    with prometheus(tmp_path) as found:
        found.scrape(ports)
        began = time.time()
        run = rose.start("demo", *small(run__executors=1, run__lenders=1, tasks__steps=12), *settings)
        with run:
            log = rose.folder / "runs" / "demo" / "logs" / "loadgen-1.log"
            until(lambda: run.poll() is not None or server_port(log) is not None, seconds=START_SECONDS)
            server = server_port(log)
            assert server is not None, run.communicate()[0]
            found.scrape({**ports, "vLLM server": server})
            deciding = rose.start("control", "--run", "demo", *CONTROL, "--set", f"metrics.control={control}")
            output = run.communicate(timeout=900)[0]
            deciding.kill()  # its broker ended with the demo
            deciding.communicate()
        assert run.returncode == 0, output
        check_panels(found, began)
        check_roles(found, began)
        check_rules(found)


def check_panels(found: Prometheus, began: float) -> None:
    empty = []
    for dashboard in DASHBOARDS:
        drawn = json.loads((ROOT / FOLDER / f"{dashboard.name}.json").read_text())
        for panel in drawn["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$job", ".*").replace(RATE, WINDOW)
                series = found.values(query, since=began)
                finite = any(math.isfinite(value) for values in series for value in values)
                if not series or not (finite or panel["title"] in NOTHING_WAITED):
                    empty.append(f"{dashboard.name}: {panel['title']}: {query}")
    assert empty == []


def check_roles(found: Prometheus, began: float) -> None:
    """Check the scraped metrics of each role against the table: names, labels and roles."""
    series = found.ask("series", **{"match[]": '{__name__=~"rose_.+"}', "start": str(began)})
    of_scrapes = {"__name__", "job", "instance", "role", "le"}
    exported: dict[str, set[str]] = {}
    rows = {name: row for row in metrics() for name in row.series}
    for each in series:
        row = rows.get(each["__name__"])
        if row is None:
            assert each["__name__"].endswith("_created"), each
            continue
        assert set(each) - of_scrapes == set(row.labels), each
        exported.setdefault(row.name, set()).add(each["role"])
    for row in metrics():
        roles = {role for role in row.role.split(", ") if role not in OF_A_SERVER}
        everyone = {"router", "trainer", "environment worker", "executor", "lender", "control app", "evaluator"}
        if row.name.startswith("rose_bus_"):
            assert exported[row.name] <= everyone and exported[row.name], row
        else:
            assert exported.get(row.name, set()) == roles, row


def check_rules(found: Prometheus) -> None:
    """Check that each rule was evaluated without an error."""
    (group,) = found.ask("rules")["groups"]
    assert [rule["lastError"] for rule in group["rules"] if rule["health"] != "ok"] == []
