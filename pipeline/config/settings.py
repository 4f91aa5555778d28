"""The settings: every section of the configuration, and the rules that involve several sections.

Keeps true
- A role's section is the role's own dataclass. The sections that belong to no role are declared here; every field is
  documented where it is declared and nowhere else.
- Fields that several roles share (`SHARED`) are set once, in the section that they come from.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rose.pipeline.accounting.prices import Prices
from rose.pipeline.control.config import ControlConfig
from rose.pipeline.routing.config import RouterConfig
from rose.schemas.errors import UsageError
from rose.schemas.limits import MAX_GROUP_SIZE, MAX_TURNS
from rose.schemas.prompts import ENVIRONMENT_CHARACTERS
from rose.schemas.setting_bounds import HIGHEST_PORT, YEAR_SECONDS, check_bounds, is_http_server
from rose.topics.catalog import DEFAULT_RETENTION
from rose.topics.health import RESTART_WINDOW_SECONDS
from rose.topics.settings import PREFIX as NAMES
from rose.topics.settings import check_required_settings
from rose.workers.environments.config import EnvironmentConfig, deferred_versions
from rose.workers.evaluator.config import EvaluationConfig
from rose.workers.executor.config import NAME, ExecutorConfig
from rose.workers.lender.config import EndpointConfig, LenderConfig
from rose.workers.loadgen.config import LoadgenConfig
from rose.workers.trainer.config import TrainerConfig
from rose.workers.weights.config import HOLDS, WeightsConfig
from rose.workers.weights.trust import run_id

WARM_START = Path(__file__).parents[2] / "workers" / "models" / "calculator"
"""The small policy that comes with ROSE, pre-trained on noisy demonstrations of the calculator task."""

MOST_PARTITIONS = 65_536
"""Maximum number of partitions of a topic."""

MOST_COPIES = 32_767
"""Maximum replication factor in Kafka's protocol."""

MIN_RETENTION_SECONDS = 60.0
MAX_RETENTION_SECONDS = 100 * YEAR_SECONDS

MIN_OUTCOME_RETENTION_SECONDS = 7 * 24 * 3600.0
"""A trainer that starts again reads from its oldest open group, and knows groups that it settled since only by their
outcomes. Outcomes must outlast every open group; a turn may wait for seven days."""

MIN_WEIGHTS_RETENTION_SECONDS = 3600.0
"""Chunks are written before their manifest; the largest anchor takes less time than this over any usable uplink."""

MIN_DISPATCH_RETENTION_SECONDS = 600.0
"""An executor that was paused, and a router that starts again, still find the turns that are under way."""

MIN_HEARTBEAT_RETENTION_SECONDS = 2 * RESTART_WINDOW_SECONDS
"""`rose status` counts the starts of roles in RESTART_WINDOW_SECONDS; the broker deletes whole segments."""

MOST_PROCESSES = 4_096
"""Maximum number of processes of one kind on one machine."""

MOST_SEED = 2**32
"""Largest seed of a run; each run seed has a million task seeds."""

MOST_TASKS = 10**6
"""Number of task seeds of one run seed."""

MOST_FIRST_SEED = 2**62
"""Largest first seed: the seed of the last task of a run is then still valid in a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSection:
    """The Kafka cluster of the run."""

    bootstrap_server: str = ""
    """`host:port[,host:port]` of a running Kafka; empty: `rose up` and `rose demo` start one on this machine."""
    kafka_home: Path | None = None
    """Folder with Apache Kafka's `libs/`. `rose up` and `rose demo` start this Kafka instead of the embedded broker.
    The variable KAFKA_HOME has the same effect."""
    namespace: str = ""
    """Prefix of every topic, group and transactional id, so that several runs can share a cluster."""
    properties: dict[str, str] = field(default_factory=dict)
    """librdkafka settings of every client, passed on verbatim."""
    embedded: bool = False
    """Whether the broker is the embedded one. It answers an empty fetch at once and never evicts a dead member of a
    group. `rose up` and `rose demo` set this for a broker that they start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsSection:
    """Partitions, replication and retention of the topics."""

    home_partitions: int = 8
    """Partitions of prompts, requests, results and snapshots; at least one for each environment worker."""
    inbox_slots: int = 32
    """Partitions of the executors' inboxes. Executors that share an inbox read each other's records, so use at least as
    many as there are executors."""
    sample_partitions: int = 4
    """Partitions of finished samples."""
    chunk_partitions: int = 4
    """Partitions of weight chunks."""
    cells: int = 1
    """Shards of the router. Each cell has its own homes, inboxes and executors, and one router serves it; further
    routers are spares. Use one cell for each few hundred executors."""
    replication_factor: int = 1
    """Copies of every partition; use 3 on a cluster that must survive the loss of a broker."""
    prompts_retention_seconds: float = DEFAULT_RETENTION.prompts
    """Prompts of this age are deleted once their group is opened or refused."""
    turns_retention_seconds: float = DEFAULT_RETENTION.turns
    """Turn requests and results of this age are deleted once no live trajectory needs them."""
    samples_retention_seconds: float = DEFAULT_RETENTION.samples
    """Samples of this age are deleted once every trainer has settled them."""
    outcomes_retention_seconds: float = DEFAULT_RETENTION.outcomes
    """Outcomes, and the records of settled groups, are deleted at this age (`retention.ms`)."""
    weights_retention_seconds: float = DEFAULT_RETENTION.weights
    """Weight chunks of this age are deleted once no version on the log needs them."""
    dispatches_retention_seconds: float = DEFAULT_RETENTION.dispatches
    """Dispatched turns are deleted at this age (`retention.ms`)."""
    heartbeats_retention_seconds: float = DEFAULT_RETENTION.heartbeats
    """Heartbeats, summaries of cells, starts of roles and journals are deleted at this age (`retention.ms`)."""
    dead_letters_retention_seconds: float = DEFAULT_RETENTION.dead_letters
    """Dead letters are deleted at this age (`retention.ms`)."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            {
                "home_partitions": (1, MOST_PARTITIONS),
                "inbox_slots": (1, MOST_PARTITIONS),
                "sample_partitions": (1, MOST_PARTITIONS),
                "chunk_partitions": (1, MOST_PARTITIONS),
                "cells": (1, MOST_PARTITIONS),
                "replication_factor": (1, MOST_COPIES),
                "prompts_retention_seconds": (MIN_RETENTION_SECONDS, MAX_RETENTION_SECONDS),
                "turns_retention_seconds": (MIN_RETENTION_SECONDS, MAX_RETENTION_SECONDS),
                "samples_retention_seconds": (MIN_RETENTION_SECONDS, MAX_RETENTION_SECONDS),
                "outcomes_retention_seconds": (MIN_OUTCOME_RETENTION_SECONDS, MAX_RETENTION_SECONDS),
                "weights_retention_seconds": (MIN_WEIGHTS_RETENTION_SECONDS, MAX_RETENTION_SECONDS),
                "dispatches_retention_seconds": (MIN_DISPATCH_RETENTION_SECONDS, MAX_RETENTION_SECONDS),
                "heartbeats_retention_seconds": (MIN_HEARTBEAT_RETENTION_SECONDS, MAX_RETENTION_SECONDS),
                "dead_letters_retention_seconds": (MIN_RETENTION_SECONDS, MAX_RETENTION_SECONDS),
            },
        )
        reasons = {
            "outcomes": "a trainer or environment worker that starts again would take what is settled for unsettled",
            "dead_letters": "a role that starts again would refuse the same message a second time",
        }
        for later, earlier in (
            ("outcomes", "prompts"),
            ("outcomes", "samples"),
            ("dead_letters", "prompts"),
            ("dead_letters", "turns"),
            ("dead_letters", "samples"),
        ):
            kept, needed = (getattr(self, f"{family}_retention_seconds") for family in (later, earlier))
            if kept < needed:
                raise ValueError(
                    f"{later}_retention_seconds ({kept:.12g}) must not be less than {earlier}_retention_seconds "
                    f"({needed:.12g}): {reasons[later]}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The policy that is trained and served."""

    folder: Path = WARM_START
    """Hugging Face model folder with chat template or `turn_format.json`; the default is the warm start of the demo."""
    id: str = "policy"
    """Name of the policy on the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """One run on this machine."""

    name: str = "demo"
    """Name of the run. All files of the run are in `<folder>/<name>`."""
    folder: Path = Path("runs")
    """Folder in which runs are kept."""
    seed: int = 0
    """Seed of tasks, sampling and training."""
    environment_workers: int = 1
    """Environment workers that `rose up` starts."""
    executors: int = 2
    """Dedicated executors that `rose up` starts."""
    lenders: int = 0
    """Lending vLLM servers, each with a load generator, that `rose up` starts."""
    time_limit_seconds: float = 0.0
    """Seconds after which `rose up` and `rose demo` stop a run, but not before the trainer has saved a
    policy; 0: no limit."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            {
                "seed": (0, MOST_SEED),
                "environment_workers": (1, MOST_PROCESSES),
                "executors": (0, MOST_PROCESSES),
                "lenders": (0, MOST_PROCESSES),
                "time_limit_seconds": (0, 1e9),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSection:
    """The lending servers of a run on this machine."""

    folder: Path = WARM_START
    """Hugging Face model folder that the servers serve."""
    flags: list[str] = field(default_factory=list)
    """Flags of vLLM, except host and port."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the server, in addition to inherited ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSection:
    """Ports of Prometheus metrics and health (`/healthz`, `/readyz`), one for each process; 0 means off.

    Raises UsageError for a number that is not a port.
    """

    host: str = "127.0.0.1"
    """Address that serves the metrics; loopback by default."""
    port: int = 0
    """Port of any role that has a network of its own, as in a container; 0: the port of the role's kind, below."""
    router: int = 0
    """Port of the router's metrics."""
    control: int = 0
    """Port of the control app's metrics."""
    trainer: int = 0
    """Port of the trainer's metrics."""
    evaluator: int = 0
    """Port of the evaluator's metrics."""
    environment: int = 0
    """Port of the first environment worker's metrics; worker n uses this port plus n."""
    executor: int = 0
    """Port of an executor's metrics; executor-N uses this port plus N."""

    def __post_init__(self) -> None:
        for each in fields(self):
            port = getattr(self, each.name)
            if isinstance(port, int) and not 0 <= port <= HIGHEST_PORT:
                raise UsageError(f"metrics.{each.name} ({port}) must be a port, 1 to {HIGHEST_PORT}, or 0: off")

    def port_of(self, first: int, number: int) -> int:
        """Return the port of process `number` of a kind with this first port. Raises UsageError if it is too high."""
        port = self.port or (first + number if first else 0)
        if port > HIGHEST_PORT:
            raise UsageError(f"the metrics of number {number} would be at port {port}, and {HIGHEST_PORT} is the last")
        return port


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSection:
    """OpenTelemetry traces, one trace for each trajectory; needs the extra `otel`. Raises UsageError."""

    endpoint: str = ""
    """Base URL of a collector (OTLP over HTTP); empty: the URL in OTEL_EXPORTER_OTLP_ENDPOINT, or no traces."""
    ratio: float = 1.0
    """Share of the trajectories that are traced; every process traces the same ones."""

    def __post_init__(self) -> None:
        if self.endpoint and not is_http_server(self.endpoint):
            raise UsageError(
                "tracing.endpoint is a URL, as http://collector:4318, with no password in it, since reports show it: "
                "that goes into OTEL_EXPORTER_OTLP_HEADERS"
            )
        if not 0 <= self.ratio <= 1:
            raise UsageError(f"tracing.ratio ({self.ratio}) is from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksSection:
    """The tasks of `rose demo` and `rose evaluate`."""

    environment: str = "calculator"
    """Name of a built-in environment, or `package.module:Class`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's `reset`."""
    group_size: int = 16
    """Trajectories of one prompt."""
    steps: int = 24
    """Optimizer steps of the demo, which requests as many groups as the steps need."""
    max_turns: int = 16
    """Most turns of a trajectory; a trajectory with this many turns ends."""
    held_out: int = 1024
    """Number of fixed tasks that are never trained on. Success before and after training is measured on them."""
    first_seed: int = 0
    """Seed of the first training task of run seed 0; every run seed has its own range of task seeds."""
    held_out_seed: int = 1_000_000_000
    """Seed of the first held-out task; the same for every run."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            {
                "group_size": (1, MAX_GROUP_SIZE),
                "steps": (1, MOST_TASKS),
                "max_turns": (1, MAX_TURNS),
                "held_out": (1, MOST_TASKS),
                "first_seed": (0, MOST_FIRST_SEED),
                "held_out_seed": (0, MOST_FIRST_SEED),
            },
        )


SHARED: Mapping[str, tuple[str, ...]] = {
    "environment.model_folder": ("model.folder",),
    "environment.model_id": ("model.id",),
    "executor.model_folder": ("model.folder",),
    "executor.model_id": ("model.id",),
    "trainer.model_folder": ("model.folder",),
    "trainer.model_id": ("model.id",),
    "trainer.run_folder": ("run.folder", "run.name"),
    "trainer.seed": ("run.seed",),
    "evaluation.model_id": ("model.id",),
    "users.model_folder": ("serving.folder",),
    "users.run_folder": ("run.folder", "run.name"),
    "weights.run": ("run.name",),
}
"""Fields of roles that are set from other sections: from one field, or as a path from several."""


NAMESPACE_CHARACTERS = 100
"""Maximum length of a namespace: a manifest must be able to name the run, and Kafka the topics."""

NAMESPACE = re.compile(rf"[A-Za-z0-9._-]{{0,{NAMESPACE_CHARACTERS}}}")


class Settings(BaseModel):
    """All sections. Each one is a frozen dataclass, declared in the package that it belongs to."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    run: RunSection = Field(default_factory=RunSection)
    broker: BrokerSection = Field(default_factory=BrokerSection)
    topics: TopicsSection = Field(default_factory=TopicsSection)
    model: ModelSection = Field(default_factory=ModelSection)
    environment: EnvironmentConfig
    executor: ExecutorConfig
    lender: LenderConfig = Field(default_factory=LenderConfig)
    endpoint: EndpointConfig = Field(default_factory=EndpointConfig)
    serving: ServingSection = Field(default_factory=ServingSection)
    users: LoadgenConfig
    router: RouterConfig = Field(default_factory=RouterConfig)
    control: ControlConfig = Field(default_factory=ControlConfig)
    trainer: TrainerConfig
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    tracing: TracingSection = Field(default_factory=TracingSection)
    tasks: TasksSection = Field(default_factory=TasksSection)
    prices: Prices = Field(default_factory=Prices)


def section_types() -> dict[str, type]:
    """Return every section's dataclass by name, in the order in which sections are shown."""
    return {
        name: field.annotation for name, field in Settings.model_fields.items() if isinstance(field.annotation, type)
    }


def check_together(settings: Settings) -> None:
    """Check the rules that involve several sections. Raises UsageError."""
    run, topics, environment, trainer = settings.run, settings.topics, settings.environment, settings.trainer
    executor, held = settings.executor, HOLDS.get(settings.executor.dtype, ())
    deferred = deferred_versions(environment.groups_ratio)
    fits = {
        f"executor.dtype ({executor.dtype}) must be one of {', '.join(HOLDS)}": bool(held),
        f"weights.dtype ({settings.weights.dtype}) cannot be held exactly by engines in executor.dtype "
        f"({executor.dtype}): leave weights.dtype out": (settings.weights.dtype or executor.dtype) in held,
        f"environment.window_groups ({environment.window_groups}) is less than trainer.groups_per_step "
        f"({trainer.groups_per_step}): the trainer would wait for groups that may not open": (
            environment.window_groups >= trainer.groups_per_step  # of each worker: all homes may fall to one
        ),
        f"trainer.max_staleness ({trainer.max_staleness}) is less than {deferred}, the versions by which a group is "
        f"old that environment.groups_ratio ({environment.groups_ratio:g}) defers: raise one of them": (
            trainer.max_staleness >= deferred
        ),
        f"run.name ({run.name!r}) names a folder of its own in run.folder": run.name not in ("", ".", ".."),
        f"run.environment_workers ({run.environment_workers}) is more than topics.home_partitions "
        f"({topics.home_partitions}): some would have nothing to do": (
            run.environment_workers <= topics.home_partitions
        ),
        f"model.id ({settings.model.id!r}) may have 1 to 128 characters, of A-Z a-z 0-9 . _ : -": (
            NAME.fullmatch(settings.model.id) is not None
        ),
        f"topics.cells ({topics.cells}) is more than topics.home_partitions or topics.inbox_slots "
        f"({topics.home_partitions} and {topics.inbox_slots}): each cell has some of both": (
            topics.cells <= min(topics.home_partitions, topics.inbox_slots)
        ),
        f"topics.cells ({topics.cells}) must be 1 to 65536": 1 <= topics.cells <= 2**16,
        f"topics.turns_retention_seconds ({topics.turns_retention_seconds:.12g}) is less than environment."
        f"turn_patience_seconds ({environment.turn_patience_seconds:.12g}): turns could be deleted while they wait": (
            topics.turns_retention_seconds >= environment.turn_patience_seconds
        ),
        f"environment.max_context_tokens ({environment.max_context_tokens}) is more than executor.max_model_len "
        f"({executor.max_model_len})": environment.max_context_tokens <= executor.max_model_len,
    }
    evaluation, tasks = settings.evaluation, settings.tasks
    fits[
        f"evaluation.tasks ({evaluation.tasks}) is more than tasks.held_out ({tasks.held_out}): raise that, or give "
        "evaluation.prompts"
    ] = not evaluation.every_versions or evaluation.prompts is not None or evaluation.tasks <= tasks.held_out
    for path, names in {
        "tasks.environment": (settings.tasks.environment,),
        "environment.environments": environment.environments,
    }.items():
        what = f"{path}: the name of an environment has 1 to {ENVIRONMENT_CHARACTERS} characters"
        fits[what] = all(1 <= len(name) <= ENVIRONMENT_CHARACTERS for name in names)
    for sentence, holds in fits.items():
        if not holds:
            raise UsageError(sentence)
    if not NAMESPACE.fullmatch(settings.broker.namespace):
        raise UsageError(
            f"broker.namespace ({settings.broker.namespace!r}) begins the names of topics: it may have "
            f"{NAMESPACE_CHARACTERS} characters, of A-Z a-z 0-9 . _ -"
        )
    if NAMES in settings.broker.namespace:
        raise UsageError(
            f"broker.namespace ({settings.broker.namespace!r}) has {NAMES} in it, with which names behind a namespace "
            "begin: rights to another one would reach into this one"
        )
    check_required_settings(settings.broker.properties, settings.broker.bootstrap_server)
    run_id(settings.broker.namespace, run.name)  # raises UsageError for a name that no manifest can have


BASES = ("builtins", "enum", "msgspec")
"""Packages whose base classes declare no documented fields."""


@cache
def field_docs(declared_by: type) -> dict[str, str]:
    """Return, by field or member of a class, the string that follows its declaration, on one line."""
    sentences: dict[str, str] = {}
    for ancestor in reversed([each for each in declared_by.__mro__ if each.__module__.partition(".")[0] not in BASES]):
        body = _declaration(ancestor)
        for declaration, follower in zip(body.body, body.body[1:], strict=False):
            match declaration:
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                    pass
                case _:
                    continue
            if (
                isinstance(follower, ast.Expr)
                and isinstance(follower.value, ast.Constant)
                and isinstance(follower.value.value, str)
            ):
                sentences[name] = " ".join(inspect.cleandoc(follower.value.value).split())
    return sentences


def class_docstring(declared_by: type) -> str:
    """Return the docstring of a class, without indentation, also if Python removes docstrings (-OO); empty if none."""
    return ast.get_docstring(_declaration(declared_by)) or ""


@cache
def _declaration(declared_by: type) -> ast.ClassDef:
    [declared] = ast.parse(textwrap.dedent(inspect.getsource(declared_by))).body
    assert isinstance(declared, ast.ClassDef)
    return declared
