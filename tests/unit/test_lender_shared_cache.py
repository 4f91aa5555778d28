"""The guest's view of serving's cache: a block of the guest lies within the block of serving with the same number."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rose.workers.executor.vllm.types import EngineStartError
from rose.workers.lender.vllm.shared_cache import (
    BLOCK_STEP,
    MOST_BLOCK_TOKENS,
    CacheLayout,
    CacheView,
    NotShared,
    layout_of,
)

MUCH = 1 << 20
"""Tokens of a turn that is longer than any block."""

LAYERS = KVCacheLayout.LBHNC
BLOCKS = KVCacheLayout.BLHNC


def spec(tokens: int, heads: int = 1, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=32, dtype=dtype)


def config_of(layout: KVCacheLayout, each: FullAttentionSpec, layers: int, blocks: int) -> KVCacheConfig:
    """Return the configuration that vLLM makes for a model with layers of one kind."""
    page = each.page_size_bytes
    names = [f"layer {number}" for number in range(layers)]
    outer = layout is BLOCKS
    tensor = KVCacheTensor(
        size=layers * page * blocks,
        layers=names,
        layer_stride=page if outer else page * blocks,
        block_stride=page * layers if outer else page,
    )
    return KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(names, each)], kv_cache_layout=layout.name)


def views(config: KVCacheConfig, memory: torch.Tensor) -> list[torch.Tensor]:
    """Return vLLM's views of a cache in this memory."""
    layout = KVCacheLayout[config.kv_cache_layout or ""]
    each = config.kv_cache_groups[0].kv_cache_spec
    return [
        view
        for tensor in config.kv_cache_tensors
        for view in create_kv_cache_views(memory, each, config.num_blocks, layout, tensor)
    ]


class Shape(NamedTuple):
    """A server and a guest: the cache's layout, and tokens of a block, heads and layers of each."""

    layout: KVCacheLayout
    tokens: int
    heads: int
    layers: int
    guest_heads: int
    guest_layers: int
    dtype: torch.dtype

    @property
    def serving(self) -> KVCacheConfig:
        return config_of(self.layout, spec(self.tokens, self.heads), self.layers, 5)


def guest_views(serving: KVCacheConfig, memory: torch.Tensor, shape: Shape) -> list[torch.Tensor] | None:
    """Return the guest's views of serving's cache, as its executor makes them; None if no block fits."""
    layout = layout_of(serving)
    assert layout is not None
    names = [f"layer {number}" for number in range(shape.guest_layers)]
    one = spec(BLOCK_STEP, shape.guest_heads, shape.dtype)
    try:
        tokens = layout.block_tokens(dict.fromkeys(names, one), MUCH)
    except NotShared:
        return None
    each = spec(tokens, shape.guest_heads, shape.dtype)
    tensors = layout.view(names, each.page_size_bytes)
    guest = KVCacheConfig(serving.num_blocks, tensors, [KVCacheGroupSpec(names, each)])
    host = SimpleNamespace(kv_caches=[memory])
    view, vllm_config = CacheView(host), SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK_STEP))
    view.share(vllm_config, tokens)
    assert vllm_config.cache_config.block_size == tokens and callable(host._zero_block_ids)
    found = view.allocate(guest, memory.device, LAYERS, [tokens])
    view.check()
    assert list(found) == names
    return list(found.values())


@given(st.sampled_from([LAYERS, BLOCKS]), st.integers(1, 4), st.sets(st.integers(0, 4), min_size=1))
def test_zeroed_blocks_are_zero_in_every_layer_and_no_other_block_is(
    layout: KVCacheLayout, layers: int, numbers: set[int]
) -> None:
    config = config_of(layout, spec(16), layers, 5)
    memory = torch.ones(config.kv_cache_tensors[0].size, dtype=torch.int8)
    found = layout_of(config)
    assert found is not None
    found.zero(memory.untyped_storage(), sorted(numbers))
    for view in views(config, memory):
        assert {number for number in range(5) if not view[number].any()} == numbers
        assert all(view[number].view(torch.int8).all() for number in range(5) if number not in numbers)


SHAPES = st.builds(
    Shape,
    layout=st.sampled_from([LAYERS, BLOCKS]),
    tokens=st.sampled_from([16, 32, 64]),
    heads=st.integers(1, 4),
    layers=st.integers(1, 6),
    guest_heads=st.integers(1, 4),
    guest_layers=st.integers(1, 14),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)


@settings(max_examples=150, deadline=None)
@given(SHAPES)
def test_block_of_the_guest_shares_bytes_with_serving_block_of_its_number_alone(shape: Shape) -> None:
    serving = shape.serving
    memory = torch.zeros(serving.kv_cache_tensors[0].size, dtype=torch.int8)
    guest = guest_views(serving, memory, shape)
    if guest is None:
        least = spec(BLOCK_STEP, shape.guest_heads, shape.dtype).page_size_bytes
        whole = layout_of(serving)
        assert whole is not None and -(-shape.guest_layers // whole.regions) * least > whole.width
        return
    hosts = views(serving, memory)
    for number in range(5):
        memory.zero_()
        for layer, view in enumerate(guest):
            before = int((memory != 0).sum())
            view[number].view(torch.int8 if view.element_size() == 1 else torch.int16).fill_(layer + 1)
            written = int((memory != 0).sum()) - before
            assert written >= view[number].numel(), "two layers of the guest share bytes"
        touched = {block for host in hosts for block in range(5) if host[block].float().count_nonzero()}
        assert touched == {number}


@given(SHAPES)
def test_view_uses_the_most_tokens_that_fit(shape: Shape) -> None:
    found = layout_of(shape.serving)
    assert found is not None
    one = spec(BLOCK_STEP, shape.guest_heads, shape.dtype)
    names = [str(number) for number in range(shape.guest_layers)]
    try:
        chosen = found.block_tokens(dict.fromkeys(names, one), MUCH)
    except NotShared:
        chosen = 0
    page = one.page_size_bytes // BLOCK_STEP * (chosen + BLOCK_STEP)
    assert chosen == MOST_BLOCK_TOKENS or -(-shape.guest_layers // found.regions) * page > found.width


def test_model_like_serving_gets_whole_blocks() -> None:
    layout = layout_of(config_of(LAYERS, spec(64, 2), 6, 9))
    assert layout is not None and layout.block_tokens(dict.fromkeys("abcdef", spec(32, 2)), MUCH) == 64


def test_block_is_no_larger_than_the_longest_turn() -> None:
    layout = layout_of(config_of(LAYERS, spec(512, 2), 6, 9))
    assert layout is not None
    tokens = [layout.block_tokens(dict.fromkeys("abcdef", spec(32, 2)), longest) for longest in (1, 32, 33, 100, MUCH)]
    assert tokens == [32, 32, 64, 128, MOST_BLOCK_TOKENS]


def test_refusal_of_a_block_that_does_not_fit_names_the_block_size_that_would() -> None:
    """The server has blocks of 32 tokens; the guest's numbers are twice as large."""
    layout = layout_of(config_of(LAYERS, spec(32), 2, 5))
    assert layout is not None
    with pytest.raises(NotShared, match="--block-size 2 times as large"):
        layout.block_tokens(dict.fromkeys("ab", spec(32, dtype=torch.float32)), MUCH)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_layout": "LHBNC"},
        {"kv_cache_layout": None},
        {"kv_cache_tensors": []},
        {"kv_cache_tensors": [KVCacheTensor(4096, ["a"], 4096, 2048, host_resident=True)]},
        {"kv_cache_tensors": [KVCacheTensor(6144, ["a"], 2048, 2048), KVCacheTensor(6144, ["b"], 4096, 4096)]},
        {"kv_cache_tensors": [KVCacheTensor(2000, ["a"], 2000, 1000)]},
    ],
    ids=["heads outermost", "unknown layout", "no cache", "on the host", "two page sizes", "unaligned"],
)
def test_cache_whose_blocks_are_no_runs_of_bytes_has_no_view(changes: dict[str, Any]) -> None:
    config = config_of(LAYERS, spec(32), 2, 2)
    for name, value in changes.items():
        setattr(config, name, value)
    assert layout_of(config) is None


def test_caches_of_several_groups_in_the_same_bytes_have_a_view() -> None:
    """vLLM lays groups of layers over each other: a block belongs to one group at a time."""
    config = config_of(LAYERS, spec(32), 2, 7)
    one = config.kv_cache_tensors[0]
    config.kv_cache_tensors.append(KVCacheTensor(one.size, ["c"], one.layer_stride, one.block_stride))
    assert layout_of(config) == CacheLayout(one.size, 7, 2, one.layer_stride, one.block_stride)


@pytest.mark.parametrize(
    "unlike",
    [
        spec(32, 2),
        SlidingWindowSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, sliding_window=64),
    ],
)
def test_guest_with_layers_of_several_kinds_has_no_view(unlike: FullAttentionSpec) -> None:
    layout = layout_of(config_of(LAYERS, spec(64, 4), 4, 5))
    assert layout is not None
    for layers in ({"a": spec(32), "b": unlike}, {}):
        with pytest.raises(NotShared, match="several kinds"):
            layout.block_tokens(layers, MUCH)


def test_page_with_padding_has_no_view() -> None:
    layout = layout_of(config_of(LAYERS, spec(64, 4), 4, 5))
    padded = FullAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, page_size_padded=1 << 13
    )
    assert layout is not None
    with pytest.raises(NotShared):
        layout.block_tokens({"a": padded}, MUCH)


def test_cache_of_its_own_is_vllms() -> None:
    config = config_of(LAYERS, spec(32), 2, 3)
    host = SimpleNamespace(kv_caches=[torch.zeros(1)])
    found = CacheView(host).allocate(config, torch.device("cpu"), LAYERS, [32])
    assert [view.shape for view in found.values()] == [(3, 1, 32, 64)] * 2
    assert found["layer 0"].untyped_storage().nbytes() == config.kv_cache_tensors[0].size


@pytest.mark.parametrize(
    ("layout", "kernel_sizes"),
    [(LAYERS, [16]), (LAYERS, None), (KVCacheLayout.LHBNC, [32])],
    ids=["split", "unknown", "heads"],
)
def test_view_of_blocks_that_the_guest_would_split_is_refused(
    layout: KVCacheLayout, kernel_sizes: list[int] | None
) -> None:
    config = config_of(LAYERS, spec(32), 2, 3)
    view = CacheView(SimpleNamespace(kv_caches=[torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)]))
    view.share(SimpleNamespace(cache_config=SimpleNamespace()), 32)
    with pytest.raises(EngineStartError, match="whole blocks"):
        view.allocate(config, torch.device("cpu"), layout, kernel_sizes)


def test_cache_that_was_made_elsewhere_is_an_error() -> None:
    """Serving's memory would be lent, and the guest would have memory of its own."""
    view = CacheView(SimpleNamespace())
    view.check()
    view.share(SimpleNamespace(cache_config=SimpleNamespace()), 32)
    with pytest.raises(EngineStartError, match="another way"):
        view.check()
