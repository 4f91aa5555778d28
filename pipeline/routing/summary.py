"""A cell in short: what its routing core knows, for whoever decides on capacity.

Keeps true
- It costs little, however much waits: of many waiting turns the oldest ones stand for all.
- It is a record whatever the core holds: of more executors than it takes, lenders come first.
- Silence of all at once is the listener's own absence, so the core takes nothing from anybody then. Capacity must come
  all the same: who is not heard is left out, and where nobody is heard all turns wait.

Pure, and changes nothing.
"""

from itertools import islice

from pipeline.routing.liveness import Executor, Standing
from pipeline.routing.placement import Placement, lanes
from pipeline.routing.router import Router
from schemas.cells import EXECUTORS, CellSummary, ExecutorLine
from schemas.slack import SlackHeartbeat, WorkerClass

UNHEARD_SECONDS = 5.0
"""Who was not heard for so long is nobody who does anything, whatever the core still waits for."""

COUNTED = 250
"""Waiting turns whose tokens are counted; of more, these stand for all."""


def summary_of(router: Router, *, name: str, now: float, cell: int = 0, cells: int = 1) -> CellSummary:
    """What the core of a cell stands like now, under the name of its router."""
    known = [(each, each.beat) for each in router.liveness.executors.values() if each.standing is not Standing.GONE]
    heard = [(each, beat) for each, beat in known if beat is not None and now - each.heard_at < UNHEARD_SECONDS]
    heard.sort(key=lambda each: not each[1].by_grant)  # stable
    lines = tuple(_line_of(router, executor, beat, now) for executor, beat in heard[:EXECUTORS])
    lost = 0 if lines else router.outstanding
    turns, there = router.waiting.for_room + lost, router.turns if lost else router.waiting.turns
    room = prefill = new = 0.0
    for turn in islice((turn for turn in there.values() if not turn.torn), COUNTED):
        room += turn.room_tokens
        prefill += turn.context_tokens + turn.begun_tokens
        new += max(1.0, turn.lengths.expected(turn.turn, turn.max_tokens) - turn.begun_tokens)
    share = turns / min(turns, COUNTED) if turns else 0.0
    prefill, new = prefill * share, new * share
    return CellSummary(
        cell=cell,
        cells=cells,
        router=name,
        waiting_turns=turns,
        outstanding_turns=router.outstanding - lost,
        wanted_tokens=round(room * share),
        prefill_tokens=round(prefill),
        new_tokens=round(new),
        waiting_seconds=_together(lines, prefill, new),
        policy_version=router.liveness.current_version,
        executors=lines,
        written_at=now,
    )


def _line_of(router: Router, executor: Executor, beat: SlackHeartbeat, now: float) -> ExecutorLine:
    placement: Placement = router.placement
    load = placement.load_of(executor.worker, now)
    return ExecutorLine(
        worker=executor.worker,
        serving=beat.worker_class is WorkerClass.SERVING,
        by_grant=beat.by_grant,
        state=beat.state,
        open=executor.open,
        free_turns=load.free_turns,
        free_tokens=load.free_tokens,
        held_turns=load.held_turns,
        held_tokens=load.held_tokens,
        load_seconds=load.seconds,
        prefill_tokens_per_second=beat.hardware.prefill_tokens_per_second,
        decode_tokens_per_second=beat.hardware.decode_tokens_per_second,
        lanes=lanes(beat),
        lag_versions=router.liveness.lag(executor),
        serving_running=beat.serving.running,
        serving_waiting=beat.serving.waiting,
    )


def _together(lines: tuple[ExecutorLine, ...], prefill: float, new: float) -> float:
    """Seconds in which the open executors together do so much; 0 where there is none."""
    if prefill + new <= 0:
        return 0.0
    rate = sum(
        1.0 / (prefill / line.prefill_tokens_per_second + new / (line.decode_tokens_per_second * line.lanes))
        for line in lines
        if line.open
    )
    return 1.0 / rate if rate else 0.0
