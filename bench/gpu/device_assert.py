"""Calls of a serving stream after a device assert on the guest's stream of the same process.

`python -m bench.gpu.device_assert DEVICE` prints one line for each call: its name, and `no error` or its error.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


def attempt(name: str, stream: Any, step: Callable[[], Any]) -> None:
    """Run a step on a stream, and print its result. `stream` is None on a CPU."""
    try:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            step()
            if stream is not None:
                stream.synchronize()
    except (IndexError, RuntimeError) as error:  # a CPU raises IndexError, and CUDA a RuntimeError
        print(name, type(error).__name__, str(error).splitlines()[0][:120])
    else:
        print(name, "no error")


def _stream(device: str) -> Any:
    return torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]


def main() -> None:
    device = sys.argv[1]
    serving, place = torch.ones(8, device=device), torch.tensor([1000], device=device)
    guest_stream, serving_stream = (_stream(device) for _ in range(2))
    attempt("guest", guest_stream, lambda: serving[place].sum().item())
    attempt("serving", serving_stream, lambda: (serving + 1).sum().item())
    attempt("serving again", serving_stream, lambda: torch.ones(8, device=device).sum().item())


if __name__ == "__main__":
    main()
