"""The files that are generated from the code, by path in the checkout."""

import json

from rose.pipeline.observability.grafana import as_json
from rose.pipeline.observability.metrics_table import as_markdown, metrics, servers
from rose.pipeline.observability.pages import DASHBOARDS
from rose.pipeline.observability.reference import cli, configuration, log_events, topics
from rose.pipeline.observability.reference.pages import Page

FOLDER = "deploy/dashboards"


def generated_files() -> dict[str, str]:
    """Return the content of each file.

    Raises UnknownMetric for a dashboard that asks for a metric that is not exported, and UnclearLogEvent for a log
    event that cannot be documented.
    """
    found = [*metrics(), *servers()]
    known = {series for each in found for series in each.series}
    pages = {
        Page.METRICS: as_markdown(found),
        Page.CLI: cli.as_markdown(),
        Page.CONFIGURATION: configuration.as_markdown(),
        Page.TOPICS: topics.as_markdown(),
        Page.LOG_EVENTS: log_events.as_markdown(),
    }
    dashboards = {
        f"{FOLDER}/{each.name}.json": json.dumps(as_json(each, known), indent=2, ensure_ascii=False) + "\n"
        for each in DASHBOARDS
    }
    return {**{each.value: content for each, content in pages.items()}, **dashboards}
