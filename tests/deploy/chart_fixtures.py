"""The chart, rendered by Helm. `python -m tests.deploy.chart_fixtures` writes the golden renders.

Keeps true: a render is one text with its resources in a fixed order, so that a diff of the golden files shows the
effect of a chart change on a cluster.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from deploy.generate import CHART

VALUES = sorted((CHART.parent / "values").glob("*.yaml"))
"""The example values files."""

GOLDEN = Path(__file__).parent / "golden"

RELEASE, NAMESPACE = "rl", "rose"

Values = dict[str, Any]
Resource = dict[str, Any]


def values_of(name: str) -> Values:
    return cast(Values, yaml.safe_load((CHART.parent / "values" / f"{name}.yaml").read_text()))


def rendered(values: Values) -> str:
    """Return all resources of a release with these values, as `helm template` does. Raises HelmError."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        files: Mapping[str, str] = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    texts = {name: text.strip().removeprefix("---").strip() for name, text in sorted(files.items())}
    lines = "\n".join(f"---\n# {name}\n{text}" for name, text in texts.items() if text).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def resources(text: str) -> list[Resource]:
    return [each for each in yaml.safe_load_all(text) if each]


def containers(found: Sequence[Resource]) -> list[Resource]:
    """Return the containers and init containers of every pod."""
    pods = [each["spec"]["template"]["spec"] for each in found if "template" in each.get("spec", {})]
    return [one for pod in pods for one in pod["containers"] + pod.get("initContainers", [])]


if __name__ == "__main__":
    for path in VALUES:
        (GOLDEN / path.name).write_text(rendered(values_of(path.stem)))
