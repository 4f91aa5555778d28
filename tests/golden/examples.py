"""One example of every record as it is now. `python -m tests.golden.examples` writes the bytes of those that are new.

Bytes that are there are never written again: they are what some log holds for ever.
"""

from pathlib import Path

import msgspec

from schemas.arrays import pack_logprobs, pack_tokens
from schemas.capacity import CapacityGrant
from schemas.cells import CellSummary, ExecutorLine
from schemas.contexts import appending
from schemas.environments import Applied, EnvSnapshot, Group, GroupState, TrajectoryProgress
from schemas.prompts import Prompt, PromptSampling, Sampling
from schemas.record import Record
from schemas.samples import Outcome, Sample, SampleOutcome, SampleTurn
from schemas.slack import ExecutorState, Hardware, SlackHeartbeat, Tenant, WorkerClass
from schemas.turns import (
    Part,
    PlacementCost,
    TurnDispatch,
    TurnOutcome,
    TurnRequest,
    TurnResult,
    TurnTimes,
    VersionSpan,
)
from schemas.weights import ChunkRef, FirstChunk, SliceRef, TensorSpec, WeightChunk, WeightManifest
from schemas.wire import encode

FOLDER = Path(__file__).parent / "bytes"

SAMPLING = Sampling(temperature=0.5, top_p=0.9, max_tokens=32, stop_token_ids=(2, 7), seed=11)
PROMPT = Prompt(
    group_id="g-1",
    group_size=4,
    environment="calculator",
    seed=99,
    arguments={"min_operands": 1, "max_operands": 8},
    sampling=PromptSampling(temperature=0.5, max_tokens=32, stop_token_ids=(), seed=11),
    max_turns=12,
)
TIMES = TurnTimes(
    requested_at=1.5,
    committed_at=1.53125,
    queued_at=1.5625,
    dispatched_at=1.625,
    received_at=1.75,
    scheduled_at=1.875,
    first_token_at=2.0,
    finished_at=2.5,
    applied_at=2.75,
)
REQUEST = TurnRequest(
    trajectory_id="g-1:3",
    group_id="g-1",
    home=5,
    environment="calculator",
    turn=2,
    **appending(pack_tokens([1, 2, 70_000]), (7, 19), known=1),
    sampling=SAMPLING,
    requested_at=1.5,
    patience_seconds=60.0,
)
SPAN = VersionSpan(start=0, end=2, version=4)
DIGEST = bytes(range(16))

OUTCOME = SampleOutcome(
    trajectory_id="g-1:3",
    group_id="g-1",
    outcome=Outcome.TRAINED,
    step=5,
    policy_version=5,
    reason="",
    recorded_at=3.0,
)

EXAMPLES: tuple[Record, ...] = (
    PROMPT,
    REQUEST,
    TurnDispatch(
        asked=msgspec.Raw(encode(REQUEST)),
        home=5,
        offset=23,
        cut=True,
        attempt=1,
        worker="executor-0",
        slot=0,
        incarnation=1_700_000_000_000,
        claim=7,
        failures=1,
        dispatched_at=1.625,
        cost=PlacementCost(
            wait_seconds=0.25,
            prefill_seconds=0.5,
            decode_seconds=1.0,
            risk_seconds=0.125,
            cached_tokens=2,
            passed_over="executor-1",
            passed_over_seconds=3.0,
        ),
        queued_at=1.5625,
        begun=Part(
            tokens=pack_tokens([9, 7]),
            logprobs=pack_logprobs([-0.5, -0.25]),
            spans=(SPAN,),
            device_seconds={"serving": 0.25},
        ),
    ),
    TurnResult(
        trajectory_id="g-1:3",
        group_id="g-1",
        home=5,
        turn=2,
        attempt=1,
        outcome=TurnOutcome.COMPLETED,
        reason="",
        worker="executor-0",
        incarnation=1_700_000_000_000,
        tokens=pack_tokens([9, 7]),
        logprobs=pack_logprobs([-0.5, -0.25]),
        finish_reason="stop",
        spans=(SPAN,),
        context_tokens=3,
        cached_tokens=2,
        times=TIMES,
        device_seconds={"dedicated": 0.5},
    ),
    SlackHeartbeat(
        worker="executor-0",
        incarnation=1_700_000_000_000,
        slot=0,
        sequence=17,
        worker_class=WorkerClass.DEDICATED,
        state=ExecutorState.READY,
        policy_version=4,
        hardware=Hardware(device="cpu", prefill_tokens_per_second=20_000.0, decode_tokens_per_second=400.0),
        kv_bytes_total=1 << 26,
        kv_bytes_free=1 << 25,
        kv_bytes_per_token=4096,
        rollout=Tenant(running=3, waiting=1),
        serving=Tenant(running=0, waiting=0),
        max_turns=64,
        token_budget=8192,
        prefill_headroom_seconds=0.25,
        decode_headroom_seconds=0.125,
        ttl_seconds=2.0,
        sent_at=2.5,
        holds=b"\x01\x02\x03\x04\x05\x06\x07\x08",
        refused_version=6,
        refused_reason="bad_signature",
        swap_seconds=0.0625,
        paused_reason="a grant parked it: night",
        cuts=3,
        frozen=True,
        seeded=False,
        by_grant=True,
    ),
    CapacityGrant(
        worker="serving-0",
        lend=True,
        kv_bytes=1 << 30,
        token_budget=4096,
        granted_at=1.5,
        reason="least loaded",
        lease_seconds=30.0,
        job="team.:demo",
        finish_seconds=60.0,
        cell=1,
    ),
    CellSummary(
        cell=0,
        cells=1,
        router="router-0",
        waiting_turns=5,
        outstanding_turns=9,
        wanted_tokens=4000,
        prefill_tokens=3000,
        new_tokens=600,
        waiting_seconds=2.5,
        policy_version=4,
        executors=(
            ExecutorLine(
                worker="serving-0",
                serving=True,
                by_grant=True,
                state=ExecutorState.READY,
                open=True,
                free_turns=3,
                free_tokens=900,
                held_turns=5,
                held_tokens=2100,
                load_seconds=1.25,
                prefill_tokens_per_second=8000.0,
                decode_tokens_per_second=40.0,
                lanes=8,
                lag_versions=1,
                serving_running=2,
                serving_waiting=0,
            ),
        ),
        written_at=2.5,
    ),
    Sample(
        trajectory_id="g-1:3",
        group_id="g-1",
        group_size=4,
        model_id="policy",
        environment="calculator",
        seed=99,
        tokens=pack_tokens([1, 2, 9, 7]),
        loss_mask=bytes([0, 0, 1, 1]),
        logprobs=pack_logprobs([0.0, 0.0, -0.5, -0.25]),
        spans=(VersionSpan(start=2, end=4, version=4),),
        turns=(
            SampleTurn(
                turn=0,
                attempt=1,
                worker="executor-0",
                sampling=SAMPLING,
                start=2,
                end=4,
                cached_tokens=0,
                times=TIMES,
                environment_seconds=0.001953125,
            ),
        ),
        reward=1.0,
        success=True,
        failure="",
        info={"answer": 7},
        device_seconds={"dedicated": 0.5},
        completed_at=2.75,
    ),
    OUTCOME,
    EnvSnapshot(
        trajectory_id="g-1:3",
        digest=DIGEST,
        state=b"\x81\xa1n\x01",
    ),
    Group(
        group_id="g-1",
        group_size=4,
        state=GroupState.OPEN,
        offset=17,
        prompt=PROMPT,
        outcomes_from=23,
        changed_at=1.25,
    ),
    TrajectoryProgress(
        trajectory_id="g-1:3",
        group_id="g-1",
        index=3,
        turn=1,
        requested_from=40,
        prompted=8,
        applied=(
            Applied(offset=30, observed=3, applied_at=1.25, environment_seconds=0.5, reward=0.25, committed_at=1.0),
        ),
    ),
    WeightManifest(
        model_id="policy",
        run="team.:demo",
        epoch=1,
        version=5,
        base_version=4,
        step=5,
        tensors=(TensorSpec(name="model.embed_tokens.weight", shape=(32, 64), dtype="float32"),),
        slices=(
            SliceRef(
                tensor=0,
                row_start=0,
                rows=32,
                column_start=0,
                columns=64,
                digest=DIGEST,
                base_digest=DIGEST,
                chunks=(ChunkRef(partition=1, offset=77, bytes=3000, digest=DIGEST),),
            ),
        ),
        digest=DIGEST,
        first=(FirstChunk(partition=1, offset=77),),
        payload_bytes=3000,
        published_at=3.0,
    ),
    WeightChunk(
        model_id="policy",
        version=5,
        tensor="model.embed_tokens.weight",
        part=0,
        payload=b"\x00\x00\x80\x3f",
    ),
)


def path_of(record: Record) -> Path:
    """Where the bytes of this version of the record lie."""
    return FOLDER / f"{record.SCHEMA.replace('/', '-')}.msgpack"


if __name__ == "__main__":
    for example in EXAMPLES:
        if not path_of(example).exists():
            path_of(example).write_bytes(encode(example))
