"""The table of all metrics, from their declarations in the code.

Keeps true
- Name, type, labels and description of a metric come from its declaration; nothing is written down a second time.
- Every name contains its unit, in Prometheus' base units, and the name of a counter ends in `_total`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric as Family

from rose.pipeline.observability.reference import Page, code, page, table

UNITS = ("seconds", "bytes", "ratio", "nats")
"""Units at the end of a metric's name, before `_total`. A metric without such an end is a count."""


@dataclass(frozen=True, slots=True)
class Source:
    """A module that declares metrics."""

    module: str
    role: str
    """Which processes export them, unless `roles` says otherwise."""
    roles: tuple[tuple[str, str], ...] = ()
    """Beginnings of names, and whose those are."""


SOURCES = (
    Source("rose.topics.metrics", "every role"),
    Source("rose.pipeline.routing.metrics", "router"),
    Source("rose.pipeline.control.metrics", "control app"),
    Source("rose.workers.environments.metrics", "environment worker"),
    Source(
        "rose.workers.executor.metrics",
        "executor, lender",
        (("rose_lender_serving_requests", "lender, observed server"), ("rose_lender_", "lender")),
    ),
    Source("rose.workers.lender.observe", "observed server"),
    Source("rose.workers.weights.receive", "executor, lender"),
    Source("rose.workers.trainer.metrics", "trainer"),
    Source("rose.workers.weights.publish", "trainer"),
)
"""All there are, in the order in which they are shown."""


SERVERS = (
    ("vllm:time_to_first_token_seconds", "Time that users waited for their first token."),
    ("vllm:inter_token_latency_seconds", "Time that users waited for each further token."),
)
"""The metrics of a vLLM server that the dashboards query; all are histograms."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row."""

    name: str
    """Name in queries; for a histogram without `_bucket`, `_sum` and `_count`."""
    kind: str
    labels: tuple[str, ...]
    role: str
    sentence: str

    @property
    def unit(self) -> str:
        """The unit that the name contains; empty for a count."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in UNITS else ""

    @property
    def series(self) -> tuple[str, ...]:
        """Names that a query may ask for."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def metrics() -> list[Metric]:
    """Every metric of ROSE's own. Imports all that declares any."""
    found: dict[str, Metric] = {}
    for source in SOURCES:
        for family, labels in _declared(import_module(source.module)):
            name = family.name + ("_total" if family.type == "counter" else "")
            role = next((role for begins, role in source.roles if name.startswith(begins)), source.role)
            found.setdefault(name, Metric(name, family.type, labels, role, family.documentation))
    return list(found.values())


def servers() -> list[Metric]:
    """Metrics that vLLM exports and ROSE does not."""
    return [Metric(name, "histogram", ("model_name", "engine"), "vLLM server", sentence) for name, sentence in SERVERS]


def _declared(module: ModuleType) -> Iterator[tuple[Family, tuple[str, ...]]]:
    """Families that a module declares, each with its labels: by metrics, and by collectors that describe theirs."""
    for value in vars(module).values():
        if isinstance(value, Counter | Gauge | Histogram):
            for family in value.describe():
                yield family, _labels_of(value)
        elif isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "describe"):
            for family in value.describe():
                yield family, _labels_of(family)


def _labels_of(declared: object) -> tuple[str, ...]:
    return tuple(getattr(declared, "_labelnames", ()))  # the client has no public word for them


def metrics_page(metrics_found: Sequence[Metric]) -> str:
    """Return the page of the metrics."""
    rows = [
        [
            code(each.name),
            each.kind,
            ", ".join(code(label) for label in each.labels),
            each.unit,
            each.role,
            each.sentence,
        ]
        for each in metrics_found
    ]
    return page(
        Page.METRICS,
        INTRODUCTION,
        ["## All metrics\n", table(("name", "type", "labels", "unit", "role", "meaning"), rows)],
    )


INTRODUCTION = """Every process serves Prometheus metrics on its own port, if one is configured
(`metrics.*`). Port 0 is off.

| role | port |
| --- | --- |
| any role in a container | `metrics.port` |
| trainer | `metrics.trainer` |
| router, control app, environment worker, executor or lender *n* | the port of its kind, plus *n* |

The metrics of a lender come from its sidecar. The server's own `/metrics` says how its users fare.

- A histogram has `_bucket`, `_sum` and `_count`.
- A counter restarts at 0 with its process: use `rate` or `increase`. Counters with known labels begin at 0.
- An executor that starts again exports no engine metrics until it has started: figures are missing rather than old.
- The client's own `process_*` and `python_*` are exported too."""
