"""Executors as their users start them, forked from a nursery that a test file shares."""

from pathlib import Path

from pipeline.command.nursery import Forked, Nursery
from tests.brokers import flags
from tests.integration.policies import new_policy, save_policy
from topics.settings import BusSettings
from workers.weights.config import DEFAULT_RUN


def start_executor(
    nursery: Nursery, settings: BusSettings, folder: Path, *, slot: int, most_tokens: int, kv_cache_bytes: int
) -> Forked:
    """`rose executor`, with a policy of its own, and its log, in the folder; `most_tokens` of one turn."""
    wanted = {
        "run.name": DEFAULT_RUN,
        "model.folder": save_policy(folder / f"model-{slot}", new_policy(0, tied=True)),
        "executor.max_model_len": most_tokens,
        "environment.max_context_tokens": most_tokens,
        "executor.kv_cache_bytes": kv_cache_bytes,
    }
    said = [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]
    arguments = ("executor", f"--slot={slot}", *flags(settings), *said)
    return nursery.start(arguments, name=f"executor-{slot}", log=folder / f"executor-{slot}.log")


def engine_of(executor: Forked) -> int:
    """The process that its engine lives in."""
    (child,) = Path(f"/proc/{executor.pid}/task/{executor.pid}/children").read_text().split()
    return int(child)
