"""Program of an executor: follows grants and weights, waits for the engine, and runs the loop."""

from collections.abc import Mapping, Sequence
from threading import Event

from rose.schemas.heartbeats import WorkerClass
from rose.topics.health import HEALTH, START_SECONDS
from rose.topics.settings import BusSettings
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.grants import Lease
from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.weights.config import WeightsConfig


def run_executor(
    settings: BusSettings,
    config: ExecutorConfig,
    client: EngineClient,
    shapes: Mapping[str, Sequence[int]],
    stop: Event,
    worker_class: WorkerClass = WorkerClass.DEDICATED,
    *,
    weights: WeightsConfig | None = None,
    lease: Lease | None = None,
) -> None:
    """Run turns for `config.worker` on the engine of `client` until `stop` is set.

    `shapes`: shapes of the model's tensors, by name. `lease`: the lease of a lender; without one, only drains and cells
    apply. Raises RoseError if the engine cannot be built with these settings, breaks or is gone, a key file or store
    is invalid, the broker is unreachable, a topic is missing, or another executor has the same name.
    """
    from rose.workers.executor.grants import GrantFollower, IntakeGate
    from rose.workers.executor.loop import Executor
    from rose.workers.weights.chunk_stores import open_store
    from rose.workers.weights.receive import WeightReceiver
    from rose.workers.weights.trust import make_trust

    name, weights = config.worker, weights or WeightsConfig()
    trust = make_trust(settings, config.model_id, weights)
    store = open_store(weights)
    receiver = WeightReceiver(
        settings, trust, shapes=shapes, store=store, engine_dtype=config.dtype, client_id=f"{name}-weights"
    )
    receiver.start()
    lease = lease or Lease()
    grants = GrantFollower(settings, name, lease)
    try:
        grants.wait_until_read(stop)
        HEALTH.report("waits for its engine, which loads", ready=False, lasts_seconds=START_SECONDS)
        status = client.wait_until_ready(stop)
        if status is not None:
            gate = IntakeGate(grants.permission, lends=lease.lends)
            Executor(settings, config, worker_class, client, status, receiver, gate).run(stop)
    finally:
        grants.stop()
        receiver.stop()
