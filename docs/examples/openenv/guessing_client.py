"""The task of `server.py` as an environment of ROSE."""

import os
from typing import Annotated

from msgspec import Meta

from rose.workers.environments.openenv_adapter import OpenEnv


class Guessing(OpenEnv):
    url = os.environ.get("GUESSING_URL", "ws://127.0.0.1:8000/ws")
    action_field = "guess"
    observation_field = "hint"
    argument_types = {"highest": Annotated[int, Meta(ge=1, le=1000)]}
    turn_limit = 12
