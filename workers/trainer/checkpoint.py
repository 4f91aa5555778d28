"""Checkpoints of a trainer, written before the step's records.

Keeps true
- A checkpoint is complete or invalid: the tensors files are written first, one by each rank with the rows that the rank
  holds, then the progress file with their digests. Each file is written under a temporary name, synced and renamed. A
  truncated or corrupt checkpoint fails its digest and is skipped.
- Any number of ranks restores what another number saved, bit for bit.
- The newest two checkpoints are kept.
- Loading executes nothing: tensors are safetensors, the rest is typed MessagePack.
- A checkpoint of another run, namespace or model is refused, unless `Checkpoints` is made without an identity.
- A run goes on with the contents of the model folder that it began with (`check_folder`), wherever the folder lies.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rose.schemas.errors import RoseError, UsageError
from rose.workers.trainer.config import PROGRESS_FILES
from rose.workers.trainer.ranks import ALONE, Ranks
from rose.workers.weights.tensors import owned_part

KEPT = 2
"""Number of checkpoints that are kept: if the newest is unreadable, the one before it is used."""

DIGEST_BYTES = 16
"""Length of the BLAKE2b digest at the beginning of the progress file, over the rest of the file."""

FIRST_ROWS = "first_rows"
"""Key, in the metadata of a rank's tensors file, of the first row of each tensor, as a JSON object."""

MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random.torch"
"""Prefixes of tensor names in the tensors file."""

log = structlog.get_logger("trainer")


class CheckpointRefused(UsageError):
    """A checkpoint from which this run must not resume."""


class CheckpointFailed(RoseError):
    """A checkpoint cannot be written."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The run, namespace and model that a checkpoint belongs to."""

    run: str
    namespace: str
    model_id: str


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's state after a step, except its tensors. The position in the samples topic is on the log."""

    identity: Identity
    version: int
    """Policy version; also the number of the step that made the version."""
    epoch: int
    """Epoch of the version: how often the run has gone back."""
    weights_digest: bytes
    """Digest of the weights, as the manifest of the version has it."""
    abandoned: tuple[tuple[int, int], ...]
    """First and last version of each range of abandoned versions that a sample may still have."""
    outcomes: tuple[bytes, ...]
    """The step's outcomes, encoded as records."""
    step_line: bytes
    """The step's line in `metrics.jsonl`, as JSON; empty if no step made the version."""
    schedule_steps: int = 0
    """Steps of the run that have applied a gradient: the position in the learning-rate schedule. A checkpoint of ROSE
    0.2.0 does not have the number; its run begins the schedule again."""
    folder_digest: bytes = b""
    """Digest of the model folder that the run began with (`FolderTensors`). A checkpoint of ROSE
    0.2.0 has none."""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    progress: Progress
    tensors_digest: bytes
    """Digest of the tensors file of a trainer of one process; empty with several ranks."""
    rank_digests: tuple[bytes, ...] = ()
    """Digests of the tensors files of several ranks, in their order."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        return self.rank_digests or (self.tensors_digest,)


class _Part(NamedTuple):
    """The rows of a tensor that a rank saves."""

    first_row: int
    rows: Tensor


class Checkpoints:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path, identity: Identity | None) -> None:
        """Name the folder of the checkpoints.

        `identity`: the run, namespace and model that the checkpoints must have; None accepts any, for reading only.
        """
        self.folder = folder
        self._identity = identity
        self._decoder = msgspec.msgpack.Decoder(_File)

    def save(self, progress: Progress, model: Any, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> None:
        """Write a checkpoint, which survives a crash of the machine once this returns. Every rank calls this.

        Raises CheckpointFailed.
        """
        from safetensors import SafetensorError

        try:
            self._save(progress, _parts(model, optimizer, leads=ranks.leads), ranks)
        except (OSError, SafetensorError) as error:
            raise CheckpointFailed(
                f"cannot write a checkpoint to {self.folder} ({error}): mend that and start the trainer again, "
                "nothing is lost"
            ) from error

    def _save(self, progress: Progress, parts: Mapping[str, _Part], ranks: Ranks) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = self._tensors_files(progress.version, ranks.size)[ranks.rank]
        partial = tensors.with_suffix(".partial")
        first_rows = {name: part.first_row for name, part in parts.items()}
        metadata = {FIRST_ROWS: msgspec.json.encode(first_rows).decode()} if ranks.size > 1 else None
        save_file({name: part.rows for name, part in parts.items()}, partial, metadata=metadata)
        digest = _file_digest(partial)
        _rename_durably(partial, tensors)
        digests = tuple(ranks.gather(digest))
        if not ranks.leads:
            return
        for missing in (file for file in self._tensors_files(progress.version, ranks.size) if not file.exists()):
            raise CheckpointFailed(
                f"{missing} is not there, although a rank of the trainer has written it: all ranks need the same "
                "folder of checkpoints, on storage that their hosts share"
            )
        alone = ranks.size == 1
        file = _File(progress=progress, tensors_digest=digest if alone else b"", rank_digests=() if alone else digests)
        body = msgspec.msgpack.encode(file)
        name = self._progress_file(progress.version)
        partial = name.with_suffix(".partial")
        partial.write_bytes(_digest(body) + body)
        _rename_durably(partial, name)
        for left in self.folder.glob("step-*.partial"):  # of a save that was interrupted
            left.unlink(missing_ok=True)
        for version in self._versions()[KEPT:]:
            self._progress_file(version).unlink(missing_ok=True)
            for old in self.folder.glob(f"{_stem(version)}*.safetensors"):
                old.unlink(missing_ok=True)

    def newest_first(self) -> Iterator[Progress]:
        """Progress of every valid checkpoint, newest first; an invalid one is skipped with a warning.

        Raises CheckpointRefused if a checkpoint has another identity.
        """
        for version in self._versions():
            file = self._progress_file(version)
            try:
                yield self._read(version)
            except (OSError, msgspec.DecodeError, _CorruptCheckpoint) as error:
                log.warning("checkpoint_skipped", file=str(file), reason=str(error))

    def restore(self, progress: Progress, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Load the model's weights, the optimizer's state and the random state of a checkpoint.

        Raises CheckpointRefused if its tensors are not those of the model.
        """
        self.restore_weights(progress, model)
        with self._saved_tensors(progress) as saved:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state: dict[int, dict[str, Tensor]] = {}
            for name in saved.names(OPTIMIZER):
                index, _, key = name.removeprefix(OPTIMIZER).partition(".")
                value = torch.zeros_like(parameters[int(index)]) if saved.shape(name) else torch.zeros(())
                state.setdefault(int(index), {})[key] = saved.copy_to(value, name)
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
            torch.set_rng_state(saved.copy_to(torch.get_rng_state(), RANDOM))

    def restore_weights(self, progress: Progress, model: Any) -> None:
        """Load the model's weights of a checkpoint. Raises CheckpointRefused as `restore` does."""
        with self._saved_tensors(progress) as saved:
            own = {MODEL + name: parameter for name, parameter in model.named_parameters()}
            if {name: p.shape for name, p in own.items()} != {name: saved.shape(name) for name in saved.names(MODEL)}:
                raise CheckpointRefused(
                    f"the checkpoint of version {progress.version} in {self.folder} holds other tensors than the model "
                    "folder: name the model that the run began with"
                )
            for name, parameter in own.items():
                saved.copy_to(parameter.detach(), name)

    @contextmanager
    def _saved_tensors(self, progress: Progress) -> Iterator["SavedTensors"]:
        with ExitStack() as stack:
            yield SavedTensors(
                self._tensors_files(progress.version, len(self._decode(progress.version).digests)), stack
            )

    def _read(self, version: int) -> Progress:
        file = self._decode(version)
        found = file.progress.identity
        if self._identity is not None and found != self._identity:
            raise CheckpointRefused(
                f"{self.folder} holds checkpoints of run {found.run}, namespace '{found.namespace}', model "
                f"{found.model_id}; this is run {self._identity.run}, namespace '{self._identity.namespace}', model "
                f"{self._identity.model_id}: name another run or checkpoint folder"
            )
        digests = tuple(map(_file_digest, self._tensors_files(version, len(file.digests))))
        if digests != file.digests:
            raise _CorruptCheckpoint("the digest of its tensors is another")
        return file.progress

    def _decode(self, version: int) -> _File:
        data = self._progress_file(version).read_bytes()
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if _digest(body) != digest:
            raise _CorruptCheckpoint("its digest is not that of its content")
        return self._decoder.decode(body)

    def _versions(self) -> list[int]:
        """Versions that have a progress file, newest first."""
        stems = (file.stem.removeprefix("step-") for file in self.folder.glob(PROGRESS_FILES))
        return sorted((int(stem) for stem in stems if stem.isdigit()), reverse=True)

    def _progress_file(self, version: int) -> Path:
        return self.folder / f"{_stem(version)}.msgpack"

    def _tensors_files(self, version: int, ranks: int) -> list[Path]:
        if ranks == 1:
            return [self.folder / f"{_stem(version)}.safetensors"]
        return [self.folder / f"{_stem(version)}.rank-{rank}-of-{ranks}.safetensors" for rank in range(ranks)]


def check_folder(progress: Progress, digest: bytes, folder: Path) -> None:
    """Check that a checkpoint's run began with the model folder that has this digest. Raises CheckpointRefused.

    A checkpoint without a digest is accepted with a warning.
    """
    if not progress.folder_digest:
        reason = "the checkpoint does not say with which model folder its run began"
        log.warning("model_folder_not_checked", folder=str(folder), version=progress.version, reason=reason)
    elif progress.folder_digest != digest:
        raise CheckpointRefused(
            f"{folder} has other weights or another config.json than the folder that the run began with: set "
            "model.folder to the folder that the run began with, or take another run.name"
        )


class _CorruptCheckpoint(Exception):
    """A checkpoint is truncated or corrupt."""


class SavedTensors:
    """The tensors of a checkpoint, whatever the number of ranks that wrote its files."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        """`stack` closes the files. Raises OSError or SafetensorError."""
        from safetensors import safe_open

        self._parts: dict[str, list[tuple[int, Any]]] = {}
        """First row of each part of a tensor, and the reader of the part, by the name of the tensor."""
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            first_rows = msgspec.json.decode((opened.metadata() or {}).get(FIRST_ROWS, "{}"), type=dict[str, int])
            for name in opened.keys():  # noqa: SIM118  no mapping
                self._parts.setdefault(name, []).append((first_rows.get(name, 0), opened.get_slice(name)))

    def names(self, prefix: str) -> list[str]:
        """The names that begin with the prefix."""
        return [name for name in self._parts if name.startswith(prefix)]

    def shape(self, name: str) -> torch.Size:
        """The shape of the whole tensor."""
        first, last = max(self._parts[name], key=lambda part: part[0])
        rows, *others = last.get_shape() or [None]
        return torch.Size([] if rows is None else [first + rows, *others])

    def copy_to(self, tensor: Tensor, name: str) -> Tensor:
        """Fill the tensor, of the same shape, or the rows of it that this rank holds. Returns the tensor."""
        if (own := owned_part(tensor)) is None:
            return tensor
        first, local = own[0].row_start, own[1]
        for start, part in self._parts[name]:
            if not local.dim():
                local.copy_(part[...])
                continue
            rows = part.get_shape()[0]
            low, high = max(first, start), min(first + len(local), start + rows)
            if low < high:
                local[low - first : high - first].copy_(part[low - start : high - start])
        return tensor


def _parts(model: Any, optimizer: torch.optim.Optimizer, *, leads: bool) -> dict[str, _Part]:
    """Return the tensors that this rank saves, by name. Rank 0 saves what all ranks have alike."""
    tensors = {MODEL + name: parameter.detach() for name, parameter in model.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{OPTIMIZER}{index}.{key}": value for key, value in state.items()}
    owned = {name: owned_part(tensor) for name, tensor in tensors.items() if leads or isinstance(tensor, DTensor)}
    parts = {name: _Part(own[0].row_start, own[1]) for name, own in owned.items() if own is not None}
    return {**parts, RANDOM: _Part(0, torch.get_rng_state())} if leads else parts


def _stem(version: int) -> str:
    return f"step-{version:08d}"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _file_digest(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).digest()


def _rename_durably(partial: Path, name: Path) -> None:
    """Sync a finished temporary file, rename it and sync its folder."""
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(name)
    folder = os.open(name.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
