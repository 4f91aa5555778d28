"""The trainer as a program."""

from contextlib import suppress
from threading import Event

from rose.topics.settings import BusSettings
from rose.workers.trainer.config import TrainerConfig
from rose.workers.weights.config import WeightsConfig


def run_trainer(
    settings: BusSettings, config: TrainerConfig, stop: Event, *, weights: WeightsConfig | None = None
) -> None:
    """Train until all groups of the run are settled, or until `stop` is set; the present step is finished first.

    Where it is asked to stop before there is one, it ends without.

    Raises RoseError: a broken model folder or key file, another run's checkpoint, an unreachable broker, a missing
    topic.
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
