"""Collects on a GPU what changed since the last snapshot, so that the host encodes without a look at every weight.

Keeps true
- Changes name the digest of the words from which they lead, so that they are used on that base alone.
- A failure that is noticed costs the changes and not the version: the host has all words, and encodes from them.
- Triton is imported at the first tensor on a GPU, and nowhere else.

The collector keeps one copy of the published weights on the GPU, of this rank's part with FSDP2. While a tensor is
collected there are two copies of the tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from rose.schemas.errors import describe_error
from rose.workers.weights.codec import FORMATS, Changes
from rose.workers.weights.layout import Box, matrix

INTEGERS = {2: torch.int16, 4: torch.int32}
"""The element type for the bits of weights, by bytes."""

log = structlog.get_logger("weights")


@dataclass(frozen=True, slots=True)
class SliceChanges:
    """The changes of one slice since an earlier snapshot."""

    base_digest: bytes
    """Digest of the slice in the earlier snapshot."""
    changes: Changes


@dataclass(frozen=True, slots=True)
class _Kept:
    words: Tensor
    """The bits of a tensor on its GPU, flat, slice after slice."""
    digests: Mapping[Box, bytes]


class ChangeCollector:
    """Collects the changes between the snapshots of one publisher."""

    def __init__(self, *, device_type: str = "cuda") -> None:
        """`device_type`: tensors on devices of this type are collected."""
        self._device_type = device_type
        self._kept: dict[str, _Kept] = {}
        self.stopped = False
        """Whether nothing that was collected may be used any more."""

    def collect(
        self, name: str, shard: Tensor, own: Box, digests: Mapping[Box, bytes], dtype: str
    ) -> dict[Box, SliceChanges]:
        """The changes of each slice of a tensor since the last call for the tensor; empty where there are none to use.

        `shard`: the values of the box `own`. `digests`: digests of the slices of `own`, in order.
        """
        if self.stopped or shard.device.type != self._device_type or not digests:
            return {}
        try:
            from rose.workers.weights.codec import triton_kernels

            words, kept = _flat_slices(shard, own, digests), self._kept.get(name)
            self._kept[name] = _Kept(words, digests)
            if kept is None or kept.digests.keys() != digests.keys() or kept.words.dtype != words.dtype:
                return {}
            sizes = [box.elements for box in digests]
            found = triton_kernels.collect(kept.words, words, sizes, FORMATS[dtype])
        except Exception as error:  # Triton, a compiler or memory is missing, or a kernel fails in any other way
            log.exception("gpu_encoding_stopped", reason=describe_error(error))
            self.stop()
            return {}
        return {box: SliceChanges(kept.digests[box], changes) for box, changes in zip(digests, found, strict=True)}

    def stop(self) -> None:
        """Collect nothing more, and give the memory back."""
        self.stopped = True
        self._kept.clear()


def _flat_slices(shard: Tensor, own: Box, boxes: Mapping[Box, bytes]) -> Tensor:
    """A copy of a tensor's bits, flat, slice after slice."""
    words = shard.detach().reshape(matrix(shard.shape)).view(INTEGERS[shard.element_size()])
    rows_of = [words[box.row_start - own.row_start :][: box.rows] for box in boxes]
    return torch.cat(
        [
            rows[:, box.column_start - own.column_start :][:, : box.columns].reshape(-1)
            for rows, box in zip(rows_of, boxes, strict=True)
        ]
    )
