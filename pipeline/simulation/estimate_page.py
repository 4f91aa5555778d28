"""The page of an estimate, for whoever owns the fleet, and the same figures for a terminal.

Keeps true: the page and the terminal show the same texts.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

from rose.pipeline.report.page import milliseconds, percent, render_page
from rose.pipeline.simulation.estimate import GUEST_TURNS, TASKS, Estimate
from rose.pipeline.simulation.recorded_load import MINUTE
from rose.pipeline.simulation.results import UserFigures

NONE = "no request"

CHART_POINTS = 400
"""Most points of the chart: longer recordings are averaged over several minutes."""


def estimate_page(found: Estimate) -> str:
    """Return the page as HTML."""
    from rose.pipeline.report.estimate_chart import shares_chart

    return render_page(
        "estimate.html.j2",
        {"shares": shares_chart(list(_points(found)))},
        headline=headline(found),
        basis=basis(found),
        tiles=tiles(found),
        verdict=verdict(found),
        users=users(found),
        assumptions=assumptions(found),
        assumed=found.assumed,
    )


def headline(found: Estimate) -> str:
    """Return the main figure in a sentence."""
    return f"This fleet would lend {found.tokens_per_day / 1e6:,.1f} million tokens a day."


def basis(found: Estimate) -> str:
    """Return what the estimate rests on."""
    servers = f"{found.servers} server" + ("s" if found.servers > 1 else "")
    began, ended = _utc(found.minutes[0].minute), _utc(found.minutes[-1].minute + 1)
    return (
        f"Simulated from {found.recorded_hours:,.1f} recorded hours of {servers} "
        f"({began:%-d %B %Y, %H:%M} to {ended:%-d %B %Y, %H:%M} UTC), scaled to a day."
    )


def tiles(found: Estimate) -> list[tuple[str, str]]:
    """Return the main figures with their meaning."""
    return [
        (f"{found.lent_gpu_hours_per_day:,.1f}", f"GPU hours lent a day, of {24 * found.gpus:,} of the fleet"),
        (percent(found.lent_share), "of the fleet's GPU time"),
        (f"{found.turns_per_day:,.0f}", f"turns a day, {found.trajectories_per_day:,.0f} finished trajectories"),
        (percent(found.busy), "of the time users had requests in a server (recorded)"),
        (percent(found.kv_most), "of a server's KV memory is the most that users needed (recorded)"),
        (f"{found.cuts_per_day:,.0f}", "times a day serving takes KV memory back"),
    ]


def verdict(found: Estimate) -> str:
    """Return in a sentence what lending changes for the users."""
    alone, lending = found.alone, found.lending
    if alone is None or lending is None:
        return "The recordings hold no request of a user, so nothing is known of the promise."
    return (
        f"{percent(lending.kept)} of the requests are within the promise while the fleet lends, "
        f"{percent(alone.kept)} if it does not. The 99th percentile of the time to the first token is "
        f"{lending.ttft_p99 / alone.ttft_p99:.2f} times that of serving alone."
    )


def users(found: Estimate) -> list[tuple[str, str, str]]:
    """Return what users see: name of the figure, alone, while lending."""
    figures = {
        "requests": lambda seen: f"{seen.requests:,}",
        "within the promise": lambda seen: percent(seen.kept),
        "time to the first token, median": lambda seen: milliseconds(seen.ttft_p50),
        "time to the first token, p99": lambda seen: milliseconds(seen.ttft_p99),
        "time between two tokens, median": lambda seen: milliseconds(seen.tpot_p50),
        "time between two tokens, p99": lambda seen: milliseconds(seen.tpot_p99),
    }

    def shown(name: str, seen: UserFigures | None) -> str:
        return NONE if seen is None else figures[name](seen)

    return [(name, shown(name, found.alone), shown(name, found.lending)) for name in figures]


def assumptions(found: Estimate) -> list[tuple[str, str]]:
    """Return what is recorded and what is assumed, by name."""
    assumed = found.assumed
    return [
        ("Recorded", "busy time, requests and KV memory of each server; minutes without a recording are left out"),
        (
            "Busy share",
            f"{percent(found.busy)} recorded, {percent(found.simulated_busy)} in the simulation of serving alone",
        ),
        ("Profiles", f"serving {assumed.serving_profile}, guest {assumed.guest_profile}"),
        (
            "Users' requests",
            f"prompts of {assumed.prompt_tokens:,} tokens and answers of {assumed.new_tokens:,} tokens (medians); they "
            "arrive at random, at the rate at which a server is as busy as in the recorded minute",
        ),
        (
            "Rollouts",
            f"never out of work; prompts of {TASKS.prompt_tokens:,} tokens, {TASKS.turns} turns of "
            f"{TASKS.new_tokens:,} tokens (medians), at most {GUEST_TURNS} turns at once on a server, no new policy "
            "versions",
        ),
        ("Lending", "strict: the guest computes only while a server has no request of a user"),
        ("Seed", str(assumed.seed)),
    ]


def _points(found: Estimate) -> Iterator[tuple[datetime, float, float]]:
    """Yield time, busy share and lent share, averaged over equal numbers of minutes."""
    together = -(-len(found.minutes) // CHART_POINTS)
    for first in range(0, len(found.minutes), together):
        part = found.minutes[first : first + together]
        servers = sum(each.servers for each in part)
        yield (
            _utc(part[0].minute),
            sum(each.servers * each.busy for each in part) / servers,
            sum(each.servers * each.lent for each in part) / servers,
        )


def _utc(minute: int) -> datetime:
    return datetime.fromtimestamp(MINUTE * minute, UTC)
