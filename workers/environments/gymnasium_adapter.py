r"""Gymnasium environments with discrete actions as text, shown with FrozenLake.

Keeps true
- An action is one word of the environment's `words`; after another action the observation is MALFORMED, and the turn
  counts.
- A snapshot is the seed, the arguments and the actions so far; restoring plays them again. That is exact for every
  environment that depends on nothing but its seed, slippery ones too, and costs one pass through the actions.
- A task ends after `turn_limit` turns, whether or not the environment ends it.

Example: a 3x3 lake; the player is P, holes are H, the goal is G
    observation `PFF\nHFF\nFFG`
    action `right`   observation `SPF\nHFF\nFFG`
    action `jump`    observation `?`
    action `down`    observation `SFF\nHPF\nFFG`
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rose.schemas.errors import UsageError
from rose.workers.environments.protocol import EnvironmentArgumentError, JsonValue, LifeCycleError, SnapshotError, Step

MALFORMED = "?"
"""Observation after an action that is not in `words`."""

MOST_TURNS = 4096
"""Bounds the actions that a snapshot may ask to play again."""


class Played(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything a snapshot holds."""

    seed: int
    arguments: dict[str, Any]
    actions: Annotated[list[Annotated[str, msgspec.Meta(max_length=64)] | None], msgspec.Meta(max_length=MOST_TURNS)]
    """A word for every turn; None where the action was malformed."""


class GymnasiumText(ABC):
    """A Gymnasium environment whose actions are words. Subclasses say which one it is and how it reads."""

    words: Mapping[str, int]
    """The actions a policy may write."""
    turn_limit: int
    """Set by `make`, at most MOST_TURNS."""

    def __init__(self) -> None:
        self._env: Any = None
        self._played: Played | None = None
        self._observation: Any = None
        self._done = False

    @abstractmethod
    def make(self, seed: int, arguments: Mapping[str, JsonValue]) -> Any:
        """Make the `gymnasium.Env` of this task. Raises EnvironmentArgumentError."""

    def describe(self, env: Any, observation: Any) -> str:
        """Return the text of an observation, which the policy reads."""
        return str(observation)

    def solved(self, reward: float) -> bool:
        """Whether the last reward of an episode means success."""
        return reward > 0

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        """Make the environment and seed it."""
        await self.close()
        self._env = self.make(seed, arguments)
        self._played = Played(seed=seed, arguments=dict(arguments), actions=[])
        self._observation, _ = self._env.reset(seed=seed)
        return self.describe(self._env, self._observation)

    async def step(self, action: str) -> Step:
        """Take one word."""
        played = self._played
        if played is None or self._done:
            raise LifeCycleError("step() needs a running task: call reset() or restore() first")
        word = action.strip()
        known = word in self.words
        played.actions.append(word if known else None)
        reward, ended = self._act(word) if known else (0.0, False)
        self._done = ended or len(played.actions) >= self.turn_limit
        return Step(
            observation=self.describe(self._env, self._observation) if known else MALFORMED,
            reward=reward,
            done=self._done,
            success=ended and self.solved(reward),
            info={"turns": len(played.actions), "malformed": played.actions.count(None)},
        )

    async def snapshot(self) -> bytes:
        """Seed, arguments and actions as JSON."""
        if self._played is None:
            raise LifeCycleError("snapshot() needs a running task: call reset() or restore() first")
        return msgspec.json.encode(self._played)

    async def restore(self, state: bytes) -> None:
        """Begin the same task and play the same actions."""
        try:
            played = msgspec.json.decode(state, type=Played)
            await self.reset(played.seed, played.arguments)
            for word in played.actions:
                await self.step(MALFORMED if word is None else word)
        except (msgspec.DecodeError, EnvironmentArgumentError, LifeCycleError) as error:
            await self.close()
            raise SnapshotError(f"not a snapshot of {type(self).__name__}: {error}") from None

    async def close(self) -> None:
        """Close the Gymnasium environment."""
        if self._env is not None:
            self._env.close()
        self._env, self._played, self._done = None, None, False

    def _act(self, word: str) -> tuple[float, bool]:
        self._observation, reward, terminated, truncated, _ = self._env.step(self.words[word])
        return float(reward), bool(terminated or truncated)


class LakeArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lake's shape."""

    size: Annotated[int, msgspec.Meta(ge=2, le=16)] = 4
    frozen_share: Annotated[float, msgspec.Meta(ge=0.5, le=1.0)] = 0.8
    """Chance of a cell to be ice; the rest are holes."""
    slippery: bool = False


class FrozenLake(GymnasiumText):
    """Walk over a random lake that can be crossed, without falling into a hole."""

    words = {"left": 0, "down": 1, "right": 2, "up": 3}

    def make(self, seed: int, arguments: Mapping[str, JsonValue]) -> Any:
        """A solvable map from the seed."""
        try:
            shape = msgspec.convert(dict(arguments), LakeArguments)
        except msgspec.ValidationError as error:
            raise EnvironmentArgumentError(f"environment 'frozenlake' does not take these arguments: {error}") from None
        try:
            import gymnasium
            from gymnasium.envs.toy_text.frozen_lake import generate_random_map
        except ImportError:
            raise UsageError("environment 'frozenlake' needs Gymnasium: install rose-rollouts[gymnasium]") from None
        self._rows = generate_random_map(size=shape.size, p=shape.frozen_share, seed=seed)
        self.turn_limit = 4 * shape.size
        return gymnasium.make(
            "FrozenLake-v1", desc=self._rows, is_slippery=shape.slippery, max_episode_steps=self.turn_limit
        )

    def describe(self, env: Any, observation: Any) -> str:
        """The map with the player on it."""
        row, column = divmod(int(observation), len(self._rows))
        return "\n".join(
            line[:column] + "P" + line[column + 1 :] if number == row else line
            for number, line in enumerate(self._rows)
        )
