"""The trainer's entry point."""

import os
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from threading import Event

import structlog

from rose.schemas.errors import UsageError
from rose.topics.settings import BusSettings
from rose.workers.evaluator.config import EvaluationConfig
from rose.workers.import_path import with_import_paths
from rose.workers.trainer.config import TrainerConfig
from rose.workers.weights.config import WeightsConfig

OWN_SETTINGS = ("model_folder", "run_folder", "checkpoint_folder", "begin_from", "import_paths")
"""Settings of the trainer that may differ between ranks: the paths of one host."""

log = structlog.get_logger("trainer")


def is_launched() -> bool:
    """Whether a launcher, such as torchrun, has started this process as one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def rank_from_environment() -> int:
    """The number of the rank that a launcher has started; 0 without a launcher. Raises UsageError."""
    number = os.environ.get("RANK", "0") if is_launched() else "0"
    if not number.isdecimal():
        raise UsageError(f"the environment variable RANK is {number!r}: start the ranks of the trainer with torchrun")
    return int(number)


def run_trainer(
    settings: BusSettings,
    config: TrainerConfig,
    stop: Event,
    *,
    weights: WeightsConfig | None = None,
    evaluation: EvaluationConfig | None = None,
) -> None:
    """Train until all groups of the run are settled or `stop` is set; the current step is finished first.

    `evaluation`: the evaluations that versions wait for, and that may end the run; None: none.

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
        ranks.join(launched=is_launched(), timeout=timedelta(seconds=config.hung_seconds))
    if not ranks.leads:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # rank 0 finishes its step, then ends this rank
    try:
        ranks.require_alike(_shared_settings(config, weights), "settings")
        if ranks.leads:
            with suppress(StreamStopped):
                Trainer(settings, config, weights, stop, ranks, evaluation).run()
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


def _shared_settings(config: TrainerConfig, weights: WeightsConfig) -> bytes:
    """Return the settings that all ranks must have alike, as text."""
    own = {name: value for name, value in asdict(config).items() if name not in OWN_SETTINGS}
    return repr((sorted(own.items()), sorted(asdict(weights).items()))).encode()
