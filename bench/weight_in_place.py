"""Counts the bytes that a version writes between two steps, where vLLM's parameters are written in place.

vLLM loads a random policy of 19M parameters with packing off, so that it computes with plain weights as on a GPU.
Versions that change a share of the weights, at random places, are staged and activated; the last version changes all
weights. All figures are counts: a CPU says nothing about the speed of a GPU.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.check import Check, Section

SHARES = 0.001, 0.01, 0.05
"""Shares of the weights that a version changes."""

SLACK = 1.02
"""Most bytes that a version writes, over its share of a whole reload: the number of changes is random."""

SIZE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 8192} | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Sizes of the policy."""


def in_place(_: Path) -> Section:
    """Count the bytes. Raises EngineStartError."""
    import rose.workers.executor.vllm.process_env  # noqa: F401
    from rose.workers.executor.vllm.engine import Engine
    from rose.workers.executor.vllm.engine_core import in_process_worker
    from rose.workers.executor.vllm.in_place_weights import MEMORY_PART, InPlaceWeights
    from rose.workers.executor.vllm.types import EngineConfig

    rows: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory() as name:
        version = _saved_policy(Path(name))
        with _packing_off():
            engine = Engine(EngineConfig(model_folder=Path(name), dtype="bfloat16", policy_version=0))
        with closing(engine):
            engine.allocate_spare()
            model = in_process_worker(engine._core).get_model()
            whole = sum(parameter.nbytes for parameter in model.parameters())
            weights: Any = engine._weights
            writer = weights._writer
            assert isinstance(writer, InPlaceWeights)
            for number, share in enumerate((*SHARES, 1.0), start=1):
                version = _changed(version, share, number)
                for _piece in engine.stage(version.items()):
                    pass
                found = writer.staged_bytes
                engine.activate(number)
                rows.append(
                    {
                        "changed": share,
                        "written_bytes": found.written + found.left,
                        "of_reload": round((found.written + found.left) / whole, 4),
                        "of_these_from_host": found.left,
                        "staging_memory_bytes": found.staged,
                        "staging_of_weights": round(found.staged / whole, 4),
                    }
                )
            wrong = _wrong_parameters(model, version)
    return Section("in_place", rows=rows, checks=_checks(rows, whole, wrong, 1 / MEMORY_PART))


def _checks(rows: list[dict[str, float | str]], whole: int, wrong: int, memory: float) -> list[Check]:
    """Return the checks. `whole`: bytes of a reload. `memory`: staging memory over the weights."""
    written = {share: float(row["of_reload"]) for share, row in zip(SHARES, rows, strict=False)}
    return [
        Check(
            name="in_place_written",
            value=round(max(part / share for share, part in written.items()), 3),
            unit="x",
            bound=SLACK,
            direction="max",
            against="bytes written between two steps over the share of changed weights in a whole reload, the largest",
            details={"reload_bytes": whole, **{f"of_reload_{share}": part for share, part in written.items()}},
        ),
        Check(
            name="in_place_staged",
            value=max(float(row["staging_of_weights"]) for row in rows),
            unit="of the weights",
            bound=memory,
            direction="max",
            against="staging memory in use over the bytes of the weights, also for a version that changes all",
        ),
        Check(
            name="in_place_wrong",
            value=wrong,
            unit="parameters",
            bound=0,
            direction="max",
            against="parameters that are not, bit for bit, what vLLM's loader makes of the last version",
        ),
    ]


def _saved_policy(folder: Path) -> Mapping[str, Tensor]:
    """Save a random policy in the folder; return its tensors."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SIZE, tie_word_embeddings=True, max_position_embeddings=1024)
    model: Any = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _changed(version: Mapping[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """Return a version in which this share of the weights, at random places, has another bit."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.view(torch.int16) ^ (torch.rand(tensor.shape, generator=generator) < share)).view(torch.bfloat16)
        for name, tensor in version.items()
    }


def _wrong_parameters(model: Any, version: Mapping[str, Tensor]) -> int:
    """Return how many parameters differ from those of a model into which the version is loaded."""
    from rose.workers.executor.vllm.loader_copies import copy_modules

    loaded: Any = copy_modules(model, torch.zeros_like)
    loaded.load_weights(sorted(version.items()))
    pairs = zip(model.parameters(), loaded.parameters(), strict=True)
    return sum(not torch.equal(one.data.view(torch.int16), other.data.view(torch.int16)) for one, other in pairs)


@contextmanager
def _packing_off() -> Iterator[None]:
    """Let layers that vLLM loads compute with their plain weights."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def leave_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    utils.dispatch_cpu_unquantized_gemm = leave_plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = pack
