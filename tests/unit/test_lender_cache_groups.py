"""A serving cache of several groups of layers: no byte belongs to two tenants, and no step of serving lacks a block."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

from rose.workers.lender.vllm.kv_sharing import ServingMemory
from rose.workers.lender.vllm.shared_cache import layout_of
from tests.unit.test_lender_shared_cache import BLOCKS, LAYERS, SHAPES, Shape, guest_views


class Layers(NamedTuple):
    """The layers of a serving model."""

    full: int
    window: int
    window_heads: int
    """Heads of a layer with a window, by which its pages differ from those of a layer without."""
    window_tokens: int
    block_tokens: int

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        size: dict[str, Any] = {"block_size": self.block_tokens, "head_size": 32, "dtype": torch.float32}
        full = FullAttentionSpec(num_kv_heads=2, **size)
        window = SlidingWindowSpec(num_kv_heads=self.window_heads, sliding_window=self.window_tokens, **size)
        found: dict[str, KVCacheSpec] = {f"full {number}": full for number in range(self.full)}
        return found | {f"window {number}": window for number in range(self.window)}


LAYER_SETS = st.builds(
    Layers,
    full=st.integers(1, 4),
    window=st.integers(1, 6),
    window_heads=st.sampled_from([1, 2, 4]),
    window_tokens=st.sampled_from([8, 32, 50, 200]),
    block_tokens=st.sampled_from([16, 32]),
)


def config_of(specs: dict[str, KVCacheSpec], layout: KVCacheLayout, blocks: int = 5) -> KVCacheConfig:
    """Return the configuration that vLLM makes for these layers."""
    cache: dict[str, Any] = {
        "num_gpu_blocks_override": blocks,
        "prefix_cache_retention_interval": None,
        "block_size": 32,
    }
    cache |= {"enable_prefix_caching": True, "prefix_match_unit": None, "mamba_cache_mode": "none"}
    vllm: Any = SimpleNamespace(
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout, **cache),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=None,
        num_speculative_tokens=0,
    )
    config = get_kv_cache_config_from_groups(vllm, get_kv_cache_groups(vllm, specs), 0)
    config.kv_cache_layout = layout.name
    sizes = resolve_kv_cache_block_sizes(config, vllm)
    config.hash_block_size, config.cache_hit_alignment_tokens = sizes[1], sizes[0]
    return config


def views_of(config: KVCacheConfig, specs: dict[str, KVCacheSpec], memory: torch.Tensor) -> list[torch.Tensor]:
    """Return vLLM's views of the layers of all groups."""
    layout = KVCacheLayout[config.kv_cache_layout or ""]
    spec_of = {name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names}
    views: list[torch.Tensor] = []
    for tensor in config.kv_cache_tensors:
        spec = spec_of[tensor.layers[0]]
        spec = getattr(spec, "kv_cache_specs", {}).get(tensor.layers[0], spec)
        views += create_kv_cache_views(memory, spec, config.num_blocks, layout, tensor)
    return views


@settings(max_examples=80, deadline=None)
@given(LAYER_SETS, st.sampled_from([LAYERS, BLOCKS]), SHAPES)
def test_no_byte_of_a_guest_block_lies_in_another_block_of_any_group(
    layers: Layers, layout: KVCacheLayout, shape: Shape
) -> None:
    specs = layers.specs
    config = config_of(specs, layout)
    memory = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)
    assert layout_of(config) is not None
    guest = guest_views(config, memory, shape._replace(layout=layout))
    hosts = views_of(config, specs, memory)
    assert len(hosts) == len(specs)
    if guest is None:  # the blocks of serving are too small
        return
    for number in range(config.num_blocks):
        for ours, theirs in ((guest, hosts), (hosts, guest)):
            memory.zero_()
            for view in ours:
                view[number].view(torch.int8 if view.element_size() == 1 else torch.int16).fill_(1)
            touched = {block for view in theirs for block in view.flatten(1).any(1).nonzero().flatten().tolist()}
            assert touched == {number}


def test_cache_with_recurrent_states_has_no_view() -> None:
    specs = Layers(full=2, window=2, window_heads=2, window_tokens=32, block_tokens=32).specs
    assert layout_of(config_of(specs, LAYERS)) is not None
    page = specs["full 0"].page_size_bytes
    state = MambaSpec(block_size=32, shapes=((page // 8,),), dtypes=(torch.float32,), page_size_padded=page)
    for states in ({"state": state}, specs | {"state": state}):
        assert layout_of(config_of(states, LAYERS)) is None


MANY_BLOCKS = 1000
"""More blocks than the requests of a test ever hold."""


class StepDriver:
    """Steps of a server that has no free block but those that are foreseen for its next step."""

    def __init__(self, layers: Layers, step_tokens: int) -> None:
        config = config_of(layers.specs, LAYERS, MANY_BLOCKS)
        hashed, aligned = config.hash_block_size, config.cache_hit_alignment_tokens
        assert hashed is not None and aligned is not None
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hashed, sha256)
        self.manager = KVCacheManager(config, 512, aligned, hashed, max_in_flight_tokens=step_tokens)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.step_tokens = step_tokens
        scheduler = SimpleNamespace(
            running=self.running,
            waiting=self.waiting,
            kv_holding_waiting=(),
            max_num_active_reqs=64,
            num_spec_tokens=0,
            _spec_decode_step_blocks=0,
            kv_cache_manager=self.manager,
            kv_cache_config=config,
        )
        core = SimpleNamespace(
            scheduler=scheduler,
            vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)),
            model_executor=None,
        )
        self.memory = ServingMemory(core)
        self.names = 0

    def arrive(self, tokens: int, shared: int) -> None:
        """Add a request whose first `shared` tokens are those of other requests."""
        self.names += 1
        prompt = [place if place < shared else 1000 * self.names + place for place in range(tokens)]
        parameters = SamplingParams(max_tokens=64)
        self.waiting.append(Request(str(self.names), prompt, parameters, None, block_hasher=self.hasher))

    def step(self) -> None:
        """Schedule a step as vLLM does, and compute the step."""
        pool = self.memory.pool
        wanted = self.memory.wanted_blocks
        lent = pool.withhold(max(0, pool.free - wanted))
        left = self.step_tokens
        for request in (*self.running, *self.waiting):
            new = request.num_tokens - request.num_computed_tokens
            found, cached = None, 0
            if request in self.waiting:
                found, cached, _ = self.manager.get_computed_blocks(request)
            new = min(new - cached, left)
            if not new:
                continue
            assert self.manager.allocate_slots(
                request, new, cached, found, full_sequence_must_fit=request in self.waiting
            ), f"a request waits for a block of the guest, with {wanted} foreseen"
            left -= new
            request.num_computed_tokens += cached + new
            if request in self.waiting:
                self.waiting.remove(request)
                self.running.append(request)
        self.manager.new_step_starts()
        pool.release(lent)
        for request in list(self.running):
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(7)
                if request.num_output_tokens == 40:
                    self.end(request)

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request)


@settings(max_examples=60, deadline=None)
@given(
    LAYER_SETS,
    st.sampled_from([32, 100, 512]),
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 150), st.integers(1, 30)), min_size=1, max_size=6),
)
def test_next_step_of_serving_has_the_blocks_of_all_groups(
    layers: Layers, step_tokens: int, arrivals: list[tuple[int, int, int]]
) -> None:
    driver = StepDriver(layers, step_tokens)
    free = driver.memory.pool.free
    for tokens, shared, steps in arrivals:
        driver.arrive(tokens, shared)
        for _ in range(steps):
            driver.step()
    while driver.running or driver.waiting:
        driver.step()
    assert driver.memory.pool.free == free and driver.memory.pool.used == 0


@pytest.mark.parametrize(("window_heads", "hit_blocks"), [(2, 4), (1, 3)])
def test_tokens_found_in_the_prefix_cache_count_in_each_group(window_heads: int, hit_blocks: int) -> None:
    """A block of a layer with a window has twice the tokens if the layer has half the heads."""
    layers = Layers(full=2, window=2, window_heads=window_heads, window_tokens=32, block_tokens=32)
    driver = StepDriver(layers, 512)
    driver.manager.record_prefix_cache_stats(SimpleNamespace(), 64)
    assert driver.memory.take_hit_bytes() == hit_blocks * driver.memory.pool.block_bytes
    assert driver.memory.take_hit_bytes() == 0
