"""Text of a replay: how many decisions are the same, and each difference, turn by turn."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rose.pipeline.clock import format_utc
from rose.pipeline.replay.decisions import CoreReplay, Difference, Outcome
from rose.schemas.grants import CapacityGrant
from rose.schemas.turns import PlacementCost, TurnDispatch, TurnResult

SHOWN_DIFFERENCES = 20
"""Later differences that are printed for each core."""

SHOWN_COSTS = 8
"""Executors whose costs are printed, the cheapest first."""

SHOWN_CHARACTERS = 60
"""Characters of a field's value that are printed."""

TIME = "%Y-%m-%d %H:%M:%S.%f UTC"


def describe_replays(replays: Sequence[CoreReplay], unjournaled: int) -> Iterator[str]:
    """The lines of a replay. `unjournaled`: decisions on the log that no journal names."""
    for replay in replays:
        if replay.differences:
            yield f"{replay.core.name}, from {format_utc(replay.core.began_at / 1e6, TIME)}:"
            yield from (f"  {line}" for line in _differences(replay.differences))
        if replay.gap:
            yield f"{replay.core.name}: not compared from there on: {replay.gap}"
    if unjournaled:
        yield (
            f"{unjournaled} decisions are in no journal: their router or control app ended before it wrote the "
            "journal, has not written it yet, could not write it (journal_ended in its output), or the journal is not "
            "on the log any more"
        )
    compared, differ = (sum(counts) for counts in zip(*map(_counts, replays), strict=True)) if replays else (0, 0)
    yield f"{compared} decisions, {differ or 'no'} difference{'s' if differ > 1 else ''}"


def _counts(replay: CoreReplay) -> tuple[int, int]:
    return replay.compared, len(replay.differences)


def _differences(differences: Sequence[Difference]) -> Iterator[str]:
    """The first difference, the first turn that is placed elsewhere, and the others."""
    first, *rest = differences
    yield from _describe(first)
    moved = [each for each in differences if each.moves]
    if moved and moved[0] is not first:
        yield f"The first of {len(moved)} turns that are placed elsewhere:"
        yield from _describe(moved[0])
        rest.remove(moved[0])
    if rest:
        yield "Later differences may follow from the first:"
    for each in rest[:SHOWN_DIFFERENCES]:
        yield from _describe(each)
    if len(rest) > SHOWN_DIFFERENCES:
        yield f"and {len(rest) - SHOWN_DIFFERENCES} more"


def _describe(difference: Difference) -> Iterator[str]:
    """The lines of one difference."""
    logged, made = difference.logged, difference.made
    either = made or logged
    assert either is not None
    yield f"{_name(either)}, {format_utc(difference.at, TIME)}"
    if difference.reordered:
        yield "  log and core decide the same, in another order"
        return
    yield f"  log:  {_decision(logged)}"
    yield f"  core: {_decision(made)}"
    if made is not None and made.costs:
        yield f"  costs by the core: {_costs(made.costs)}"
    if logged is not None and made is not None:
        yield f"  fields that differ: {_fields(logged, made)}"


def _name(outcome: Outcome) -> str:
    record = outcome.record
    if isinstance(record, TurnDispatch):
        return f"{record.request.trajectory_id} turn {record.request.turn} attempt {record.attempt}"
    if isinstance(record, TurnResult):
        return f"{record.trajectory_id} turn {record.turn}"
    return f"grant {outcome.key}"


def _decision(outcome: Outcome | None) -> str:
    if outcome is None:
        return "no such decision"
    record = outcome.record
    if isinstance(record, TurnDispatch):
        cost = record.cost
        over = "" if cost.passed_over is None else f"; next {cost.passed_over} {cost.passed_over_seconds:.4f} s"
        return f"{record.worker} for {_total(cost):.4f} s = {_terms(cost)}{over}"
    if isinstance(record, TurnResult):
        return record.reason
    if isinstance(record, CapacityGrant):
        cell = "" if record.cell is None else f"cell {record.cell}, "
        return f"{cell}{'lend' if record.lend else 'park'}: {record.reason}"
    return "deleted"


def _total(cost: PlacementCost) -> float:
    return cost.wait_seconds + cost.prefill_seconds + cost.decode_seconds + cost.risk_seconds


def _terms(cost: PlacementCost) -> str:
    return (
        f"wait {cost.wait_seconds:.4f} + prefill {cost.prefill_seconds:.4f} + decode {cost.decode_seconds:.4f} + "
        f"risk {cost.risk_seconds:.4f}, {cost.cached_tokens} tokens cached"
    )


def _costs(costs: Mapping[str, float]) -> str:
    cheapest = sorted(costs.items(), key=lambda each: each[1])
    more = f", {len(cheapest) - SHOWN_COSTS} more" if len(cheapest) > SHOWN_COSTS else ""
    return ", ".join(f"{worker} {seconds:.4f} s" for worker, seconds in cheapest[:SHOWN_COSTS]) + more


def _fields(logged: Outcome, made: Outcome) -> str:
    """The fields of both records that differ, with both values."""
    before, after = _flat(logged), _flat(made)
    names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return ", ".join(f"{name} {_text(before.get(name))} -> {_text(after.get(name))}" for name in sorted(names))


def _flat(outcome: Outcome) -> dict[str, Any]:
    """The fields of a decision's record by name, and those of its maps by dotted name; its key and partition, too."""
    found: dict[str, Any] = {"key": outcome.key, "partition": outcome.partition}
    values = msgspec.msgpack.decode(outcome.wire) if outcome.wire is not None else {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            found[name] = value
    return found


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
