"""The environment worker as a program."""

import functools
import sys
import threading
from collections.abc import Callable

from schemas.prompts import Sampling
from topics.admin import reach
from topics.settings import BusSettings
from workers.environments.config import EnvironmentConfig
from workers.environments.protocol import Environment
from workers.environments.registry import BUILT_IN, UnknownEnvironment, load_environment
from workers.environments.stage import Stage
from workers.environments.trajectory import Rules
from workers.environments.turn_format import TurnFormat
from workers.environments.worker import EnvironmentWorker


def run_environment_worker(settings: BusSettings, config: EnvironmentConfig, name: str, stop: threading.Event) -> None:
    """Run until `stop` is set; being killed at any moment loses nothing.

    `name` is the worker's own for ever: one that starts again under it goes on where it was.
    Raises UsageError for a broken model folder or environment, BrokerUnreachable, TopicMissing, BusError, and
    WorkerFenced when another worker takes the name.
    """
    turn_format = TurnFormat(config.model_folder)
    load = _allowed(config)
    reach(settings)
    sampling = Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_turn_tokens,
        stop_token_ids=turn_format.stop_token_ids,
    )
    stage = Stage(
        turn_format,
        lambda environment: load(environment)(),
        max_live=config.max_live_environments,
        timeout_seconds=config.step_timeout_seconds,
    )
    try:
        worker = EnvironmentWorker(
            settings,
            name,
            rules=Rules(
                model_id=config.model_id,
                sampling=sampling,
                turn_patience_seconds=config.turn_patience_seconds,
                max_context_tokens=config.max_context_tokens,
            ),
            window_groups=config.window_groups,
            stage=stage,
            check_environment=load,
        )
        worker.run(stop)
    finally:
        stage.close()


def _allowed(config: EnvironmentConfig) -> Callable[[str], Callable[[], Environment]]:
    """What makes an environment of a name; only built-in names and those of the config.

    A prompt comes from the bus, and importing what it names would run code that its sender chose.
    """
    sys.path[:0] = [str(path.resolve()) for path in config.import_paths if str(path.resolve()) not in sys.path]
    own = {name: load_environment(name) for name in config.environments}

    @functools.cache
    def load(name: str) -> Callable[[], Environment]:
        if name in own:
            return own[name]
        if name in BUILT_IN:
            return load_environment(name)
        known = ", ".join([*BUILT_IN, *own])
        raise UnknownEnvironment(
            f"unknown environment {name!r}: this worker runs {known}; name your own in environment.environments"
        )

    return load
