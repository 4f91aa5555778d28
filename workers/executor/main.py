"""The executor as a program."""

from threading import Event

from topics.settings import BusSettings
from workers.executor.config import ExecutorConfig
from workers.executor.engine_process import EngineProcess
from workers.weights.config import WeightsConfig


def run_executor(
    settings: BusSettings,
    config: ExecutorConfig,
    name: str,
    engine: EngineProcess,
    stop: Event,
    *,
    weights: WeightsConfig | None = None,
) -> None:
    """Run turns of the inbox `config.slot` on the engine until `stop` is set.

    Raises RoseError: a model folder or setting that no engine can be made from, an engine that broke, a broken key file
    or store, an unreachable broker, a missing topic.
    """
    from workers.executor.loop import Executor
    from workers.weights.anchor_store import store_of
    from workers.weights.receive import WeightReceiver
    from workers.weights.signing import trust_of

    weights = weights or WeightsConfig()
    trust = trust_of(settings, config.model_id, weights)
    store = store_of(weights)
    receiver = WeightReceiver(
        settings, trust, shapes=engine.shapes, store=store, engine_dtype=config.dtype, client_id=f"{name}-weights"
    )
    receiver.start()
    try:
        tick = engine.link.first_tick(stop)
        if tick is not None:
            Executor(settings, config, name, engine.link, tick, receiver).run(stop)
    finally:
        receiver.stop()
