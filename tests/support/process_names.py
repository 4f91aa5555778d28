"""Reads the state of a server's process that a lender must not change: the libraries' names, and the process state."""

import logging
import os
import random
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from vllm.ir.op import IrOp
from vllm.v1.worker.gpu.block_table import BlockTables

COMPARED = ("torch", "vllm", "numpy", "triton", "random", "os", "signal")
"""Packages whose modules are compared."""


def library_names() -> dict[tuple[str, str], Any]:
    """Return the value of each name in the loaded modules of the libraries, by module and name."""
    modules = {name: each for name, each in sys.modules.items() if name.partition(".")[0] in COMPARED}
    places: dict[str, Any] = {**modules, "torch.Tensor": torch.Tensor, "BlockTables": BlockTables, **IrOp.registry}
    return {
        (place, name): value
        for place, owner in places.items()
        if owner is not None
        for name, value in vars(owner).items()
        if not isinstance(value, ModuleType)
    }


def changed_names(before: Mapping[tuple[str, str], Any]) -> list[str]:
    """Return the names whose value is not the one before."""
    after = library_names()
    return sorted(".".join(key) for key, value in before.items() if after.get(key) is not value)


def process_states() -> dict[str, Any]:
    """Return the states of random generators, the environment, the defaults of torch and vLLM's log."""
    log = logging.getLogger("vllm")
    numbers: Any = np.random.get_state()
    return {
        "environment": dict(os.environ),
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": [part.tolist() if hasattr(part, "tolist") else part for part in numbers],
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "log": [log.level, *((id(each), each.level, id(each.formatter)) for each in log.handlers)],
    }


def changed_states(before: Mapping[str, Any]) -> list[str]:
    """Return which states are not those before."""
    after = process_states()
    return [name for name, value in before.items() if after[name] != value]
