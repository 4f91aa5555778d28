"""Documented, drawn and alerted metrics equal those that the code exports."""

import ast
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, CollectorRegistry

from rose.pipeline.observability.__main__ import FOLDER, generated_files
from rose.pipeline.observability.dashboards import DASHBOARDS
from rose.pipeline.observability.grafana import UnknownMetric, filter_by_job, names_in
from rose.pipeline.observability.reference import SOURCES, UNITS, Metric, metrics, servers
from rose.pipeline.routing.counters import Counters
from rose.pipeline.routing.metrics import COUNTS
from rose.workers.executor.metrics import HELD_BACK
from rose.workers.lender.admission import HoldReason

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "alerts" / "rose.yaml"
TESTS = ROOT / "deploy" / "alerts" / "tests" / "rose.yaml"
PLURALS = re.compile(r"(milli|micro)seconds|minutes|hours|kilobytes|mebibytes|percent")


def table() -> list[Metric]:
    return [*metrics(), *servers()]


def known() -> set[str]:
    return {series for each in table() for series in each.series}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_page_and_dashboards_equal_the_generated_files() -> None:
    written = generated_files()
    stale = [path for path, content in written.items() if (ROOT / path).read_text() != content]
    assert stale == [], "run `python -m rose.pipeline.observability`"
    assert {path.name for path in (ROOT / FOLDER).iterdir()} == {f"{each.name}.json" for each in DASHBOARDS}


def test_every_module_with_metrics_is_in_the_table() -> None:
    kinds = {"Counter", "Gauge", "Histogram", "Summary", "CounterMetricFamily", "GaugeMetricFamily"}
    declaring = {
        ".".join(("rose", *file.relative_to(ROOT).with_suffix("").parts))
        for package in ("schemas", "topics", "pipeline", "workers")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args
        if (node.func.id in kinds and isinstance(node.args[0], ast.Constant | ast.JoinedStr))
        or (node.func.id == "partial" and isinstance(node.args[0], ast.Name) and node.args[0].id in kinds)
    }
    assert declaring == {source.module for source in SOURCES}


def test_metric_names_follow_the_conventions() -> None:
    for each in metrics():
        assert each.name.startswith("rose_"), each
        assert each.name.endswith("_total") == (each.kind == "counter"), each
        assert each.kind != "histogram" or each.unit in UNITS, each
        assert not PLURALS.search(each.name), each
        assert each.sentence.endswith(".") and each.sentence[0].isupper(), each


def test_exported_metrics_have_the_types_and_labels_of_the_table() -> None:
    rows = {each.name.removesuffix("_total"): each for each in metrics()}
    declared = [value for source in SOURCES for value in vars(import_module(source.module)).values()]
    registries = [REGISTRY, *(each for each in declared if isinstance(each, CollectorRegistry))]
    exported = [family for registry in registries for family in registry.collect()]
    own = [family for family in exported if family.name.startswith("rose_")]
    assert len(own) > len(rows) / 2
    for family in own:
        row = rows[family.name]
        assert (family.type, family.documentation) == (row.kind, row.sentence)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(row.labels), sample


def test_tables_of_counts_and_reasons_are_complete() -> None:
    assert list(COUNTS) == list(Counters.__dataclass_fields__)
    exported = {sample.labels["why"] for family in HELD_BACK.collect() for sample in family.samples}
    assert exported == {hold.value for hold in HoldReason}


def test_dashboard_query_selects_the_chosen_jobs() -> None:
    exporting = {"rose_a_total", "rose_b"}
    chosen = filter_by_job('rate(rose_a_total{kind="x"}[5m]) / rose_b', exporting)
    assert chosen == 'rate(rose_a_total{job=~"$job",kind="x"}[5m]) / rose_b{job=~"$job"}'
    with pytest.raises(UnknownMetric, match="rose_c"):
        filter_by_job("rose_b / rose_c", exporting)


def test_every_alert_queries_exported_metrics_and_has_a_runbook() -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "operations" / "alerts.md").read_text(), re.MULTILINE)
    for rule in rules():
        queried = names_in(rule["expr"])
        assert queried and queried <= known(), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["runbook"] == f"docs/operations/alerts.md#{rule['alert'].lower()}"
        assert rule["alert"] in headings
    runbooks = {heading for heading in headings if heading.startswith("Rose")}
    assert runbooks == {rule["alert"] for rule in rules()}


def test_every_alert_is_tested_to_fire_and_to_stay_silent() -> None:
    firing: set[str] = set()
    silent: set[str] = set()
    for each in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in each["alert_rule_test"]:
            (firing if case["exp_alerts"] else silent).add(case["alertname"])
        queried = {name for series in each["input_series"] for name in names_in(series["series"])}
        assert queried <= known(), each["name"]
    assert firing == silent == {rule["alert"] for rule in rules()}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not there")
def test_alerts_fire_and_stay_silent_in_promtool() -> None:
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(TESTS)]):
        ran = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
