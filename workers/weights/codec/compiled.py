"""The decorator by which numba compiles the codec's loops."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(loop: Callable[..., Any]) -> Any:
    """Compile a loop at its first call; numba keeps the result in its cache.

    The loop is compiled again in each process if no folder for the cache can be written, as on a read-only root.
    """
    try:
        return njit(cache=True, nogil=True)(loop)
    except RuntimeError:  # numba finds no folder that it can write
        return njit(nogil=True)(loop)
