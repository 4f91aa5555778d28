"""Publishers and receivers of any layout: an engine rank receives its shard bit for bit, and not the rest."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.workers.weights.assembly import Assembly
from rose.workers.weights.checks import check_manifest
from rose.workers.weights.layout import ShardRank, matrix, shard_of
from tests.support.weights_fixtures import MemoryChunkSink, changed, covered, part, random_tensors

HEAD = 4
"""Elements of an attention head."""

Shapes = dict[str, tuple[int, ...]]


def decoder(*, layers: int, heads: int, key_value_heads: int, vocabulary: int, tied: bool) -> Shapes:
    """Return the tensors of a small decoder of the Llama family."""
    hidden, inner = heads * HEAD, 24
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.q_proj.bias": (hidden,),
            f"{at}.self_attn.k_proj.weight": (key_value_heads * HEAD, hidden),
            f"{at}.self_attn.v_proj.weight": (key_value_heads * HEAD, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.self_attn.q_norm.weight": (HEAD,),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.input_layernorm.weight": (hidden,),
        }
    return shapes if tied else {**shapes, "lm_head.weight": (vocabulary, hidden)}


def ranks_of(size: int, stages: int, *, layers: int, key_value_heads: int, tied: bool) -> list[ShardRank]:
    """Return every worker of an engine."""
    return [
        ShardRank(
            tensor_parallel_rank=rank,
            tensor_parallel_size=size,
            layers=range(layers * stage // stages, layers * (stage + 1) // stages),
            all_layers=layers,
            key_value_heads=key_value_heads,
            tied_embeddings=tied,
        )
        for stage in range(stages)
        for rank in range(size)
    ]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("key_value_heads", [1, 2, 8])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shards_of_all_ranks_cover_the_model(size: int, stages: int, key_value_heads: int, tied: bool) -> None:
    shapes = decoder(layers=3, heads=8, key_value_heads=key_value_heads, vocabulary=301, tied=tied)
    ranks = ranks_of(size, stages, layers=3, key_value_heads=key_value_heads, tied=tied)
    shards = [shard_of(rank, shapes) for rank in ranks]
    for name, shape in shapes.items():
        times = covered(shape, [boxes[name] for boxes in shards if name in boxes])
        assert times.min() >= 1, name
        if name.endswith(("q_proj.weight", "o_proj.weight", "down_proj.weight", "up_proj.weight", "lm_head.weight")):
            assert times.max() == 1, name
        if name.endswith("k_proj.weight"):
            assert times.max() == max(1, size // key_value_heads), name


@pytest.mark.slow
@settings(max_examples=20)
@given(
    size=st.sampled_from([1, 2, 4, 8]),
    stages=st.sampled_from([1, 2]),
    key_value_heads=st.sampled_from([1, 2, 8]),
    publishers=st.integers(1, 5),
    column_parts=st.sampled_from([1, 2, 3, 8]),
    vocabulary=st.integers(1, 150),
    tied=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_rank_gets_its_shard_from_publishers_of_any_layout(
    size: int,
    stages: int,
    key_value_heads: int,
    publishers: int,
    column_parts: int,
    vocabulary: int,
    tied: bool,
    seed: int,
) -> None:
    """The versions are an anchor and a delta."""
    random = np.random.default_rng(seed)
    shapes = decoder(layers=2, heads=8, key_value_heads=key_value_heads, vocabulary=vocabulary, tied=tied)
    first = random_tensors(shapes, torch.bfloat16, random)
    second = changed(first, 0.05, random)
    sink = MemoryChunkSink()
    anchor = sink.store(first, 0, row_shards=publishers, column_parts=column_parts)
    delta = sink.store(second, 1, base=first, base_version=0, row_shards=publishers, column_parts=column_parts)
    for manifest in (anchor, delta):
        check_manifest(manifest, shapes)
    for rank in ranks_of(size, stages, layers=2, key_value_heads=key_value_heads, tied=tied):
        shards = shard_of(rank, shapes)
        assembly = Assembly(None, shards)
        assembly.add(anchor, sink.fetch)
        assembly.add(delta, sink.fetch)
        assert assembly.done.tensors.keys() == shards.keys()
        for name, box in shards.items():
            assert np.array_equal(part(assembly.done.tensors[name], box), part(second[name], box)), name


def test_rank_of_eight_fetches_less_than_a_third_with_column_slices() -> None:
    shapes = decoder(layers=2, heads=8, key_value_heads=8, vocabulary=512, tied=False)
    tensors = random_tensors(shapes, torch.bfloat16, np.random.default_rng(0))
    sink = MemoryChunkSink()
    manifest = sink.store(tensors, 0, row_shards=8, column_parts=8, chunk_bytes=1000)
    rank = ranks_of(8, 1, layers=2, key_value_heads=8, tied=False)[3]
    Assembly(None, shard_of(rank, shapes)).add(manifest, sink.fetch)
    fetched = sum(ref.bytes for ref in sink.fetched)
    sharded = sum(2 * rows * columns for rows, columns in map(matrix, shapes.values()))
    assert fetched < 0.3 * sharded
