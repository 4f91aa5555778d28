"""The files that are generated from the metrics and dashboards, by path in the checkout."""

import json

from rose.pipeline.observability.grafana import as_json
from rose.pipeline.observability.metrics_table import as_markdown, metrics, servers
from rose.pipeline.observability.pages import DASHBOARDS

TABLE = "docs/reference/metrics.md"
FOLDER = "deploy/dashboards"


def generated_files() -> dict[str, str]:
    """What each file holds. Raises UnknownMetric for a dashboard that asks for what nothing exports."""
    found = [*metrics(), *servers()]
    known = {series for each in found for series in each.series}
    pages = {
        f"{FOLDER}/{each.name}.json": json.dumps(as_json(each, known), indent=2, ensure_ascii=False) + "\n"
        for each in DASHBOARDS
    }
    return {TABLE: as_markdown(found), **pages}
