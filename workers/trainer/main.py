"""The trainer as a program."""

from threading import Event

from topics.settings import BusSettings
from workers.trainer.config import TrainerConfig
from workers.weights.config import WeightsConfig


def run_trainer(
    settings: BusSettings, config: TrainerConfig, stop: Event, *, weights: WeightsConfig | None = None
) -> None:
    """Train until all groups of the run are settled, or until `stop` is set; the present step is finished first.

    Raises RoseError: a broken model folder or key file, another run's checkpoint, an unreachable broker, a missing
    topic.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from workers.trainer.loop import Trainer

    disable_progress_bar()
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    Trainer(settings, config, weights or WeightsConfig(), stop).run()
