"""Calibration of a cost model with the latencies that a server was measured to have.

Keeps true
- What is fitted is linear: the two constants of the host, and on request one factor each for the work that waits for
  the memory and for the work that computes. No fitted figure is negative.
- The reported errors are of rows that the fit did not see: every third row of a fixed order, and, where profiles of
  several tensor parallel sizes are fitted together, each size in turn.
- A row whose requests do not fit into the KV cache together is left out and counted, since its requests queue.

A row is a closed loop: `batch` clients each send the next request when the last one has ended. Each of the `osl` steps
of a request then computes `batch / osl` prompts beside the decoding requests.

The time to the first token is not fitted: it depends on how a client's requests meet in the queue.

Pure. Example: 58 rows of Qwen3-32B on H100 cards, vLLM 0.12 -> 1.3 ms a step, 0.057 ms for each request of a step.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from rose.pipeline.simulation.cost_model import CostModel, Curve, Profile
from rose.pipeline.simulation.least_squares import nonnegative_least_squares
from rose.schemas.errors import UsageError

HELD_OUT = 3
"""One row of this many is not fitted but predicted."""

STEP_TOKENS = 8192
"""Prompt tokens of one step at most, as a vLLM server has it by default; a longer prompt takes several steps."""

MILLISECONDS = 1e3

COLUMNS = {
    "isl": ("isl",),
    "osl": ("osl",),
    "batch": ("batch", "batch_size"),
    "tp": ("tp", "tp_size"),
    "tpot_ms": ("tpot_ms", "silicon_tpot_ms"),
}
"""Names that a column may have; the second is that of aiconfigurator's `silicon_sample.csv`."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0)]


class Row(msgspec.Struct, frozen=True, order=True):
    """Mean time per output token of a server in a closed loop."""

    tp: Count
    """Tensor parallel size."""
    isl: Count
    """Prompt tokens of each request."""
    osl: Annotated[int, msgspec.Meta(ge=2)]
    """Answer tokens of each request."""
    batch: Count
    """Requests at a time."""
    tpot_ms: Milliseconds


@dataclass(frozen=True)
class Fit:
    """The fitted figures."""

    step_seconds: float
    sequence_seconds: float
    memory_factor: float = 1.0
    """Factor of the seconds that wait for the memory: weights and contexts."""
    compute_factor: float = 1.0
    """Factor of the seconds that grow with the computed tokens."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of the predicted time per output token."""

    rows: int
    median: float
    p90: float
    largest: float
    bias: float
    """Mean of (predicted - measured) / measured."""


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration."""

    fit: Fit
    """Fitted on all rows."""
    held_out: Errors
    """Errors of every third row, predicted by a fit to the others."""
    without_size: dict[int, Errors]
    """Errors of all rows of a tensor parallel size, predicted by a fit to the other sizes."""
    before: Errors
    """Errors of all rows, predicted by the profiles as they were."""
    queued: int
    """Rows that were left out, since their requests do not fit into the KV cache."""
    other_sizes: int
    """Rows that were left out, since no profile has their tensor parallel size."""


def read_rows(lines: Iterable[str], name: str, where: Mapping[str, str]) -> list[Row]:
    """Return the rows of a CSV file in which each column of `where` has the wanted value.

    Rows without one of the values are left out. Raises UsageError, which calls the file `name`.
    """
    reader = csv.DictReader(lines)
    header = reader.fieldnames or ()
    columns = {field: next((each for each in names if each in header), None) for field, names in COLUMNS.items()}
    missing = [*(field for field, column in columns.items() if column is None), *(where.keys() - set(header))]
    if missing:
        raise UsageError(f"{name} has no column {missing[0]}: its first line must name {', '.join(COLUMNS)}")
    rows = []
    for number, line in enumerate(reader, start=2):
        values = {field: line[column] or "" for field, column in columns.items() if column is not None}
        if all(values.values()) and all(line[column] == value for column, value in where.items()):
            try:
                rows.append(msgspec.convert(values, Row, strict=False))
            except msgspec.ValidationError as error:
                raise UsageError(f"line {number} of {name} is refused: {error}") from None
    return rows


def tpot_seconds(model: CostModel, row: Row) -> float:
    """Return the predicted mean seconds per output token of a row."""
    context = row.batch * (2 * row.isl + row.osl) // 2
    decode = model.step_seconds(decoding=row.batch, context_tokens=context)
    others = context * (row.batch - 1) // row.batch
    prompt = [(min(STEP_TOKENS, row.isl - before), before) for before in range(0, row.isl, STEP_TOKENS)]
    added = (
        model.step_seconds(decoding=row.batch - 1, context_tokens=others, chunks=[chunk]) - decode for chunk in prompt
    )
    return decode + row.batch / row.osl * sum(added)


def apply(profile: Profile, fit: Fit) -> Profile:
    """Return the profile with the fitted figures."""
    replace = msgspec.structs.replace
    attention = profile.prefill_attention
    return replace(
        profile,
        host=replace(profile.host, step_seconds=fit.step_seconds, sequence_seconds=fit.sequence_seconds),
        linear=_scaled(profile.linear, fit),
        output=_scaled(profile.output, fit),
        decode_attention=replace(
            profile.decode_attention,
            context_token_seconds=profile.decode_attention.context_token_seconds * fit.memory_factor,
        ),
        prefill_attention=replace(
            attention,
            token_seconds=attention.token_seconds * fit.compute_factor,
            pair_seconds=attention.pair_seconds * fit.compute_factor,
        ),
    )


def _scaled(curve: Curve, fit: Fit) -> Curve:
    """Return the curve scaled: its first point is the time that the weights take to read, the rest is computation."""
    read = curve.seconds[0]
    seconds = (read * fit.memory_factor + (each - read) * fit.compute_factor for each in curve.seconds)
    return msgspec.structs.replace(curve, seconds=tuple(seconds))


def calibrate(profiles: Sequence[Profile], rows: Iterable[Row], *, factors: bool = False) -> Calibration:
    """Fit the host's constants to rows, and with `factors` also the two factors.

    Args:
        profiles: One profile for each tensor parallel size. All have the same fit.
        rows: Measured rows, in any order.
        factors: Whether the profiles' kernels may be of another card or model.

    Raises:
        UsageError: Two profiles have the same size, or there are too few rows.
    """
    by_size = {profile.tensor_parallel: profile for profile in profiles}
    if len(by_size) < len(profiles):
        raise UsageError("two profiles have the same tensor parallel size: give one for each size of the rows")
    known = sorted(rows)
    sized = [row for row in known if row.tp in by_size]
    fitting = [row for row in sized if row.batch * (row.isl + row.osl) <= by_size[row.tp].memory.kv_cache_tokens]
    least = HELD_OUT * (4 if factors else 2)
    if len(fitting) < least:
        raise UsageError(f"{len(fitting)} rows can be fitted, and at least {least} are needed: measure more points")
    splits = {size: _Split(profile) for size, profile in by_size.items()}
    models = {size: CostModel.of(profile) for size, profile in by_size.items()}
    parts = {row: splits[row.tp].parts(row) for row in fitting}

    def errors(seen: Sequence[Row], asked: Sequence[Row]) -> Errors:
        fitted = _solve(seen, parts, factors=factors)
        return _errors(asked, [parts[row].seconds(row, fitted) for row in asked])

    others = [row for place, row in enumerate(fitting) if place % HELD_OUT]
    sizes = sorted({row.tp for row in fitting})
    return Calibration(
        fit=_solve(fitting, parts, factors=factors),
        held_out=errors(others, fitting[::HELD_OUT]),
        without_size={
            size: errors([row for row in fitting if row.tp != size], [row for row in fitting if row.tp == size])
            for size in sizes
            if len(sizes) > 1
        },
        before=_errors(fitting, [tpot_seconds(models[row.tp], row) for row in fitting]),
        queued=len(sized) - len(fitting),
        other_sizes=len(known) - len(sized),
    )


@dataclass(frozen=True)
class _Parts:
    """A row's predicted seconds per output token without the host, by what they scale with."""

    fixed: float
    memory: float
    compute: float

    def seconds(self, row: Row, fit: Fit) -> float:
        host = fit.step_seconds + fit.sequence_seconds * row.batch
        return self.fixed + self.memory * fit.memory_factor + self.compute * fit.compute_factor + host


class _Split:
    """A profile without a host, and split by what its seconds scale with."""

    def __init__(self, profile: Profile) -> None:
        factors = (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)
        self._models = [CostModel.of(apply(profile, Fit(0.0, 0.0, *each))) for each in factors]

    def parts(self, row: Row) -> _Parts:
        """Return the parts of a row's seconds per output token."""
        fixed, with_memory, with_compute = (tpot_seconds(model, row) for model in self._models)
        return _Parts(fixed, with_memory - fixed, with_compute - fixed)


def _solve(rows: Sequence[Row], parts: Mapping[Row, _Parts], *, factors: bool) -> Fit:
    """Return the fit with the least squares of the relative errors, in which no figure is negative."""
    columns, wanted = [], []
    for row in rows:
        part, measured = parts[row], row.tpot_ms / MILLISECONDS
        known = part.fixed + (0.0 if factors else part.memory + part.compute)
        columns.append(
            [each / measured for each in (1.0, row.batch, *((part.memory, part.compute) if factors else ()))]
        )
        wanted.append(1.0 - known / measured)
    return Fit(*nonnegative_least_squares(columns, wanted))


def _errors(rows: Sequence[Row], predicted: Sequence[float]) -> Errors:
    relative = [seconds * MILLISECONDS / row.tpot_ms - 1.0 for row, seconds in zip(rows, predicted, strict=True)]
    sizes = sorted(map(abs, relative))
    return Errors(
        rows=len(rows),
        median=sizes[math.ceil(0.5 * len(sizes)) - 1],
        p90=sizes[math.ceil(0.9 * len(sizes)) - 1],
        largest=sizes[-1],
        bias=sum(relative) / len(relative),
    )
