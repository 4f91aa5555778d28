"""Exports of finished trajectories: JSON lines, Parquet, and the formats of TRL's and verl's rollout files.

Keeps true
- A row is written as soon as its group is read; memory holds one batch of rows.
- A file appears under its name once it is whole. An export that fails leaves none.
- Tokens, mask, logprobs and versions are those of the log. Texts are decoded from tokens and never encoded again.
- A trajectory without a reward is in no file of TRL's or verl's form: a failure is never a reward of 0.

Formats (columns in docs/guides/samples.md)
    jsonl, parquet    every fact of the sample and its outcome
    trl               the Parquet files that GRPOTrainer writes with `log_completions`, and what `rollout_func` returns
    verl              a folder of STEP.jsonl, as verl writes with `rollout_data_dir`
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rose.pipeline.samples.advantages import Advantage
from rose.pipeline.samples.attempts import Decode, tokens_of, whole
from rose.pipeline.samples.log import FinishedTrajectory, index_of
from rose.schemas.arrays import unpack_logprobs
from rose.schemas.errors import UsageError
from rose.schemas.samples import Sample

FORMATS = ("jsonl", "parquet", "trl", "verl")

BATCH_TOKENS = 1_000_000
"""Tokens of the rows that Parquet writers hold before they write a row group."""

BATCH_ROWS = 1_000

MISSING = "Parquet files need pyarrow, which is not installed: pip install 'rose-rollouts[parquet]'"

Row = dict[str, Any]

NO_VERSION = -1
"""Version of a token that no policy sampled."""


class RowWriter(Protocol):
    """Writes rows to one target."""

    def write(self, row: Row) -> None:
        """Write a row, now or with later ones."""

    def close(self) -> None:
        """Write what is held back, and give the target its name. Not called if the export fails."""

    def discard(self) -> None:
        """Remove what was written so far."""


def row_of(found: FinishedTrajectory, advantage: Advantage, decode: Decode | None) -> Row:
    """Return the row of `jsonl` and `parquet`."""
    sample, outcome = found.sample, found.outcome
    versions = found.versions
    return {
        "trajectory_id": sample.trajectory_id,
        "group_id": sample.group_id,
        "group_size": sample.group_size,
        "index": index_of(sample),
        "model_id": sample.model_id,
        "environment": sample.environment,
        "seed": sample.seed,
        "reward": sample.reward,
        "success": sample.success,
        "advantage": advantage.value,
        "outcome": found.ended_as,
        "outcome_reason": "" if outcome is None else outcome.reason,
        "step": None if outcome is None else outcome.step,
        "policy_version": None if outcome is None else outcome.policy_version,
        "oldest_version": None if versions is None else versions[0],
        "newest_version": None if versions is None else versions[1],
        "ended": sample.ended.value,
        "failure": sample.failure,
        "completed_at": sample.completed_at,
        "tokens": tokens_of(sample),
        "loss_mask": list(sample.loss_mask),
        "logprobs": unpack_logprobs(whole(sample.logprobs)).tolist(),
        "versions": _versions(sample),
        "turns": list(_turns(sample, decode)),
        "device_seconds": dict(sample.device_seconds),
        "info": msgspec.json.encode(sample.info).decode(),
    }


def _versions(sample: Sample) -> list[int]:
    versions = [NO_VERSION] * len(sample.loss_mask)
    for span in sample.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


def _turns(sample: Sample, decode: Decode | None) -> Iterator[Row]:
    tokens, before = tokens_of(sample), 0
    for turn in sample.turns:
        yield {
            "turn": turn.turn,
            "attempt": turn.attempt,
            "worker": turn.worker,
            "start": turn.start,
            "end": turn.end,
            "cached_tokens": turn.cached_tokens,
            "temperature": turn.sampling.temperature,
            "requested_at": turn.times.requested_at,
            "scheduled_at": turn.times.scheduled_at,
            "first_token_at": turn.times.first_token_at,
            "finished_at": turn.times.finished_at,
            "environment_seconds": turn.environment_seconds,
            "observation": None if decode is None else decode(tokens[before : turn.start]),
            "action": None if decode is None else decode(tokens[turn.start : turn.end]),
        }
        before = turn.end


def trl_row(found: FinishedTrajectory, advantage: Advantage, decode: Decode) -> Row | None:
    """Return the row of TRL's form; None for a trajectory without a reward or without a sampled token."""
    sample = found.sample
    if sample.reward is None or not any(sample.loss_mask):
        return None
    tokens, prompt = tokens_of(sample), sample.loss_mask.index(1)
    return {
        "step": None if found.outcome is None else found.outcome.step,
        "prompt": decode(tokens[:prompt]),
        "completion": decode(tokens[prompt:]),
        "reward": sample.reward,
        "advantage": advantage.value,
        "prompt_ids": tokens[:prompt],
        "completion_ids": tokens[prompt:],
        "logprobs": unpack_logprobs(whole(sample.logprobs))[prompt:].tolist(),
        "env_mask": list(sample.loss_mask[prompt:]),
        "trajectory_id": sample.trajectory_id,
        "group_id": sample.group_id,
        "outcome": found.ended_as,
    }


def verl_row(found: FinishedTrajectory, advantage: Advantage, decode: Decode) -> Row | None:
    """Return the row of verl's form; None for a trajectory that is not settled, or that TRL's form leaves out."""
    row = trl_row(found, advantage, decode)
    if row is None or found.outcome is None:
        return None
    return {
        "input": row["prompt"],
        "output": row["completion"],
        "gts": None,  # the log has no answer of a task
        "score": row["reward"],
        "step": row["step"],
        "advantage": row["advantage"],
        "trajectory_id": row["trajectory_id"],
        "group_id": row["group_id"],
        "outcome": row["outcome"],
        "policy_version": found.outcome.policy_version,
        "oldest_version": found.sample.oldest_version,
        "turns": len(found.sample.turns),
    }


class JsonLines:
    """Writes a file with one JSON object a line."""

    def __init__(self, target: Path) -> None:
        self._target, self._partial = target, partial_of(target)
        self._file = self._partial.open("wb")

    def write(self, row: Row) -> None:
        """Write a line."""
        self._file.write(msgspec.json.encode(row) + b"\n")

    def close(self) -> None:
        """Give the file its name."""
        self._file.close()
        self._partial.replace(self._target)

    def discard(self) -> None:
        """Remove the file."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


class Parquet:
    """Writes a Parquet file, compressed with zstd."""

    def __init__(self, target: Path, columns: Mapping[str, str]) -> None:
        """`columns`: Arrow types by column (see `_arrow`). Raises UsageError if pyarrow is not installed."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UsageError(MISSING) from None
        self._target, self._partial = target, partial_of(target)
        self._arrow = pyarrow
        self._schema = pyarrow.schema([(name, _arrow(pyarrow, kind)) for name, kind in columns.items()])
        self._writer = pyarrow.parquet.ParquetWriter(self._partial, self._schema, compression="zstd")
        self._rows: list[Row] = []
        self._tokens = 0

    def write(self, row: Row) -> None:
        """Hold a row, and write all that are held if they are many."""
        self._rows.append(row)
        self._tokens += max((len(value) for value in row.values() if isinstance(value, list)), default=0)
        if len(self._rows) >= BATCH_ROWS or self._tokens >= BATCH_TOKENS:
            self._flush()

    def close(self) -> None:
        """Write the rows that are held, and give the file its name."""
        self._flush()
        self._writer.close()
        self._partial.replace(self._target)

    def discard(self) -> None:
        """Remove the file."""
        with suppress(Exception):  # the disk may be full
            self._writer.close()
        self._partial.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._tokens = [], 0


class StepFolder:
    """Writes a folder with one file of JSON lines for each step."""

    def __init__(self, target: Path) -> None:
        """Raises UsageError if the folder is there already."""
        if os.path.lexists(target):
            raise UsageError(f"{target} is there already: name a folder that is not there yet")
        self._target, self._partial = target, partial_of(target)
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir()

    def write(self, row: Row) -> None:
        """Append a line to the file of the row's step."""
        with (self._partial / f"{row['step']}.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")

    def close(self) -> None:
        """Give the folder its name."""
        self._partial.rename(self._target)

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._partial, ignore_errors=True)


def partial_of(target: Path) -> Path:
    """Return the name of a target that is not whole yet, beside it."""
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


_STRUCT = (
    "turn int32, attempt int32, worker string, start int64, end int64, cached_tokens int64, temperature float64, "
    "requested_at float64, scheduled_at float64, first_token_at float64, finished_at float64, "
    "environment_seconds float64, observation string, action string"
)

COLUMNS: Mapping[str, str] = {
    **dict.fromkeys(("trajectory_id", "group_id"), "string"),
    **dict.fromkeys(("group_size", "index"), "int32"),
    **dict.fromkeys(("model_id", "environment"), "string"),
    "seed": "int64",
    "reward": "float64",
    "success": "bool",
    "advantage": "float64",
    **dict.fromkeys(("outcome", "outcome_reason"), "string"),
    **dict.fromkeys(("step", "policy_version", "oldest_version", "newest_version"), "int64"),
    **dict.fromkeys(("ended", "failure"), "string"),
    "completed_at": "float64",
    "tokens": "list uint32",
    "loss_mask": "list uint8",
    "logprobs": "list float32",
    "versions": "list int64",
    "turns": "turns",
    "device_seconds": "map",
    "info": "string",
}
"""Arrow types of the Parquet form."""

TRL_COLUMNS: Mapping[str, str] = {
    "step": "int64",
    **dict.fromkeys(("prompt", "completion"), "string"),
    **dict.fromkeys(("reward", "advantage"), "float64"),
    **dict.fromkeys(("prompt_ids", "completion_ids"), "list uint32"),
    "logprobs": "list float32",
    "env_mask": "list uint8",
    **dict.fromkeys(("trajectory_id", "group_id", "outcome"), "string"),
}
"""Arrow types of TRL's form."""


def _arrow(pyarrow: Any, kind: str) -> Any:
    """Return the Arrow type of a column."""
    if kind == "turns":
        fields = [field.split() for field in _STRUCT.split(", ")]
        return pyarrow.list_(pyarrow.struct([(name, _arrow(pyarrow, of)) for name, of in fields]))
    if kind == "map":
        return pyarrow.map_(pyarrow.string(), pyarrow.float64())
    if kind.startswith("list "):
        return pyarrow.list_(_arrow(pyarrow, kind.removeprefix("list ")))
    return getattr(pyarrow, f"{kind}_" if kind == "bool" else kind)()


def open_writer(format_name: str, target: Path) -> RowWriter:
    """Return the writer of a format. Raises UsageError."""
    makers: Mapping[str, Callable[[], RowWriter]] = {
        "jsonl": lambda: JsonLines(target),
        "parquet": lambda: Parquet(target, COLUMNS),
        "trl": lambda: Parquet(target, TRL_COLUMNS),
        "verl": lambda: StepFolder(target),
    }
    return makers[format_name]()


def export_row(format_name: str, found: FinishedTrajectory, advantage: Advantage, decode: Decode | None) -> Row | None:
    """Return the row of a trajectory in a format; None if the format leaves it out.

    `decode` is needed by the formats `trl` and `verl`.
    """
    if format_name in ("jsonl", "parquet"):
        return row_of(found, advantage, decode)
    assert decode is not None
    return (trl_row if format_name == "trl" else verl_row)(found, advantage, decode)
