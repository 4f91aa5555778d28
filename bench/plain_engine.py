"""The plain reference engine: whole trajectories sampled in one process with transformers and a KV cache.

Keeps true
- Tokens, loss mask and logprobs are the same as over the bus: observations in the encoding of the turn format, sampled
  tokens unchanged, logprobs of the distribution from which the tokens were sampled.
- The same model, tasks and generator give the same trajectories.

The warm start measures itself with this engine, and `bench/learning.py --reference` trains with it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rose.workers.environments.protocol import Environment, JsonValue, Step
from rose.workers.environments.turn_format import TurnFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of one trajectory."""

    environment: Callable[[], Environment]
    seed: int
    arguments: Mapping[str, JsonValue]


@dataclass(slots=True, kw_only=True)
class SampledTrajectory:
    """One growing trajectory; the three lists have equal length."""

    environment: Environment
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    last: Step | None = None
    """The newest step; `last.success` is the success at the end."""
    cached: int = 0
    """Number of tokens of `tokens` in the KV cache."""

    def append(self, token: int, *, mask: int, logprob: float) -> None:
        self.tokens.append(token)
        self.loss_mask.append(mask)
        self.logprobs.append(logprob)


def sample_trajectories(
    model: Any,
    turn_format: TurnFormat,
    tasks: Sequence[Task],
    *,
    generator: torch.Generator,
    max_tokens: int,
) -> list[SampledTrajectory]:
    """Play every task to its end at temperature 1, with at most `max_tokens` sampled tokens a turn."""
    model.eval()
    trajectories = [SampledTrajectory(environment=task.environment()) for task in tasks]
    batch = _Batch(model, trajectories)
    with asyncio.Runner() as runner:  # an environment lives in one event loop
        runner.run(_reset(trajectories, tasks, turn_format))
        while batch.rows:
            _sample_turn(batch, turn_format.stop_token_ids, generator=generator, max_tokens=max_tokens)
            runner.run(_step(batch.rows, turn_format))
            batch.keep([row.last is None or not row.last.done for row in batch.rows])
    return trajectories


async def _reset(trajectories: Sequence[SampledTrajectory], tasks: Sequence[Task], turn_format: TurnFormat) -> None:
    for trajectory, task in zip(trajectories, tasks, strict=True):
        observation = await trajectory.environment.reset(task.seed, task.arguments)
        for token in turn_format.first_tokens(observation):
            trajectory.append(token, mask=0, logprob=0.0)


async def _step(rows: Sequence[SampledTrajectory], turn_format: TurnFormat) -> None:
    for row in rows:
        start = len(row.loss_mask)
        while start > 0 and row.loss_mask[start - 1]:
            start -= 1
        action = row.tokens[start:]
        row.last = await row.environment.step(turn_format.action_text(action))
        row.reward += row.last.reward
        row.turns += 1
        if row.last.done:
            await row.environment.close()
        else:
            for token in turn_format.observation_tokens(row.last.observation, first=False, after=action):
                row.append(token, mask=0, logprob=0.0)


def _sample_turn(batch: "_Batch", stops: Sequence[int], *, generator: torch.Generator, max_tokens: int) -> None:
    logits = batch.feed()
    unfinished = torch.ones(len(batch.rows), dtype=torch.bool)
    for drawn in range(1, max_tokens + 1):
        logprobs = torch.log_softmax(logits, dim=-1)
        picked = torch.multinomial(logprobs.exp(), 1, generator=generator)
        values = logprobs.gather(1, picked).squeeze(1).tolist()
        for index, token in enumerate(picked.squeeze(1).tolist()):
            if unfinished[index]:
                batch.rows[index].append(token, mask=1, logprob=values[index])
                unfinished[index] = token not in stops
        if drawn == max_tokens or not unfinished.any():
            return
        logits = batch.feed(unfinished)


class _Batch:
    """Trajectories that share a KV cache with one column for each position; rows without a token in a column are masked
    there.
    """

    def __init__(self, model: Any, rows: list[SampledTrajectory]) -> None:
        from transformers import DynamicCache

        self.rows = rows
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._mask = torch.zeros(len(rows), 0, dtype=torch.long)

    @torch.no_grad()
    def feed(self, rows: Tensor | None = None) -> Tensor:
        """Run the model over the new tokens of these rows (by default all rows); return each row's next logits."""
        fresh = [row.tokens[row.cached :] if rows is None or rows[i] else [] for i, row in enumerate(self.rows)]
        width = max(map(len, fresh))
        tokens = torch.zeros(len(fresh), width, dtype=torch.long)
        mask = torch.zeros(len(fresh), width, dtype=torch.long)
        for i, new in enumerate(fresh):
            # A row's first token is in column 0, so that every position of the row has a token to attend to.
            head = new[:1] if self._mask.shape[1] == 0 else []
            tail = new[len(head) :]
            tokens[i, : len(head)] = torch.tensor(head, dtype=torch.long)
            mask[i, : len(head)] = 1
            if tail:
                tokens[i, width - len(tail) :] = torch.tensor(tail, dtype=torch.long)
                mask[i, width - len(tail) :] = 1
            self.rows[i].cached += len(new)
        seen = self._mask.sum(dim=1, keepdim=True)
        self._mask = torch.cat([self._mask, mask], dim=1)
        positions = (seen + mask.cumsum(dim=1) - 1).clamp(min=0)
        output = self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()  # type: ignore[no-any-return]

    def keep(self, kept: Sequence[bool]) -> None:
        """Drop the other rows from the cache."""
        indices = [i for i, keep in enumerate(kept) if keep]
        if len(indices) < len(self.rows):
            self._cache.batch_select_indices(torch.tensor(indices, dtype=torch.long))
            self._mask = self._mask[indices]
            self.rows = [self.rows[i] for i in indices]
