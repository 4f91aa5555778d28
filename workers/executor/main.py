"""The executor as a program."""

from collections.abc import Mapping, Sequence
from threading import Event

from schemas.slack import WorkerClass
from topics.health import HEALTH, START_SECONDS
from topics.settings import BusSettings
from workers.executor.config import ExecutorConfig
from workers.executor.lease import Lease
from workers.executor.link import EngineLink
from workers.weights.config import WeightsConfig


def run_executor(
    settings: BusSettings,
    config: ExecutorConfig,
    link: EngineLink,
    shapes: Mapping[str, Sequence[int]],
    stop: Event,
    worker_class: WorkerClass = WorkerClass.DEDICATED,
    *,
    weights: WeightsConfig | None = None,
    lease: Lease | None = None,
) -> None:
    """Run turns for `config.worker` on the engine at the link until `stop` is set.

    `lease`: of a lender; any other executor follows drains alone.
    `shapes`: of the tensors of its model. Raises RoseError: a setting that no engine can be made from, an engine that
    broke or is gone, a broken key file or store, an unreachable broker, a missing topic, another of the same name.
    """
    from workers.executor.gate import Gate
    from workers.executor.grants import Grants
    from workers.executor.loop import Executor
    from workers.weights.anchor_store import store_of
    from workers.weights.receive import WeightReceiver
    from workers.weights.signing import trust_of

    name, weights = config.worker, weights or WeightsConfig()
    trust = trust_of(settings, config.model_id, weights)
    store = store_of(weights)
    receiver = WeightReceiver(
        settings, trust, shapes=shapes, store=store, engine_dtype=config.dtype, client_id=f"{name}-weights"
    )
    receiver.start()
    lease = lease or Lease()
    grants = Grants(settings, name, lease)
    try:
        grants.known(stop)
        HEALTH.says("waits for its engine, which loads", ready=False, lasts_seconds=START_SECONDS)
        tick = link.first_tick(stop)
        if tick is not None:
            gate = Gate(grants.leave, lends=lease.lends)
            Executor(settings, config, worker_class, link, tick, receiver, gate).run(stop)
    finally:
        grants.stop()
        receiver.stop()
