"""`python -m rose.pipeline.observability` in a checkout writes the generated pages of docs/ and deploy/dashboards/."""

import json
from pathlib import Path

from rose.pipeline.observability.dashboards import DASHBOARDS
from rose.pipeline.observability.grafana import as_json
from rose.pipeline.observability.log_events import log_events_page
from rose.pipeline.observability.reference import (
    Page,
    cli_page,
    configuration_page,
    metrics,
    metrics_page,
    servers,
    topics_page,
)
from rose.pipeline.observability.scenario_fields import scenario_fields_page

FOLDER = "deploy/dashboards"


def generated_files() -> dict[str, str]:
    """Return the content of each file by its path in the checkout.

    Raises UnknownMetric for a dashboard that asks for a metric that no process exports, and UnclearLogEvent for a log
    event that cannot be documented.
    """
    found = [*metrics(), *servers()]
    known = {series for each in found for series in each.series}
    pages = {
        Page.METRICS: metrics_page(found),
        Page.CLI: cli_page(),
        Page.CONFIGURATION: configuration_page(),
        Page.TOPICS: topics_page(),
        Page.LOG_EVENTS: log_events_page(),
        Page.SCENARIOS: scenario_fields_page(),
    }
    dashboards = {
        f"{FOLDER}/{each.name}.json": json.dumps(as_json(each, known), indent=2, ensure_ascii=False) + "\n"
        for each in DASHBOARDS
    }
    return {**{f"docs/reference/{each.file_name}": content for each, content in pages.items()}, **dashboards}


def main() -> None:
    """Write the files."""
    for name, content in generated_files().items():
        # Resolved: in a checkout the packages of `rose` are links.
        path = Path(__file__).resolve().parents[2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
