"""Building a guest: its engine, and the pool of its KV memory.

Keeps true: a build that fails holds nothing, on no rank.
"""

from logging import Logger
from pathlib import Path

from workers.executor.vllm.engine import Engine, EngineConfig
from workers.executor.vllm.place import Here, Place
from workers.lender.config import LendConfig
from workers.lender.vllm.pool import Pool
from workers.lender.vllm.ranks import OnRanks, Ranks
from workers.lender.vllm.sharing import guest_pool


def build(config: LendConfig, ranks: Ranks | None, log: Logger) -> tuple[Engine, Pool]:
    """On the ranks of a serving that has several. Takes seconds. Raises ModelFolderError or EngineStartError."""
    place: Place = Here() if ranks is None else OnRanks(ranks, log)
    try:
        engine = engine_of(config, place)
        return engine, guest_pool(engine)
    except Exception:
        place.release()
        raise


def engine_of(config: LendConfig, place: Place | None = None) -> Engine:
    """Takes seconds. Raises ModelFolderError or EngineStartError."""
    engine = Engine(
        EngineConfig(
            model_folder=Path(config.model_folder),
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_running=config.max_turns,
            kv_cache_bytes=config.kv_cache_bytes,
            step_tokens=config.step_tokens,
        ),
        place,
    )
    engine.hold_spare()
    return engine
