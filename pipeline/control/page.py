"""The page of the control app: cells, workers that move to another cell, lenders, and decisions with their reasons.

Pure: the same state as JSON for programs and as a page for people. Text from records is escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from rose.pipeline.clock import format_utc
from rose.pipeline.control.elasticity import ElasticityCore
from rose.pipeline.control.lenders import Lender
from rose.schemas.grants import CapacityGrant

State = dict[str, Any]

REFRESH_SECONDS = 2

STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin:.5em 0 1.5em}"
    "td,th{padding:.3em .8em;text-align:left;border-bottom:1px solid #ddd;vertical-align:top}th{font-weight:600}"
)


def state_of(core: ElasticityCore, decisions: Iterable[CapacityGrant], now: float) -> State:
    """The content of the page. `decisions`: the newest grants that changed something, newest first."""
    return {
        "job": core.job,
        "most_lenders": core.config.most_lenders,
        "lending": len(core.lending_workers(now)),
        "lease_seconds": core.config.lease_seconds,
        "cells": [
            {
                "cell": number,
                "router": cell.summary.router,
                "heard_seconds_ago": round(now - cell.heard_at, 1),
                "waiting_turns": cell.summary.waiting_turns,
                "outstanding_turns": cell.summary.outstanding_turns,
                "wanted_tokens": cell.summary.wanted_tokens,
                "waiting_seconds": round(cell.summary.waiting_seconds, 1),
                "policy_version": cell.summary.policy_version,
                "executors": len(cell.summary.executors),
                "open": sum(line.open for line in cell.summary.executors),
            }
            for number, cell in sorted(core.cells.items())
        ],
        "moves": [
            {
                "worker": name,
                "from": each.cell,
                "to": each.target_cell,
                "since_seconds": round(now - each.target_since, 1),
            }
            for name, each in sorted(core.rebalancer.moving_workers(now).items())
        ],
        "lenders": [_lender(core, name, lender, now) for name, lender in sorted(core.lenders.items())],
        "decisions": [
            {"at": format_utc(each.granted_at), "worker": each.worker, "told": _describe(each), "reason": each.reason}
            for each in decisions
        ],
    }


def _describe(grant: CapacityGrant) -> str:
    if grant.cell is not None:
        return f"go to cell {grant.cell}"
    return "lend" if grant.lend else "park"


def _lender(core: ElasticityCore, name: str, lender: Lender, now: float) -> State:
    lease, manual_grant = core.leases.get(name), core.manual_grants.get(name)
    line = lender.line
    status, reason = {True: "lends", False: "parked", None: "undecided"}[lender.lends], lender.reason
    if name in core.drains:
        status, reason = "drained", core.drains[name].reason
    elif manual_grant is not None:
        status, reason = f"by hand: {'lends' if manual_grant.lend else 'parked'}", manual_grant.reason
    elif not core.is_managed(name, now):
        status, reason = "left alone", "no heartbeats" if lease is None else f"granted to {lease.grant.job}"
    return {
        "worker": name,
        "cell": lender.cell,
        "told": status,
        "reason": reason,
        "since_seconds": round(now - lender.since, 1) if lender.since > 0 else None,
        "state": line.state.value,
        "open": line.open,
        "held_turns": line.held_turns,
        "load_seconds": round(line.load_seconds, 1),
        "lag_versions": line.lag_versions,
        "users": round(lender.user_requests, 2),
        "failures": lender.backoff.failures,
    }


def page_of(state: State) -> str:
    """The state as an HTML page."""
    cap = state["most_lenders"] or "as many as are worth it"
    head = f"{state['lending']} lend to {state['job']}, at most {cap}; a lease is {state['lease_seconds']:g} s"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" '
        f'content="{REFRESH_SECONDS}"><title>ROSE: elasticity</title><style>{STYLE}</style></head><body>'
        f"<h1>Elasticity</h1><p>{escape(head)}</p>"
        f"<h2>Cells</h2>{_table(state['cells'])}<h2>On the way to another cell</h2>{_table(state['moves'])}"
        f"<h2>Lenders</h2>{_table(state['lenders'])}"
        f"<h2>What was decided, newest first</h2>{_table(state['decisions'])}</body></html>"
    )


def _table(rows: Sequence[State]) -> str:
    if not rows:
        return "<p>None.</p>"
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape('' if value is None else str(value))}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
