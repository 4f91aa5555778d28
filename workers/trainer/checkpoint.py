"""Checkpoints of a trainer, written before the step's records.

Keeps true
- A checkpoint is complete or invalid: the tensors file is written first, then the progress file with its digest. Each
  file is written under a temporary name, synced and renamed. A truncated or corrupt checkpoint fails its digest and is
  skipped.
- The newest two checkpoints are kept.
- Loading executes nothing: tensors are safetensors, the rest is typed MessagePack.
- A checkpoint of another run, namespace or model is refused, unless `Checkpoints` is made without an identity.
- A run goes on with the contents of the model folder that it began with (`check_folder`), wherever the folder lies.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from torch import Tensor

from rose.schemas.errors import RoseError, UsageError
from rose.workers.trainer.config import PROGRESS_FILES

KEPT = 2
"""Number of checkpoints that are kept: if the newest is unreadable, the one before it is used."""

DIGEST_BYTES = 16
"""Length of the BLAKE2b digest at the beginning of the progress file, over the rest of the file."""

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


class Checkpoints:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path, identity: Identity | None) -> None:
        """Name the folder of the checkpoints.

        `identity`: the run, namespace and model that the checkpoints must have; None accepts any, for reading only.
        """
        self.folder = folder
        self._identity = identity
        self._decoder = msgspec.msgpack.Decoder(_File)

    def save(self, progress: Progress, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Write a checkpoint, which survives a crash of the machine once this returns. Raises CheckpointFailed."""
        from safetensors import SafetensorError

        try:
            self._save(progress, _tensors(model, optimizer))
        except (OSError, SafetensorError) as error:
            raise CheckpointFailed(
                f"cannot write a checkpoint to {self.folder} ({error}): mend that and start the trainer again, "
                "nothing is lost"
            ) from error

    def _save(self, progress: Progress, contents: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = self._tensors_file(progress.version)
        partial = tensors.with_suffix(".partial")
        save_file(dict(contents), partial)
        digest = _file_digest(partial)
        _rename_durably(partial, tensors)
        body = msgspec.msgpack.encode(_File(progress=progress, tensors_digest=digest))
        name = self._progress_file(progress.version)
        partial = name.with_suffix(".partial")
        partial.write_bytes(_digest(body) + body)
        _rename_durably(partial, name)
        for version in self._versions()[KEPT:]:
            self._progress_file(version).unlink(missing_ok=True)
            self._tensors_file(version).unlink(missing_ok=True)

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
        from safetensors.torch import load_file

        tensors = load_file(self._tensors_file(progress.version))
        parameters = dict(model.named_parameters())
        held = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
        if {name: p.shape for name, p in parameters.items()} != {name: t.shape for name, t in held.items()}:
            raise CheckpointRefused(
                f"{self._tensors_file(progress.version)} holds other tensors than the model folder: name the model "
                "that the run began with"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(held[name])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(OPTIMIZER):
                index, _, key = name.removeprefix(OPTIMIZER).partition(".")
                state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(tensors[RANDOM])

    def _read(self, version: int) -> Progress:
        data = self._progress_file(version).read_bytes()
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if _digest(body) != digest:
            raise _CorruptCheckpoint("its digest is not that of its content")
        file = self._decoder.decode(body)
        found = file.progress.identity
        if self._identity is not None and found != self._identity:
            raise CheckpointRefused(
                f"{self.folder} holds checkpoints of run {found.run}, namespace '{found.namespace}', model "
                f"{found.model_id}; this is run {self._identity.run}, namespace '{self._identity.namespace}', model "
                f"{self._identity.model_id}: name another run or checkpoint folder"
            )
        if _file_digest(self._tensors_file(version)) != file.tensors_digest:
            raise _CorruptCheckpoint("the digest of its tensors is another")
        return file.progress

    def _versions(self) -> list[int]:
        """Versions that have a progress file, newest first."""
        stems = (file.stem.removeprefix("step-") for file in self.folder.glob(PROGRESS_FILES))
        return sorted((int(stem) for stem in stems if stem.isdigit()), reverse=True)

    def _progress_file(self, version: int) -> Path:
        return self.folder / f"step-{version:08d}.msgpack"

    def _tensors_file(self, version: int) -> Path:
        return self.folder / f"step-{version:08d}.safetensors"


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


def _tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {MODEL + name: parameter.detach() for name, parameter in model.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{OPTIMIZER}{index}.{key}": value for key, value in state.items()}
    return tensors | {RANDOM: torch.get_rng_state()}


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
