"""What of a model a tensor- and pipeline-parallel engine needs, in Hugging Face coordinates.

Keeps true: over the ranks of an engine every element is needed by at least one; what vLLM splits is needed by the ranks
that compute with it alone. For the decoders of the Llama family, Qwen's among them: separate q, k, v, gate and up
projections, which vLLM fuses when it writes them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.weights.geometry import Box, matrix, whole

VOCABULARY_PADDING = 64
"""vLLM fills the vocabulary up to a multiple of this before it splits it."""

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_ROWS = re.compile(r"\.(q_proj|gate_proj|up_proj)\.(weight|bias)$")
_KEY_VALUE = re.compile(r"\.(k_proj|v_proj)\.(weight|bias)$")
_COLUMNS = re.compile(r"\.(o_proj|down_proj)\.weight$")
_EMBEDDING = re.compile(r"embed_tokens\.weight$")
_HEAD = re.compile(r"lm_head\.weight$")
_LAST_NORM = re.compile(r"(^|\.)model\.norm\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One worker of an engine, and what of the model's shape decides its share."""

    tensor_parallel_rank: int
    tensor_parallel_size: int
    layers: range
    """The decoder layers of its pipeline stage."""
    all_layers: int
    key_value_heads: int
    tied_embeddings: bool = False


def wanted_by(rank: Rank, shapes: Mapping[str, Sequence[int]]) -> dict[str, Box]:
    """The part of each tensor that the rank needs; tensors that it needs nothing of are left out."""
    wanted = {name: _share(name, shape, rank) for name, shape in shapes.items() if _in_stage(name, rank)}
    return {name: box for name, box in wanted.items() if box.elements}


def _in_stage(name: str, rank: Rank) -> bool:
    layer = _LAYER.search(name)
    if layer:
        return int(layer[1]) in rank.layers
    last = rank.all_layers - 1 in rank.layers
    if _EMBEDDING.search(name):
        return 0 in rank.layers or (last and rank.tied_embeddings)
    return last if _HEAD.search(name) or _LAST_NORM.search(name) else True


def _share(name: str, shape: Sequence[int], rank: Rank) -> Box:
    rows, columns = matrix(shape)
    size, number = rank.tensor_parallel_size, rank.tensor_parallel_rank
    if _EMBEDDING.search(name) or _HEAD.search(name):
        padded = -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
        start, stop = (min(rows, -(-padded // size) * edge) for edge in (number, number + 1))
        return Box(start, stop - start, 0, columns)
    if _KEY_VALUE.search(name) and rank.key_value_heads < size:  # several ranks share a head
        head = rows // rank.key_value_heads
        return Box(number * rank.key_value_heads // size * head, head, 0, columns)
    if _ROWS.search(name) or _KEY_VALUE.search(name):
        start, stop = rows * number // size, rows * (number + 1) // size
        return Box(start, stop - start, 0, columns)
    if _COLUMNS.search(name):
        start, stop = columns * number // size, columns * (number + 1) // size
        return Box(0, rows, start, stop - start)
    return whole(shape)
