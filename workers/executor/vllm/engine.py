"""The rollout engine: token ids in, token ids and their logprobs out, weights replaced between two steps.

Keeps true
- One thread runs one bounded step at a time. Nothing computes between two steps, so a version swap needs no pause
  protocol.
- The version of a token is the version of the weights that sampled it. A turn continues across a swap, with two spans.
- KV from before a swap is used only by turns that were running then. Turns without KV start with the new weights.
- A turn that cannot run is refused before it takes any resource.
- NaN values of one turn do not affect a later turn that reuses its blocks.

The engine drives vLLM's `EngineCore` instead of `LLM`: it needs no text, and a core can run in the same process as a
serving core.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import SampledTokensBuilder
from rose.schemas.turns import TurnTimes
from rose.workers.executor.vllm.engine_core import InProcessBackend, ModelBackend, start_core
from rose.workers.executor.vllm.model_runner import zero_new_blocks
from rose.workers.executor.vllm.types import (
    EngineBroken,
    EngineConfig,
    EngineLoad,
    EngineRefusal,
    EngineStartError,
    FinishedTurn,
    HeldTurn,
    StepResult,
    SwapRefused,
    first_line,
    turn_error,
)
from rose.workers.model_config import check_context_length
from rose.workers.weights.model_folder import read_folder

WAITING_STATUSES = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""Statuses of requests without KV."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn in the engine."""

    request: Request
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    cached_tokens: int = 0
    sampled: SampledTokensBuilder = field(default_factory=SampledTokensBuilder)


@dataclass(frozen=True, slots=True)
class KvCache:
    """An engine's KV cache, for code that shares its memory with serving."""

    pool: BlockPool
    block_bytes: int
    """Bytes of one block, summed over the ranks."""
    groups: Sequence[tuple[int, int]]
    """Tokens of one block and most blocks of one turn, by group of layers. A token takes room in a block of each group;
    layers with a window keep only the last blocks."""

    def blocks_of(self, tokens: int) -> int:
        """Return the most blocks that a turn of this length holds."""
        return sum(min(-(-tokens // size), most) for size, most in self.groups)


class Engine:
    """One model, its turns, and the policy version that serves.

    A logprob is the log-probability of a token in the distribution that it was sampled from: after temperature and
    top_p, vLLM's `processed_logprobs`. At temperature 1 and top_p 1 it is the model's own log_softmax. Greedy turns
    (temperature 0) get the log_softmax at temperature 1.
    """

    def __init__(self, config: EngineConfig, backend: ModelBackend | None = None) -> None:
        """Build the engine, which takes seconds. `backend`: where the model runs; None is this process.

        The folder's tokenizer is not read, because its load would block a serving engine in the process; `check_folder`
        checks it. Raises FolderError, ConfigRefused or EngineStartError.
        """
        self._folder = config.model_folder
        self.shapes, self.vocabulary = read_folder(config.model_folder)
        check_context_length(config.model_folder, config.max_model_len)
        self.version = config.policy_version
        self.longest_tokens = config.max_model_len
        """Most tokens of a turn, context and output together."""
        self.steps = 0
        """Number of steps that have begun. Between two steps no turn takes or finds a block."""
        self.suspended_seconds = 0.0
        """Total time for which steps were paused. The code that pauses steps adds to it."""
        self._step_tokens = config.step_tokens
        self._backend = backend or InProcessBackend()
        self.devices = self._backend.ranks
        """Number of devices that a step occupies."""
        self._core = start_core(config, self._backend)
        self._scheduler = self._core.scheduler
        zero_new_blocks(self._scheduler)
        self._weights = self._backend.patch_model(self._core, config.model_folder, self.shapes)
        self._swaps = 0
        self._staged: dict[str, torch.Tensor] | None = None
        """The staged version, which can be activated."""
        self._turns: dict[str, _Turn] = {}
        self._unscheduled: deque[_Turn] = deque()
        kv, pool = self._scheduler.kv_cache_config, self._scheduler.kv_cache_manager.block_pool
        specs = [group.kv_cache_spec for group in kv.kv_cache_groups]
        groups = [
            (spec.block_size, spec.max_memory_usage_bytes(self._core.vllm_config) // spec.page_size_bytes)
            for spec in specs
        ]
        self.cache = KvCache(pool, self._backend.block_bytes(kv), groups)
        self.token_bytes = -(-self.cache.blocks_of(self.longest_tokens) * self.cache.block_bytes // self.longest_tokens)
        """Bytes of one token of the longest turn. A shorter turn may take more: its last block, and windows."""
        self._device = current_platform.get_device_name() or current_platform.device_type

    def __len__(self) -> int:
        """Number of turns in the engine, running and waiting."""
        return len(self._turns)

    def add(self, key: str, context: Sequence[int], sampling: Sampling, *, policy_version: int) -> None:
        """Add a turn. The turn ends at a stop token, at `max_tokens`, or at `max_model_len`.

        `policy_version`: the version that the caller expects; must be the serving version. Raises EngineRefusal.
        """
        if policy_version != self.version:
            raise EngineRefusal(f"policy version {self.version} serves, not {policy_version}")
        if key in self._turns:
            raise EngineRefusal(f"turn {key} is already in the engine")
        if error := turn_error(context, sampling, longest_tokens=self.longest_tokens, vocabulary=self.vocabulary):
            raise EngineRefusal(error)
        request = Request(
            request_id=key,
            prompt_token_ids=list(context),
            sampling_params=_parameters(sampling),
            pooling_params=None,
            cache_salt=self._salt,
            block_hasher=self._core.request_block_hasher,
        )
        self._core.add_request(request)
        self._turns[key] = turn = _Turn(request)
        self._unscheduled.append(turn)

    def set_layer_hook(self, hook: Callable[[], None]) -> None:
        """Call `hook` between two layers of each step, if the model is in this process."""
        self._backend.set_layer_hook(self._core, hook)

    def abort(self, key: str) -> FinishedTurn | None:
        """Remove a turn and return it with its sampled tokens; None if the turn is not in the engine."""
        turn = self._turns.pop(key, None)
        if turn is None:
            return None
        self._core.abort_requests([key])
        return self._finish(turn, "abort", time.time())

    @property
    def next_step_tokens(self) -> int:
        """Most tokens of the next step."""
        tokens: int = sum(each.request.num_tokens - each.request.num_computed_tokens for each in self._turns.values())
        return min(tokens, self._step_tokens)

    def step(self, most_tokens: int | None = None) -> StepResult:
        """Run one step of at most `step_tokens` and `most_tokens` tokens, prefill and decode together.

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
        except Exception as error:  # after any error of a kernel the scheduler's state is inconsistent
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
        """Record the new token of a turn. Return the turn if it has ended."""
        turn = self._turns[output.request_id]
        if not turn.first_token_at:
            turn.first_token_at = now
            turn.cached_tokens = output.prefill_stats.num_cached_tokens
        turn.sampled.append(output.new_token_ids, output.new_logprobs.logprobs[:, 0].tolist())
        if output.finish_reason is None:
            return None
        del self._turns[output.request_id]
        return self._finish(turn, str(output.finish_reason), now)

    def _finish(self, turn: _Turn, reason: str, now: float) -> FinishedTurn:
        return FinishedTurn(
            name=turn.request.request_id,
            sampled=turn.sampled.build(self.version),
            finish_reason=reason,
            context_tokens=turn.request.num_prompt_tokens,
            cached_tokens=turn.cached_tokens,
            times=TurnTimes(scheduled_at=turn.scheduled_at, first_token_at=turn.first_token_at, finished_at=now),
        )

    def self_test(self) -> None:
        """Run a short turn, because vLLM raises some errors of a model only when it computes.

        Raises EngineStartError.
        """
        try:
            self.add("proof", [0], Sampling(temperature=0.0, max_tokens=2), policy_version=self.version)
            while self._turns:
                self.step()
        except EngineBroken as broken:
            raise EngineStartError(f"vLLM cannot run {self._folder} here: {first_line(broken)}") from broken

    def swap(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Stage and activate `version`. Return the seconds that both took.

        Raises SwapRefused if the old version continues to serve, EngineBroken if no version does.
        """
        began = time.perf_counter()
        for _ in self.stage(tensors):
            pass
        self.activate(version)
        return time.perf_counter() - began

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Check a version and prepare it while the old version serves, in pieces.

        The engine may step between two pieces.

        `tensors`: all tensors of the model by Hugging Face name, on any device, in the engine's element type or a type
        that it represents exactly. The engine keeps them until another version is activated: do not write to them
        before. An earlier staged version is discarded. Raises SwapRefused.
        """
        self._staged = None
        version = yield from self._weights.check(tensors)
        yield
        yield from self._weights.stage(version)
        self._staged = version

    def allocate_spare(self) -> None:
        """Allocate the memory of a second version now, instead of in the first piece of staging."""
        self._weights.allocate_spare()

    def activate(self, version: int) -> float:
        """Serve the staged version, as `version`, from the next step on. Return the seconds that this took.

        Raises SwapRefused if the old version continues to serve, EngineBroken if no version does.
        """
        if self._staged is None:
            raise SwapRefused("nothing is prepared")
        began = time.perf_counter()
        prepared, self._staged = self._staged, None
        self._weights.activate(prepared)
        for turn in self._turns.values():
            turn.sampled.end_span(self.version)
        self.version = version
        self._swaps += 1
        return time.perf_counter() - began

    def _rehash_waiting(self) -> None:
        """Hash the blocks of waiting requests with the serving weights' salt, because they start with these weights.

        This includes requests that were preempted after a swap: their old blocks may still be cached under old hashes.
        """
        salt = self._salt
        for request in self._scheduler.waiting:
            if request.cache_salt != salt:
                request.cache_salt = salt
                request.block_hashes.clear()
                request.update_block_hashes()

    @property
    def _salt(self) -> str:
        """Cache salt of the serving weights: KV is reused only under the same salt. Each swap makes a new one."""
        return f"{self.version}/{self._swaps}"

    def load(self) -> EngineLoad:
        """Return the load of this moment, from the scheduler."""
        running, waiting = self._scheduler.get_request_counts()
        cache = self.cache
        return EngineLoad(
            device=self._device,
            running=running,
            waiting=waiting,
            tokens=sum(turn.request.num_tokens for turn in self._turns.values()),
            kv_bytes_total=(cache.pool.num_gpu_blocks - 1) * cache.block_bytes,  # vLLM reserves one block
            kv_bytes_free=cache.pool.get_num_free_blocks() * cache.block_bytes,
            kv_bytes_per_token=self.token_bytes,
        )

    def held_turns(self) -> list[HeldTurn]:
        """Return every turn in the engine."""
        return [
            HeldTurn(
                key,
                held_tokens=turn.request.num_computed_tokens,
                most_tokens=min(turn.request.num_prompt_tokens + turn.request.max_tokens, self.longest_tokens),
            )
            for key, turn in self._turns.items()
        ]

    def close(self) -> None:
        """Free the memory. The engine cannot be used afterwards."""
        self._backend.release()
        self._core.structured_output_manager.clear_backend()
        self._scheduler.shutdown()
        del self._core, self._scheduler, self._weights, self.cache
        self._turns.clear()
        self._unscheduled.clear()
        gc.collect()


@lru_cache(maxsize=256)
def _parameters(sampling: Sampling) -> SamplingParams:
    """Return vLLM's sampling parameters. vLLM never changes them, so turns share them. Raises EngineRefusal."""
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
