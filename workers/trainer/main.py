"""The trainer's entry point."""

from contextlib import suppress
from threading import Event

from rose.topics.settings import BusSettings
from rose.workers.trainer.config import TrainerConfig
from rose.workers.weights.config import WeightsConfig


def run_trainer(
    settings: BusSettings, config: TrainerConfig, stop: Event, *, weights: WeightsConfig | None = None
) -> None:
    """Train until all groups of the run are settled or `stop` is set; the current step is finished first.

    Returns early if `stop` is set before the trainer has recovered its position.

    Raises RoseError if the model folder or a key file is broken, the checkpoint is another run's, the broker is
    unreachable or a topic is missing.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from rose.workers.trainer.loop import Trainer
    from rose.workers.trainer.stream import StreamStopped

    disable_progress_bar()
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with suppress(StreamStopped):
        Trainer(settings, config, weights or WeightsConfig(), stop).run()
