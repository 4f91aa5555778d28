"""Executors as users start them, forked from a fork server that a test file shares."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rose.pipeline.local.fork_server import ForkedProcess, ForkServer
from rose.pipeline.routing.turn import without_tokens
from rose.schemas.arrays import pack_tokens
from rose.schemas.heartbeats import SlackHeartbeat
from rose.schemas.prompts import Sampling
from rose.schemas.turns import (
    Part,
    PlacementCost,
    TurnDispatch,
    TurnKey,
    TurnRequest,
    TurnResult,
    context_fields,
    held_hash,
)
from rose.schemas.wire import encode
from rose.topics.catalog import COMPLETED, DISPATCHED, HEARTBEATS, REQUESTED
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.weights.config import DEFAULT_RUN
from rose.workers.weights.manifests import sign_manifest
from rose.workers.weights.publish import WeightPublisher
from tests.support.brokers import flags
from tests.support.policy_folders import new_policy, save_policy, tensors_of

SLOT = 1
WAIT_SECONDS = 120.0
"""A record that has not arrived within this time is lost."""


class Process(Protocol):
    """The process of the executor."""

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        ...


@dataclass
class Router:
    """The router side of an executor: publishes versions, dispatches turns, and reads results and heartbeats."""

    settings: BusSettings
    executor: "Process | None" = None
    """The executor process. Its end ends every wait."""
    key: Ed25519PrivateKey | None = None
    """Key that signs the versions."""

    def __post_init__(self) -> None:
        self.writer = Writer(self.settings, "test")
        self.publisher = WeightPublisher(self.settings, "policy", key=self.key)
        self.reader = Reader(self.settings, "test", group="test")
        self.reader.assign({(HEARTBEATS, 0): 0, (COMPLETED, 0): 0, (COMPLETED, 1): 0})
        self.heartbeats: list[SlackHeartbeat] = []
        self.results: list[TurnResult] = []

    def publish(self, model: Any, version: int, *, digest: bytes | None = None) -> None:
        self.publish_tensors(tensors_of(model), version, digest=digest)

    def publish_tensors(self, tensors: Mapping[str, Any], version: int, *, digest: bytes | None = None) -> None:
        snapshot = self.publisher.snapshot(tensors.items())
        manifest = self.publisher.put(snapshot, version, step=version, published_at=time.time())
        if digest is not None:
            manifest = msgspec.structs.replace(manifest, digest=digest)
            self.publisher = WeightPublisher(self.settings, "policy", key=self.key)  # skips forged versions
        sign_manifest(manifest, self.key).write(self.writer)
        self.writer.flush()

    def dispatch(
        self,
        name: str,
        context: list[int],
        *,
        incarnation: int | None = None,
        max_tokens: int = 8,
        claim: int = 0,
        stop: tuple[int, ...] = (0,),
        attempt: int = 0,
        partial: Part | None = None,
        home: int = 1,
        **sampling: Any,
    ) -> TurnKey:
        request = self.request(name, context, home=home, max_tokens=max_tokens, stop_token_ids=stop, **sampling)
        return self.send(request, incarnation=incarnation, claim=claim, attempt=attempt, partial=partial)

    def request(
        self,
        name: str,
        context: list[int],
        *,
        turn: int = 0,
        chain: tuple[int, ...] = (),
        known: int = 0,
        home: int = 1,
        **sampling: Any,
    ) -> TurnRequest:
        return TurnRequest(
            trajectory_id=name,
            group_id="g",
            home=home,
            environment="calculator",
            turn=turn,
            **context_fields(pack_tokens(context), chain, known_tokens=known),
            sampling=Sampling(**{"max_tokens": 8, "stop_token_ids": (0,), **sampling}),
            requested_at=time.time(),
            patience_seconds=600.0,
        )

    def log(self, request: TurnRequest) -> int:
        """Write a request to its home partition; return its offset."""
        offsets: list[int] = []
        self.writer.write(
            REQUESTED,
            request,
            key=request.trajectory_id,
            partition=request.home,
            on_delivery=lambda _, offset: offsets.append(offset),
        )
        self.writer.flush()
        return offsets[0]

    def send(
        self,
        request: TurnRequest,
        *,
        offset: int = 0,
        cut: bool = False,
        incarnation: int | None = None,
        claim: int = 0,
        attempt: int = 0,
        partial: Part | None = None,
        withdrawn: bool = False,
    ) -> TurnKey:
        wire = encode(request)
        record = TurnDispatch(
            request_wire=msgspec.Raw(without_tokens(wire) if cut else wire),
            home=request.home,
            offset=offset,
            cut=cut,
            attempt=attempt,
            worker="executor-1",
            slot=SLOT,
            incarnation=self.heartbeats[-1].incarnation if incarnation is None else incarnation,
            claim=claim,
            dispatched_at=time.time(),
            cost=PlacementCost(wait_seconds=0, prefill_seconds=0, decode_seconds=0),
            partial=partial,
            withdrawn=withdrawn,
        )
        self.writer.write(DISPATCHED, record, key=request.trajectory_id, partition=SLOT)
        self.writer.flush()
        return record.key

    def lists(self, key: TurnKey) -> bool:
        """Whether a heartbeat has listed the turn. On a busy machine several heartbeats arrive at once."""
        execution = held_hash(key).to_bytes(8, "little")
        return any(
            execution == beat.holds[at : at + 8] for beat in self.heartbeats for at in range(0, len(beat.holds), 8)
        )

    def until(self, met: Callable[[], bool]) -> None:
        """Read records until the condition holds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not met():
            assert self.executor is None or self.executor.poll() is None, "the executor has ended"
            assert time.monotonic() < deadline, (self.heartbeats[-1:], self.results[-1:])
            for item in self.reader.read(100, 0.5):
                assert isinstance(item, Envelope)
                if isinstance(item.record, SlackHeartbeat):
                    self.heartbeats.append(item.record)
                elif isinstance(item.record, TurnResult):
                    assert item.partition == item.record.home == 1
                    self.results.append(item.record)

    def serves(self, version: int) -> bool:
        return bool(self.heartbeats) and self.heartbeats[-1].policy_version == version

    def result(self, name: str, attempt: int = 0, turn: int = 0) -> TurnResult:
        values = TurnKey(name, turn, attempt)
        self.until(lambda: any(result.key == values for result in self.results))
        return next(result for result in self.results if result.key == values)


def start_executor(
    fork_server: ForkServer,
    settings: BusSettings,
    folder: Path,
    *,
    slot: int,
    most_tokens: int,
    kv_cache_bytes: int,
    metrics_port: int = 0,
) -> ForkedProcess:
    """Start `rose executor` for this inbox with the policy in the folder. The log goes to the folder. `most_tokens`
    bounds one turn."""
    values = {
        "run.name": DEFAULT_RUN,
        "executor.slot": slot,
        "model.folder": save_policy(folder / f"model-{slot}", new_policy(0, tied=True)),
        "executor.max_model_len": most_tokens,
        "environment.max_context_tokens": most_tokens,
        "executor.kv_cache_bytes": kv_cache_bytes,
        "metrics.port": metrics_port,
    }
    settings_flags = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    arguments = ("executor", f"--name=executor-{slot}", *flags(settings), *settings_flags)
    return fork_server.start(arguments, name=f"executor-{slot}", log=folder / f"executor-{slot}.log")


def engine_of(executor: ForkedProcess) -> int:
    """Return the process of the engine."""
    (child,) = Path(f"/proc/{executor.pid}/task/{executor.pid}/children").read_text().split()
    return int(child)
