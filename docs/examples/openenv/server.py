"""A server of OpenEnv with the task of guessing a number; it needs `pip install 'openenv>=0.10,<0.11'`.

python docs/examples/openenv/server.py 8000
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

SESSIONS = 256
"""At least `environment.max_live_environments` of all workers."""


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 100, **_: Any) -> Hint:
        self.number = random.Random(seed).randint(1, highest)
        self.turns = 0
        return Hint(hint=f"1 to {highest}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self.turns += 1
        right = action.guess == self.number
        hint = "right" if right else "higher" if action.guess < self.number else "lower"
        return Hint(hint=hint, reward=float(right), done=right or self.turns >= 10)

    @property
    def state(self) -> State:
        return State(step_count=self.turns)


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
