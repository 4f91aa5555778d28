"""The cell summary: the state of a cell's router in one record, for the control app.

Keeps true
- The cost of a summary is bounded: if many turns wait, the oldest ones are counted and extrapolated to all.
- A summary is always a valid record: if there are more executors than a record may list, lenders are listed first.
- If all executors are silent, the router takes no turns from them, but capacity must still be requested. So the summary
  omits silent executors, and if it lists none it counts all turns as waiting.

Pure: reads the router and changes nothing.
"""

from itertools import islice

from rose.pipeline.routing.liveness import Executor, ExecutorStatus
from rose.pipeline.routing.placement import Placement, lanes
from rose.pipeline.routing.router import Router
from rose.schemas.cells import MAX_EXECUTORS, CellSummary, ExecutorLine
from rose.schemas.heartbeats import SlackHeartbeat, WorkerClass

SILENT_SECONDS = 5.0
"""An executor without a heartbeat for this time is omitted, even if the router does not count it as GONE."""

MAX_COUNTED_TURNS = 250
"""Waiting turns whose tokens are counted. If more wait, the sums are extrapolated from these."""


def summarize_cell(router: Router, *, name: str, now: float, cell: int = 0, cells: int = 1) -> CellSummary:
    """The summary of a cell at `now`, on the router's clock. `name`: the name of the router."""
    executors = [
        (each, each.heartbeat) for each in router.liveness.executors.values() if each.status is not ExecutorStatus.GONE
    ]
    live = [
        (each, heartbeat)
        for each, heartbeat in executors
        if heartbeat is not None and now - each.heartbeat_at < SILENT_SECONDS
    ]
    live.sort(key=lambda each: not each[1].by_grant)  # stable
    lines = tuple(_executor_line(router, executor, heartbeat, now) for executor, heartbeat in live[:MAX_EXECUTORS])
    lost = 0 if lines else router.outstanding
    turns, waiting = router.queue.waiting_for_room + lost, router.turns if lost else router.queue.turns
    room_tokens = prefill_tokens = new_tokens = 0.0
    for turn in islice(
        (turn for turn in waiting.values() if not turn.context_missing and not turn.on_hold), MAX_COUNTED_TURNS
    ):
        room_tokens += turn.room_tokens
        prefill_tokens += turn.context_tokens + turn.partial_tokens
        new_tokens += max(1.0, turn.lengths.expected(turn.turn, turn.max_tokens) - turn.partial_tokens)
    share = turns / min(turns, MAX_COUNTED_TURNS) if turns else 0.0
    prefill_tokens, new_tokens = prefill_tokens * share, new_tokens * share
    return CellSummary(
        cell=cell,
        cells=cells,
        router=name,
        waiting_turns=turns,
        outstanding_turns=router.outstanding - lost,
        wanted_tokens=round(room_tokens * share),
        prefill_tokens=round(prefill_tokens),
        new_tokens=round(new_tokens),
        waiting_seconds=_combined_seconds(lines, prefill_tokens, new_tokens),
        policy_version=router.liveness.current_version,
        executors=lines,
        written_at=now,
    )


def _executor_line(router: Router, executor: Executor, heartbeat: SlackHeartbeat, now: float) -> ExecutorLine:
    placement: Placement = router.placement
    load = placement.load_of(executor.worker, now)
    return ExecutorLine(
        worker=executor.worker,
        serving=heartbeat.worker_class is WorkerClass.SERVING,
        by_grant=heartbeat.by_grant,
        state=heartbeat.state,
        open=executor.is_open,
        free_turns=load.free_turns,
        free_tokens=load.free_tokens,
        held_turns=load.held_turns,
        held_tokens=load.held_tokens,
        load_seconds=load.seconds,
        prefill_tokens_per_second=heartbeat.hardware.prefill_tokens_per_second,
        decode_tokens_per_second=heartbeat.hardware.decode_tokens_per_second,
        lanes=lanes(heartbeat),
        lag_versions=router.liveness.lag_versions(executor),
        serving_running=heartbeat.serving.running,
        serving_waiting=heartbeat.serving.waiting,
    )


def _combined_seconds(lines: tuple[ExecutorLine, ...], prefill_tokens: float, new_tokens: float) -> float:
    """Seconds in which the open executors together compute these tokens; 0 if no executor is open."""
    if prefill_tokens + new_tokens <= 0:
        return 0.0
    rate = sum(
        1.0
        / (prefill_tokens / line.prefill_tokens_per_second + new_tokens / (line.decode_tokens_per_second * line.lanes))
        for line in lines
        if line.open
    )
    return 1.0 / rate if rate else 0.0
