"""The trainer's entry point."""

import sys
from contextlib import suppress
from threading import Event

from rose.schemas.errors import UsageError
from rose.topics.settings import BusSettings
from rose.workers.import_path import with_import_paths
from rose.workers.trainer.config import TrainerConfig
from rose.workers.weights.config import WeightsConfig


def run_trainer(
    settings: BusSettings, config: TrainerConfig, stop: Event, *, weights: WeightsConfig | None = None
) -> None:
    """Train until all groups of the run are settled or `stop` is set; the current step is finished first.

    Returns early if `stop` is set before the trainer has recovered its position.

    Raises RoseError if the model folder, the algorithm or a key file is broken, the checkpoint is another run's, the
    broker is unreachable or a topic is missing.
    """
    for path in config.import_paths:
        if not path.exists():
            raise UsageError(
                f"trainer.import_paths: {path} is not there (~ is not expanded) to import an algorithm from"
            )
    import torch
    from transformers.utils.logging import disable_progress_bar

    from rose.workers.trainer.loop import Trainer
    from rose.workers.trainer.stream import StreamStopped

    sys.path[:] = with_import_paths(config.import_paths)
    disable_progress_bar()
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with suppress(StreamStopped):
        Trainer(settings, config, weights or WeightsConfig(), stop).run()
