"""The trainer's entry point."""

import os
import sys
import traceback
from contextlib import suppress
from threading import Event

import structlog

from rose.schemas.errors import UsageError
from rose.topics.settings import BusSettings
from rose.workers.import_path import with_import_paths
from rose.workers.trainer.config import TrainerConfig
from rose.workers.weights.config import WeightsConfig

log = structlog.get_logger("trainer")


def is_launched() -> bool:
    """Whether a launcher, such as torchrun, has started this process as one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def rank_from_environment() -> int:
    """The number of the rank that a launcher has started; 0 without a launcher. Raises UsageError."""
    number = os.environ.get("RANK", "0")
    if not number.isdecimal():
        raise UsageError(f"the environment variable RANK is {number!r}: start the ranks of the trainer with torchrun")
    return int(number)


def run_trainer(
    settings: BusSettings, config: TrainerConfig, stop: Event, *, weights: WeightsConfig | None = None
) -> None:
    """Train until all groups of the run are settled or `stop` is set; the current step is finished first.

    Returns early if `stop` is set before the trainer has recovered its position. A process that a launcher has started
    as another rank than 0 follows rank 0 instead.

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

    from rose.workers.trainer.follower import Leave, follow, pack
    from rose.workers.trainer.loop import Trainer
    from rose.workers.trainer.ranks import RankLost, Ranks
    from rose.workers.trainer.stream import StreamStopped

    sys.path[:] = with_import_paths(config.import_paths)
    disable_progress_bar()
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    ranks, weights = Ranks(config.device), weights or WeightsConfig()
    if is_launched() or config.compute_dtype != "float32":
        ranks.join(launched=is_launched())
    try:
        if ranks.leads:
            with suppress(StreamStopped):
                Trainer(settings, config, weights, stop, ranks).run()
            ranks.send_to_all(pack(Leave()))
        else:
            follow(settings, config, weights, ranks)
    except RuntimeError as error:  # torch raises it on the ranks that a collective call has lost
        if ranks.size == 1:
            raise
        log.error("rank_failed", rank=ranks.rank, reason=traceback.format_exc())
        raise RankLost(f"rank {ranks.rank} of the trainer failed, or lost another rank: see rank_failed") from error
    finally:
        ranks.leave()
