"""Fakes of the kernels that collect changes on a GPU: right ones that compute on the CPU, wrong and failing ones."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from rose.workers.weights import codec
from rose.workers.weights.codec import Changes, Format

KERNELS = "rose.workers.weights.codec.triton_kernels"


def fake_collect(old: Tensor, new: Tensor, sizes: Sequence[int], form: Format) -> list[Changes]:
    olds, news = (np.split(words.numpy().view(form.word), np.cumsum(sizes)[:-1]) for words in (old, new))
    assert [len(words) for words in olds] == list(sizes)
    return [codec.collect(*pair, form) for pair in zip(olds, news, strict=True)]


def forgetful_collect(*arguments: Any) -> list[Changes]:
    """Forget the last event and the last heavy element of each slice."""
    return [
        replace(
            found,
            positions=found.positions[:-1],
            exponents=found.exponents[:-1],
            steps=found.steps[:-1],
            heavy_exponents=found.heavy_exponents[:-1],
            heavy_steps=found.heavy_steps[:-1],
        )
        for found in fake_collect(*arguments)
    ]


def failing_collect(*_: Any) -> list[Changes]:
    raise RuntimeError("no C compiler")


def use_kernels(patch: pytest.MonkeyPatch, collect: Callable[..., list[Changes]]) -> None:
    patch.setitem(sys.modules, KERNELS, SimpleNamespace(collect=collect))
    patch.setattr(codec, "triton_kernels", sys.modules[KERNELS], raising=False)
