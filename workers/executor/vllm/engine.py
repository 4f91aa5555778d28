"""The rollout engine: token ids in, token ids and their logprobs out, weights replaced between two steps.

Keeps true
- One thread, one bounded step at a time: between two steps nothing computes, so a swap needs no pause protocol.
- A token's version is that of the weights that sampled it; a turn that a swap overtakes goes on, with two spans.
- KV computed before a swap serves only turns that were running then: whoever holds none begins under the new weights.
- A turn that cannot run is refused before anything is taken for it.
- What a turn computed that is no number spoils no turn that takes its blocks after it.

It drives vLLM's `EngineCore` and not `LLM`: nothing here needs text, and a core can also live beside another one in a
serving process.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from rose.schemas.prompts import Sampling
from rose.schemas.turns import VersionSpan
from rose.workers.executor.vllm.backend import InProcessBackend, ModelBackend
from rose.workers.executor.vllm.cpu_runner import zero_new_blocks
from rose.workers.executor.vllm.folder import read_folder
from rose.workers.executor.vllm.start import start_core
from rose.workers.executor.vllm.types import (
    EngineBroken,
    EngineConfig,
    EngineLoad,
    EngineRefusal,
    EngineStartError,
    FinishedTurn,
    HeldTurn,
    ModelFolderError,
    StepResult,
    SwapRefused,
    first_line,
)
from rose.workers.model_config import check_context_length

__all__ = [
    "Engine",
    "EngineBroken",
    "EngineConfig",
    "EngineLoad",
    "EngineRefusal",
    "EngineStartError",
    "FinishedTurn",
    "HeldTurn",
    "ModelFolderError",
    "StepResult",
    "SwapRefused",
]

LEAST_TEMPERATURE = 0.01
"""vLLM raises anything lower, but not 0, to this in silence."""

WAITING_STATUSES = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""Holds no KV."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn in the engine."""

    request: Request
    added_at: float
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def close_span(self, version: int) -> None:
        """Everything sampled since the last span was sampled by `version`."""
        start = self.spans[-1].end if self.spans else 0
        if len(self.logprobs) > start:
            self.spans.append(VersionSpan(start, len(self.logprobs), version))


@dataclass(frozen=True, slots=True)
class KvCache:
    """An engine's KV cache, for who shares its memory out."""

    config: KVCacheConfig
    pool: BlockPool
    block_bytes: int
    """Of all ranks."""
    block_tokens: int
    address: int | None
    """Its address; None where it is not in this process."""


class Engine:
    """One model, the turns in it, and the policy version that it serves.

    A logprob is that of the distribution from which its token was drawn: after temperature and top_p, vLLM's
    `processed_logprobs`. At temperature 1 and top_p 1 it is the model's own log_softmax. Greedy turns (temperature 0)
    get the log_softmax at temperature 1.
    """

    def __init__(self, config: EngineConfig, backend: ModelBackend | None = None) -> None:
        """Takes seconds. `backend` is this process unless given. The folder's tokenizer is of no use to it, and is left
        unread: `check_folder` is for whoever has no users to wait for it. Raises ModelFolderError, ConfigRefused or
        EngineStartError.
        """
        self._folder = config.model_folder
        self.shapes, self.vocabulary = read_folder(config.model_folder)
        check_context_length(config.model_folder, config.max_model_len)
        self.version = config.policy_version
        self.longest_tokens = config.max_model_len
        """Of a turn, context and output together."""
        self.steps = 0
        """That it has begun: between two of them no turn takes or finds a block."""
        self.suspended_seconds = 0.0
        """That its steps stood still, for somebody else to have the thread. Whoever has it then counts."""
        self._step_tokens = config.step_tokens
        self._backend = backend or InProcessBackend()
        self.devices = self._backend.ranks
        """That a step takes the time of."""
        self._core = start_core(config, self._backend)
        self._scheduler = self._core.scheduler
        zero_new_blocks(self._scheduler)
        self._weights = self._backend.patch_model(self._core, config.model_folder, self.shapes)
        self._swaps = 0
        self._staged: dict[str, torch.Tensor] | None = None
        """A version that can be served at once."""
        self._turns: dict[str, _Turn] = {}
        self._unscheduled: deque[_Turn] = deque()
        kv, pool = self._scheduler.kv_cache_config, self._scheduler.kv_cache_manager.block_pool
        block_bytes = self._backend.ranks * sum(tensor.size for tensor in kv.kv_cache_tensors) // kv.num_blocks
        begins = self._backend.cache_address(self._core)
        self.cache = KvCache(kv, pool, block_bytes, self._scheduler.block_size, begins)
        self._device = current_platform.get_device_name() or current_platform.device_type

    def __len__(self) -> int:
        """Turns held, running and waiting."""
        return len(self._turns)

    def add(self, key: str, context: Sequence[int], sampling: Sampling, *, policy_version: int) -> None:
        """Take a turn on. It ends at a stop token, at `max_tokens`, or when `max_model_len` is full.

        `policy_version` is the version that the caller means; it must be the one that serves. Raises EngineRefusal.
        """
        if policy_version != self.version:
            raise EngineRefusal(f"policy version {self.version} serves, not {policy_version}")
        if key in self._turns:
            raise EngineRefusal(f"turn {key} is already in the engine")
        if not 0 < len(context) < self.longest_tokens:
            raise EngineRefusal(f"a context of {len(context)} tokens: 1 to {self.longest_tokens - 1} can be run")
        for token in (min(context), max(context), *sampling.stop_token_ids):
            if not 0 <= token < self.vocabulary:
                raise EngineRefusal(f"token id {token} is outside the vocabulary of {self.vocabulary}")
        request = Request(
            request_id=key,
            prompt_token_ids=list(context),
            sampling_params=_parameters(sampling),
            pooling_params=None,
            cache_salt=self._salt,
            block_hasher=self._core.request_block_hasher,
        )
        self._core.add_request(request)
        self._turns[key] = turn = _Turn(request, added_at=time.time())
        self._unscheduled.append(turn)

    def set_layer_hook(self, hook: Callable[[], None]) -> None:
        """Have this called between two layers of its steps, as far as they are in this process."""
        self._backend.set_layer_hook(self._core, hook)

    def abort(self, key: str) -> FinishedTurn | None:
        """Take a turn out, with what it has sampled; None if it is not in the engine."""
        turn = self._turns.pop(key, None)
        if turn is None:
            return None
        self._core.abort_requests([key])
        return self._finish(turn, "abort", time.time())

    @property
    def next_step_tokens(self) -> int:
        """Tokens of the step that would be next."""
        tokens: int = sum(each.request.num_tokens - each.request.num_computed_tokens for each in self._turns.values())
        return min(tokens, self._step_tokens)

    def step(self, most_tokens: int | None = None) -> StepResult:
        """One bounded step: at most `step_tokens` tokens, prefill and decode together, and at most `most_tokens`.

        Raises EngineBroken.
        """
        if not self._scheduler.has_requests():
            return StepResult([], 0, 0.0)
        self._scheduler.max_num_scheduled_tokens = min(self._step_tokens, most_tokens or self._step_tokens)
        began_at, began, aside = time.time(), time.perf_counter(), self.suspended_seconds
        self._rehash_waiting()
        self.steps += 1
        try:
            outputs, _ = self._core.step_fn()
        except Exception as error:  # whatever a kernel raises, the scheduler has lost track of its turns
            raise EngineBroken(f"a step failed: {first_line(error)}") from error
        seconds = time.perf_counter() - began
        now = began_at + seconds
        seconds -= self.suspended_seconds - aside
        while self._unscheduled and self._unscheduled[0].request.status not in WAITING_STATUSES:
            self._unscheduled.popleft().scheduled_at = began_at
        finished = [
            turn for batch in outputs.values() for output in batch.outputs if (turn := self._on_output(output, now))
        ]
        return StepResult(finished, self._scheduler.scheduled_tokens, seconds)

    def _on_output(self, output: EngineCoreOutput, now: float) -> FinishedTurn | None:
        """Note the token of one turn; the turn itself if it has ended."""
        turn = self._turns[output.request_id]
        if not turn.first_token_at:
            turn.first_token_at = now
            turn.cached_tokens = output.prefill_stats.num_cached_tokens
        turn.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        if output.finish_reason is None:
            return None
        del self._turns[output.request_id]
        return self._finish(turn, str(output.finish_reason), now)

    def _finish(self, turn: _Turn, reason: str, now: float) -> FinishedTurn:
        turn.close_span(self.version)
        return FinishedTurn(
            key=turn.request.request_id,
            tokens=list(turn.request.output_token_ids),
            logprobs=np.array(turn.logprobs, dtype=np.float32),
            finish_reason=reason,
            spans=tuple(turn.spans),
            context_tokens=turn.request.num_prompt_tokens,
            cached_tokens=turn.cached_tokens,
            added_at=turn.added_at,
            scheduled_at=turn.scheduled_at,
            first_token_at=turn.first_token_at,
            finished_at=now,
        )

    def self_test(self) -> None:
        """Run a turn, for whoever has nobody waiting: what vLLM cannot compute it raises only when it computes it.

        Raises EngineStartError.
        """
        try:
            self.add("proof", [0], Sampling(temperature=0.0, max_tokens=2), policy_version=self.version)
            while self._turns:
                self.step()
        except EngineBroken as broken:
            raise EngineStartError(f"vLLM cannot run {self._folder} here: {first_line(broken)}") from broken

    def swap(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Prepare `version` and serve it from the next step on; returns the seconds that both took.

        Raises SwapRefused when the old version serves on, EngineBroken when none does.
        """
        began = time.perf_counter()
        for _ in self.stage(tensors):
            pass
        self.activate(version)
        return time.perf_counter() - began

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Check a version, and do what can be done while the old one serves: in pieces (`write_version`), between
        which the engine may step.

        `tensors` are all tensors of the model by Hugging Face name, on any device, in the engine's element type or one
        that it holds exactly. They are kept: do not write to them afterwards. What was prepared before and is not
        served is lost. Raises SwapRefused.
        """
        self._staged = None
        version = yield from self._weights.check(tensors)
        yield
        yield from self._weights.stage(version)
        self._staged = version

    def allocate_spare(self) -> None:
        """Take the memory for a second version now, not in the first piece of the first one."""
        self._weights.allocate_spare()

    def activate(self, version: int) -> float:
        """Serve what was prepared last, as `version`, from the next step on; returns the seconds that this took.

        Raises SwapRefused when the old version serves on, EngineBroken when none does.
        """
        if self._staged is None:
            raise SwapRefused("nothing is prepared")
        began = time.perf_counter()
        prepared, self._staged = self._staged, None
        self._weights.activate(prepared)
        for turn in self._turns.values():
            turn.close_span(self.version)
        self.version = version
        self._swaps += 1
        return time.perf_counter() - began

    def _rehash_waiting(self) -> None:
        """Who holds no KV begins under the weights that serve: also one that a swap overtook and that was preempted
        only then, whose old blocks may still be found by their old names.
        """
        salt = self._salt
        for request in self._scheduler.waiting:
            if request.cache_salt != salt:
                request.cache_salt = salt
                request.block_hashes.clear()
                request.update_block_hashes()

    @property
    def _salt(self) -> str:
        """Names the weights, whose KV is found again under no other; the count tells two of one version apart."""
        return f"{self.version}/{self._swaps}"

    def load(self) -> EngineLoad:
        """Figures of this moment, from the scheduler itself."""
        running, waiting = self._scheduler.get_request_counts()
        cache = self.cache
        return EngineLoad(
            device=self._device,
            running=running,
            waiting=waiting,
            tokens=sum(turn.request.num_tokens for turn in self._turns.values()),
            kv_bytes_total=(cache.config.num_blocks - 1) * cache.block_bytes,  # vLLM keeps one for itself
            kv_bytes_free=cache.pool.get_num_free_blocks() * cache.block_bytes,
            kv_bytes_per_token=cache.block_bytes // cache.block_tokens,
        )

    def held_turns(self) -> list[HeldTurn]:
        """Every turn held."""
        return [
            HeldTurn(
                key,
                held_tokens=turn.request.num_computed_tokens,
                most_tokens=min(turn.request.num_prompt_tokens + turn.request.max_tokens, self.longest_tokens),
            )
            for key, turn in self._turns.items()
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._backend.release()
        self._core.structured_output_manager.clear_backend()
        self._scheduler.shutdown()
        del self._core, self._scheduler, self._weights, self.cache
        self._turns.clear()
        self._unscheduled.clear()
        gc.collect()


@lru_cache(maxsize=256)
def _parameters(sampling: Sampling) -> SamplingParams:
    """vLLM's parameters; it never writes to them, so turns share them. Raises EngineRefusal."""
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise EngineRefusal(f"temperature {sampling.temperature} is neither 0 nor at least {LEAST_TEMPERATURE}")
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=sampling.seed,
            logprobs=0,
            detokenize=False,
        )
    except VLLMValidationError as error:
        raise EngineRefusal(str(error)) from None
