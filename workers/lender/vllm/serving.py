"""The serving engine's requests, memory and step times, read from its scheduler between steps.

Keeps true
- Serving's scheduling is not changed: `schedule` is called unchanged, and its result is kept.
- Each serving step takes longer by one access to each request in its batch.

Times are seconds of time.monotonic(). vLLM gives a request's arrival by the wall clock of the same host; an arrival is
never later than now, even if the wall clock was set.

A request that serving has preempted computes its tokens again, and its steps cost as much as those of a prompt.
"""

import time
from itertools import islice
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request

from rose.workers.executor.vllm.engine_core import kv_cache_address
from rose.workers.lender.admission import Admission, ServingState
from rose.workers.lender.vllm.kv_pool import CachePages, KvPool, blocks_are_contiguous


class ServingMemory:
    """The KV memory of one serving engine core."""

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        self._manager = core.scheduler.kv_cache_manager
        config = core.scheduler.kv_cache_config
        within = isinstance(core.model_executor, UniProcExecutor) and blocks_are_contiguous(config)
        ranks = core.vllm_config.parallel_config.world_size
        block_bytes = ranks * sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
        self.transferable = within
        """Whether the cache is in this process, so that its bytes can be lent."""
        pages = CachePages(kv_cache_address(core), config) if within else None
        self.pool = KvPool(self._manager.block_pool, block_bytes, pages)
        self._hit_tokens = 0
        self._wrap()

    def _wrap(self) -> None:
        record, reset = self._manager.record_prefix_cache_stats, self._manager.block_pool.reset_prefix_cache

        def record_found(request: Request, num_hits: int) -> None:
            self._hit_tokens += num_hits
            record(request, num_hits)

        def reset_all() -> bool:
            self.pool.withhold(0)  # until the next decision: vLLM resets a cache only if no block is held
            done: bool = reset()
            return done

        self._manager.record_prefix_cache_stats = record_found
        self._manager.block_pool.reset_prefix_cache = reset_all
        self._manager.block_pool.get_usage = lambda: self.pool.used / max(1, self.pool.blocks)

    @property
    def wanted_blocks(self) -> int:
        """Most blocks that the next step may take, for running requests and for waiting requests that can start."""
        size, running = self._scheduler.block_size, self._scheduler.running
        wanted: int = self._manager.watermark_blocks if self._scheduler.waiting else 0
        for request in running:
            wanted += -(-request.num_tokens // size) - -(-request.num_computed_tokens // size)
        for request in islice(self._scheduler.waiting, self._scheduler.max_num_running_reqs - len(running)):
            wanted += -(-request.num_tokens // size)
        return wanted

    def take_hit_bytes(self) -> int:
        """Return the bytes that serving found in its prefix cache since the last call."""
        found, self._hit_tokens = self._hit_tokens, 0
        return found * self.pool.block_bytes // int(self._scheduler.block_size)


class ServingView:
    """Serving's side of admission: reports every serving step to admission, and reads the requests of serving."""

    def __init__(self, core: Any, admission: Admission) -> None:
        """`core`: an EngineCoreProc whose steps are synchronous."""
        self._scheduler = core.scheduler
        self._unread = core.input_queue.queue
        """The queue's own deque, which can be read without a lock."""
        self._admission = admission
        self._scheduled: Any = None
        """vLLM's SchedulerOutput of the current step."""
        self._last: dict[str, float] = {}
        """Time of the latest token, by request with at least one token."""
        schedule = core.scheduler.schedule

        def noted(*arguments: Any) -> Any:
            self._scheduled = schedule(*arguments)
            return self._scheduled

        core.scheduler.schedule = noted

    def on_step(self, began: float, ended: float) -> None:
        """Report a serving step to admission. Does nothing if the step computed no tokens. Times are monotonic."""
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is not None and scheduled.total_num_scheduled_tokens:
            self._served(scheduled, began, ended)
        elif self._last and not self._scheduler.has_requests():
            self._last.clear()

    @property
    def has_unread(self) -> bool:
        """Whether serving's input queue holds an unread message."""
        return bool(self._unread)

    def state(self) -> ServingState:
        """Return the requests that serving holds now."""
        running, waiting = self._scheduler.running, self._scheduler.get_request_counts()[1]
        first = [request for request in running if request.request_id not in self._last]
        if waiting:
            first += self._scheduler.waiting
        now = time.monotonic()
        behind = time.time() - now
        return ServingState(
            prefills=[(min(now, request.arrival_time - behind), _prompt_tokens_left(request)) for request in first],
            last_tokens=[at for request in running if (at := self._last.get(request.request_id)) is not None],
            waiting=waiting,
            queued=self.has_unread,
        )

    def _served(self, scheduled: Any, began: float, ended: float) -> None:
        for request in scheduled.scheduled_new_reqs:
            self._admission.on_arrival(len(request.prompt_token_ids) - request.num_computed_tokens, began)
        counts = scheduled.num_scheduled_tokens
        decoding = sum(count == 1 and name in self._last for name, count in counts.items())
        self._admission.on_serving_step(
            prompt_tokens=scheduled.total_num_scheduled_tokens - decoding,
            decoding=decoding,
            held=len(counts) + self._scheduler.get_request_counts()[1],
            seconds=ended - began,
        )
        for name in counts:
            request = self._scheduler.requests.get(name)
            if request is None:
                self._last.pop(name, None)
            elif request.num_output_tokens:
                self._last[name] = ended
        if len(self._last) > len(self._scheduler.requests):  # some were aborted
            self._last = {name: at for name, at in self._last.items() if name in self._scheduler.requests}


def _prompt_tokens_left(request: Any) -> int:
    left: int = request.num_tokens - request.num_computed_tokens
    return max(0, left)
