"""Serving's KV memory as the lender sees it: what is used, what is wanted, what was found in its prefix cache.

Keeps true: serving's own figures and its API are what they would be if nothing were withheld from it.
"""

from itertools import islice
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request

from workers.executor.vllm.place import cache_address
from workers.lender.vllm.pages import Pages, lie_side_by_side
from workers.lender.vllm.pool import Pool


class ServingMemory:
    """Of one engine core."""

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        self._manager = core.scheduler.kv_cache_manager
        config = core.scheduler.kv_cache_config
        within = isinstance(core.model_executor, UniProcExecutor) and lie_side_by_side(config)
        ranks = core.vllm_config.parallel_config.world_size
        block_bytes = ranks * sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
        self.moves = within
        """Whether the cache lies in this process, so that bytes can be lent."""
        pages = Pages(cache_address(core), config) if within else None
        self.pool = Pool(self._manager.block_pool, block_bytes, pages)
        self._found_tokens = 0
        self._wrap()

    def _wrap(self) -> None:
        record, reset = self._manager.record_prefix_cache_stats, self._manager.block_pool.reset_prefix_cache

        def record_found(request: Request, num_hits: int) -> None:
            self._found_tokens += num_hits
            record(request, num_hits)

        def reset_all() -> bool:
            self.pool.withhold(0)  # until the next look: vLLM resets a cache of which nothing is held
            done: bool = reset()
            return done

        self._manager.record_prefix_cache_stats = record_found
        self._manager.block_pool.reset_prefix_cache = reset_all
        self._manager.block_pool.get_usage = lambda: self.pool.used / max(1, self.pool.blocks)

    @property
    def wanted(self) -> int:
        """Blocks that the next step may take at most: of requests that run, and of those that there is a place for."""
        size, running = self._scheduler.block_size, self._scheduler.running
        wanted: int = self._manager.watermark_blocks if self._scheduler.waiting else 0
        for request in running:
            wanted += -(-request.num_tokens // size) - -(-request.num_computed_tokens // size)
        for request in islice(self._scheduler.waiting, self._scheduler.max_num_running_reqs - len(running)):
            wanted += -(-request.num_tokens // size)
        return wanted

    def take_found_bytes(self) -> int:
        """Found in the prefix cache since it was asked last."""
        found, self._found_tokens = self._found_tokens, 0
        return found * self.pool.block_bytes // int(self._scheduler.block_size)
