"""One KV memory with two views: serving's blocks, and the guest's blocks in the same bytes.

Keeps true
- Block `b` of the guest lies within block `b` of serving, on every rank. Two blocks of different numbers share no byte,
  whichever view they belong to. Block 0 is vLLM's null block in both views: it holds no token, and the build of a guest
  may write to it.
- The guest's view has no memory of its own: its build, its growth, a cut and its end allocate, copy and free nothing.
- Serving reads no byte of a guest's turn, which may be NaN as a number of serving's type: kernels read whole blocks,
  and weight the entries behind a request's last token with 0. On a CPU a lent block is zeroed when a request of serving
  gets the block, unless a connector fills the block, which must be whole then. On a GPU a block is zeroed when the
  guest gives the block back, and block 0 after a build.
- A guest whose cache cannot be such a view has a cache of its own. So has a guest beside a cache with recurrent states
  (Mamba), whose blocks vLLM does not zero and does not name when they are taken.

Serving's layers may form several groups (layers with a window, layers without). All groups take their blocks from one
pool and lay them over the same bytes, so a block belongs to one group at a time, and a withheld block to none.

A block of serving is a run of `width` bytes in each of `regions` (a region is a layer, or the whole cache where the
layers of a block are neighbours). The guest's layers fill the regions one after the other; if the guest has more layers
than there are regions, several of its layers share a run. A block of the guest has as many tokens as fit in the runs.

Example (serving: 4 layers, blocks of 4 KiB a layer; guest: 6 layers of 64 bytes a token)
    two layers share a run      -> 2 KiB for a block of a layer: 32 tokens
    layers 0 to 3               -> the first half of the runs in regions 0 to 3
    layers 4 and 5              -> the second half of the runs in regions 0 and 1; a quarter of the bytes is unused
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from rose.schemas.errors import RoseError
from rose.workers.executor.vllm.engine_core import InProcessBackend, InProcessExecutor, ModelBackend
from rose.workers.executor.vllm.model_runner import zero_blocks
from rose.workers.executor.vllm.types import EngineStartError, block_bytes

BLOCK_STEP = 32 if current_platform.is_cpu() else 16
"""Tokens of a block are a multiple of this number, for vLLM's kernels."""

MOST_BLOCK_TOKENS = 128
"""Most tokens of a block of the guest: prefixes are found by whole blocks, so large blocks are poor for short turns."""

ALIGNMENT = 64
"""Bytes of which all offsets of blocks and layers are multiples."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where the blocks of serving's cache are, on each rank."""

    size: int
    """Bytes of the allocation."""
    blocks: int
    regions: int
    region_stride: int
    """Bytes from a block's run in one region to its run in the next."""
    width: int
    """Bytes of a block in a region. The next block follows."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of serving."""
        return self.regions * self.width

    def block_tokens(self, specs: Mapping[str, KVCacheSpec], longest_tokens: int) -> int:
        """Return the tokens of the largest block of a guest that lies in a block of serving.

        `specs`: the guest's layers. All must be alike, so that they form one group. `longest_tokens`: tokens of the
        longest turn. Raises NotShared.
        """
        found = list(specs.values())
        spec = found[0] if found else None
        if not isinstance(spec, AttentionSpec) or spec.page_size_padded or any(other != spec for other in found):
            raise NotShared("its layers are of several kinds")
        token_bytes = spec.page_size_bytes // spec.block_size
        least_bytes = token_bytes * BLOCK_STEP * self._layers_per_run(len(found))
        if least_bytes > self.width:
            times = -(-least_bytes // self.width)
            raise NotShared(f"its blocks do not fit: give the server a --block-size {times} times as large, or more")
        fitting = BLOCK_STEP * (self.width // least_bytes)
        return int(min(fitting, MOST_BLOCK_TOKENS, -(-longest_tokens // BLOCK_STEP) * BLOCK_STEP))

    def zero(self, storage: torch.UntypedStorage, numbers: Sequence[int]) -> None:
        """Zero blocks of serving in the allocation, on the current stream."""
        memory = torch.empty(0, dtype=torch.int8, device=storage.device).set_(storage)
        blocks = memory.as_strided((self.regions, self.blocks, self.width), (self.region_stride, self.width, 1))
        blocks.index_fill_(1, torch.tensor(numbers, device=storage.device), 0)

    def view(self, layers: Sequence[str], page_bytes: int) -> list[KVCacheTensor]:
        """Return the places of a guest's layers, whose blocks have `page_bytes` bytes a layer."""
        assert self._layers_per_run(len(layers)) * page_bytes <= self.width
        return [
            KVCacheTensor(
                size=self.size,
                layers=list(layers[first : first + self.regions]),
                layer_stride=self.region_stride,
                block_stride=self.width,
                offset=first // self.regions * page_bytes,
            )
            for first in range(0, len(layers), self.regions)
        ]

    def _layers_per_run(self, layers: int) -> int:
        return -(-layers // self.regions)


class NotShared(RoseError):
    """A guest cannot have a view of serving's cache. The message says why."""


def layout_of(config: KVCacheConfig) -> CacheLayout | None:
    """Return the layout of serving's cache; None if no guest can have a view of the cache."""
    tensors = config.kv_cache_tensors
    layout = KVCacheLayout.__members__.get(config.kv_cache_layout or "")
    if layout is None or not layout.is_block_compact or not tensors or config.has_mamba_layers:
        return None
    size, width, outermost = tensors[0].size, tensors[0].block_stride, layout.is_block_outermost
    stride = size if outermost else width * config.num_blocks
    alike = all(
        tensor.block_stride == width
        and not tensor.host_resident
        and (outermost or (tensor.layer_stride == stride and tensor.offset % stride == 0))
        for tensor in tensors
    )
    found = CacheLayout(size, config.num_blocks, size // stride, stride, width)
    return found if alike and width % ALIGNMENT == 0 and found.block_bytes == block_bytes(config) else None


class CacheView:
    """The guest's cache in one process with a model, beside serving's model runner."""

    def __init__(self, host_runner: Any) -> None:
        self._host = host_runner
        self._shared = self._made = False

    def share(self, config: VllmConfig, block_tokens: int) -> None:
        """Let the guest with this configuration have a view of serving's cache. Call it before the cache is made."""
        config.cache_config.block_size = block_tokens
        self._shared = True
        if current_platform.is_cpu():  # vLLM's function omits layers with a window
            self._host._zero_block_ids = partial(zero_blocks, self._host)

    def allocate(
        self,
        config: KVCacheConfig,
        device: torch.device,
        layout: KVCacheLayout,
        kernel_block_sizes: list[int] | None = None,
    ) -> dict[str, Tensor]:
        """Return the guest's cache by layer: takes the place of vLLM's `allocate_kv_cache` while a guest is built."""
        if not self._shared:
            caches: dict[str, Tensor] = allocate_kv_cache(config, device, layout, kernel_block_sizes)
            return caches
        (group,) = config.kv_cache_groups
        if not layout.is_block_compact or kernel_block_sizes != [group.kv_cache_spec.block_size]:
            raise EngineStartError("the attention of the guest's model does not take whole blocks")
        storage = self._host.kv_caches[0].untyped_storage()
        memory = torch.empty(0, dtype=torch.int8, device=device).set_(storage)
        views: dict[str, Tensor] = {}
        for tensor in config.kv_cache_tensors:
            assert tensor.size <= storage.nbytes()
            found = create_kv_cache_views(memory, group.kv_cache_spec, config.num_blocks, layout, tensor)
            views.update(zip(tensor.layers, found, strict=True))
        self._made = True
        return views

    def check(self) -> None:
        """Raise EngineStartError if the guest's cache was made elsewhere than in serving's. Call it after the build."""
        if self._shared and not self._made:
            raise EngineStartError("vLLM made the guest's KV cache in another way than this process expects")


class SharedCacheExecutor(Executor):  # type: ignore[misc]
    """An executor whose model has a view of serving's cache, if one fits."""

    layout: CacheLayout | None
    """Layout of serving's cache. Set before vLLM's constructor runs."""
    own_cache_reason: str | None = (
        "serving's cache is in another process, has recurrent states, or its blocks are no runs of bytes"
    )
    """Why the guest has a cache of its own; None if it has a view of serving's."""

    def share(self, block_tokens: int) -> None:
        """Have the processes of the model make a view, with blocks of so many tokens."""
        raise NotImplementedError

    def block_bytes(self, config: KVCacheConfig) -> int:
        """Return the bytes of one block on one rank: those of serving's block, if the guest has a view."""
        layout = self.layout if self.own_cache_reason is None else None
        return block_bytes(config) if layout is None else layout.block_bytes

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Return the layers of each rank, with the block size that the view has."""
        specs: list[dict[str, KVCacheSpec]] = super().get_kv_cache_specs()
        if self.layout is None:
            return specs
        try:
            tokens = self.layout.block_tokens(specs[0], self.vllm_config.model_config.max_model_len)
        except NotShared as reason:
            self.own_cache_reason = str(reason)
            return specs
        self.share(tokens)
        self.own_cache_reason = None
        self.vllm_config.cache_config.block_size = tokens
        self.vllm_config.cache_config.num_gpu_blocks_override = self.layout.blocks
        specs = super().get_kv_cache_specs()
        return specs

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Make the cache of each rank."""
        if self.layout is not None and self.own_cache_reason is None:
            for config in kv_cache_configs:
                (group,) = config.kv_cache_groups
                config.kv_cache_tensors = self.layout.view(group.layer_names, group.kv_cache_spec.page_size_bytes)
        super().initialize_from_config(kv_cache_configs)


class SharedCacheBackend(ModelBackend, Protocol):
    """A backend of a guest."""

    executor: SharedCacheExecutor | None
    """vLLM's executor for the guest's model; None before it is made."""


class GuestExecutor(SharedCacheExecutor, InProcessExecutor):
    """The executor of a guest in serving's process."""

    def __init__(self, config: VllmConfig, layout: CacheLayout | None, view: CacheView | None) -> None:
        self.layout = layout
        self._view = view
        super().__init__(config)

    def share(self, block_tokens: int) -> None:
        """Make a view, with blocks of so many tokens."""
        assert self._view is not None
        self._view.share(self.vllm_config, block_tokens)

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Make the cache, and check where it is."""
        super().initialize_from_config(kv_cache_configs)
        if self._view is not None:
            self._view.check()


class GuestBackend(InProcessBackend):
    """Runs the guest's model in serving's process."""

    registers_buffers = False  # serving would wait for the registration of a whole buffer

    def __init__(self, layout: CacheLayout | None, view: CacheView | None) -> None:
        """`layout`: that of serving's cache. `view`: None if serving's cache is in another process."""
        super().__init__()
        self._layout = None if view is None else layout
        self._view = view
        self.executor: SharedCacheExecutor | None = None

    def make_executor(self, config: VllmConfig) -> Executor:
        """Return vLLM's executor for the model. Called once, by the engine."""
        self._executor = self.executor = GuestExecutor(config, self._layout, self._view)
        return self.executor

    def release(self) -> None:
        """Free the model's memory."""
        self.executor = None
        super().release()

    def block_bytes(self, config: KVCacheConfig) -> int:
        """Return the bytes of one block: those of serving's block, if the guest has a view."""
        assert self.executor is not None
        return self.executor.block_bytes(config)
