"""The executor as a program."""

from threading import Event

from topics.settings import BusSettings
from workers.executor.config import ExecutorConfig
from workers.weights.config import WeightsConfig


def run_executor(
    settings: BusSettings, config: ExecutorConfig, name: str, stop: Event, *, weights: WeightsConfig | None = None
) -> None:
    """Run turns of the inbox `config.slot` until `stop` is set.

    Raises RoseError: a broken model folder, key file or store, an unreachable broker, a missing topic.
    """
    import workers.executor.vllm.alone  # noqa: F401
    from workers.executor.loop import Executor
    from workers.executor.vllm.engine import Engine
    from workers.executor.vllm.types import EngineConfig
    from workers.weights.anchor_store import store_of
    from workers.weights.receive import WeightReceiver
    from workers.weights.signing import trust_of

    weights = weights or WeightsConfig()
    trust = trust_of(settings, config.model_id, weights)
    store = store_of(weights)
    engine = Engine(
        EngineConfig(
            model_folder=config.model_folder,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_running=config.max_turns,
            kv_cache_bytes=config.kv_cache_bytes,
            step_tokens=config.step_tokens,
        )
    )
    receiver = WeightReceiver(
        settings, trust, shapes=engine.shapes, store=store, engine_dtype=config.dtype, client_id=f"{name}-weights"
    )
    receiver.start()
    try:
        Executor(settings, config, name, engine, receiver).run(stop)
    finally:
        receiver.stop()
        engine.close()
