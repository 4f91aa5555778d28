"""Engines whose linear layers compute with the plain weights, as on a GPU: versions are written in place."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import utils as layer_utils

from rose.workers.executor.vllm.rank_worker import RankWorker

FAULT = "ROSE_TEST_WRITE_FAULT"
"""Environment variable: path of a file. While the file is there, rank 1 of `UnpackedRank` fails to write a version."""


def leave_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Make the layer compute with its plain weight: takes the place of vLLM's packing."""
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


@contextmanager
def unpacked_layers() -> Iterator[None]:
    """Let engines that start within the context have plain weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", leave_plain)
        yield


@contextmanager
def failing_write(after: int) -> Iterator[None]:
    """Let a write of torch into a tensor fail after so many calls, when a half is written."""
    put, copy, calls = torch.Tensor.put_, torch.Tensor.copy_, 0

    def fails() -> bool:
        nonlocal calls
        calls += 1
        return calls == after + 1

    def put_half(target: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if not fails():
            return put(target, positions, values)
        half = len(positions) // 2
        put(target, positions[:half], values[:half])
        raise RuntimeError("a write has failed")

    def copy_half(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if not fails():
            return copy(target, source)
        half = len(target) // 2
        copy(target[:half], source[:half])
        raise RuntimeError("a write has failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "put_", put_half)
        patch.setattr(torch.Tensor, "copy_", copy_half)
        yield


class UnpackedRank(RankWorker):
    """A rank with plain weights."""

    def load_model(self, **settings: Any) -> None:
        with unpacked_layers():
            super().load_model(**settings)

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "activate" and self.rank == 1 and Path(os.environ[FAULT]).exists():
            with failing_write(5):
                return super().call(name, *arguments)
        return super().call(name, *arguments)
