"""Five Triton kernels like those of a sampler, over logits (rows, vocabulary) in float32; times of their first runs.

`python -m bench.gpu.sampler_kernels DEVICE` prints one JSON object: the seconds of each kernel, or its error.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

ROWS, BLOCK = 4, 1024


@triton.jit  # type: ignore[untyped-decorator]
def temperature(logits, out, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * vocabulary
    x = tl.load(logits + row + at, mask=at < vocabulary)
    tl.store(out + row + at, x / 0.7, mask=at < vocabulary)


@triton.jit  # type: ignore[untyped-decorator]
def penalty(logits, out, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * vocabulary
    x = tl.load(logits + row + at, mask=at < vocabulary)
    tl.store(out + row + at, tl.where(x > 0, x / 1.2, x * 1.2), mask=at < vocabulary)


@triton.jit  # type: ignore[untyped-decorator]
def min_p(logits, out, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * vocabulary
    x = tl.load(logits + row + at, mask=at < vocabulary, other=float("-inf"))
    tl.store(out + row + at, tl.where(x < tl.max(x, 0) - 3.0, float("-inf"), x), mask=at < vocabulary)


@triton.jit  # type: ignore[untyped-decorator]
def gumbel(logits, out, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * vocabulary
    x = tl.load(logits + row + at, mask=at < vocabulary, other=float("-inf"))
    noise = -tl.log(-tl.log(tl.rand(7, row + at) * 0.999 + 0.0005))
    best = tl.argmax(x + noise, 0)
    tl.store(out + row + tl.program_id(1), best.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def log_softmax(logits, out, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * vocabulary
    x = tl.load(logits + row + at, mask=at < vocabulary, other=float("-inf"))
    top = tl.max(x, 0)
    tl.store(out + row + at, x - top - tl.log(tl.sum(tl.exp(x - top), 0)), mask=at < vocabulary)


KERNELS: dict[str, Any] = {
    "temperature": temperature, "penalty": penalty, "min_p": min_p, "gumbel": gumbel, "log_softmax": log_softmax,
}  # fmt: skip


def first_runs(device: str) -> dict[str, Any]:
    """Return the seconds of the first run of each kernel in this process, or the error that the run raises."""
    vocabulary = 151_936 if device == "cuda" else 2_000
    logits = torch.randn(ROWS, vocabulary, device=device)
    out = torch.empty_like(logits)
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    found: dict[str, Any] = {}
    for name, kernel in KERNELS.items():
        began = time.perf_counter()
        try:
            kernel[(ROWS, triton.cdiv(vocabulary, BLOCK))](logits, out, vocabulary, BLOCK=BLOCK)
            wait()
            found[name] = round(time.perf_counter() - began, 4)
        except Exception as error:  # noqa: BLE001 - Triton, C compiler and driver raise many types
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


if __name__ == "__main__":
    print(json.dumps(first_runs(sys.argv[1])))
