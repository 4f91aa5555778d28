"""Charts of a run, as plotly figures in one style.

Keeps true
- A figure shows the data of the history without smoothing, and no outlier is cut off; a chart without data is left out.
- Of many workers a figure shows the busiest and the number of the others, so that worker names do not make it large.
- The chart of lending uses the rows of `moments.jsonl` only.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from rose.pipeline.report.history import RunHistory, TurnFact
from rose.pipeline.report.lending_statistics import LatencyBudgets, LendingSecond
from rose.pipeline.report.summary import Success

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e9edf1"
BLUE, TEAL, AMBER, ROSE, GREY = "#3b6fb6", "#3a9d8f", "#d9a441", "#c8506b", "#b8c2cc"
VERSION_COLOURS = ["#9db7d9", BLUE, TEAL, AMBER, ROSE]
"""Colours of policy versions, in rotation, so that neighbouring versions differ however many there are."""

FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"

TIMELINE_TURNS = 700
"""Number of turns that one timeline shows legibly: a window around a weight swap."""

OCCUPANCY_POINTS = 400
"""Number of points in time at which the turns in the engines are counted."""

SHOWN_WORKERS = 8
"""Maximum number of workers that a chart shows separately: those with the most turns."""

QUANTILES = ((0.99, "99th percentile", GREY), (0.9, "90th percentile", "#7fa3d1"), (0.5, "median", BLUE))
"""Quantiles of latencies with label and colour; the widest bar comes last."""


def learning_curve(history: RunHistory, success: Success) -> go.Figure | None:
    """Success of the trajectories that began under each policy version, with the two held-out measurements."""
    versions = history.by_version()
    if not versions:
        return None
    numbers = list(versions)
    shares = [sum(bool(each.success) for each in versions[number]) / len(versions[number]) for number in numbers]
    sizes = [len(versions[number]) for number in numbers]
    figure = styled_figure(height=360)
    errors = 1.96 * np.sqrt(np.multiply(shares, np.subtract(1, shares)) / sizes)
    figure.add_scatter(
        x=numbers + numbers[::-1],
        y=[*np.add(shares, errors).tolist(), *np.subtract(shares, errors).tolist()[::-1]],
        fill="toself",
        fillcolor="rgba(59,111,182,0.13)",
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
        name="95 % interval",
        showlegend=False,
    )
    figure.add_scatter(
        x=numbers,
        y=shares,
        mode="lines+markers",
        line={"color": BLUE, "width": 2.5},
        marker={"size": 5},
        name="trajectories that began under it",
        customdata=sizes,
        hovertemplate="version %{x}: %{y:.1%} of %{customdata} trajectories<extra></extra>",
    )
    newest = max((each.version for each in history.versions), default=numbers[-1])
    measured = [(step, share) for step, share in ((0, success.before), (newest, success.after)) if share is not None]
    if measured:
        figure.add_scatter(
            x=[step for step, _ in measured],
            y=[share for _, share in measured],
            mode="markers+text",
            marker={"size": 13, "color": ROSE, "symbol": "diamond", "line": {"color": "white", "width": 2}},
            text=[f"<b>{share:.0%}</b>" for _, share in measured],
            textposition="top center",
            textfont={"color": ROSE, "size": 15},
            cliponaxis=False,
            name=f"held out, {success.n} tasks",
            hovertemplate="held out: %{y:.1%}<extra></extra>",
        )
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02], title_text="solved")
    figure.update_xaxes(title_text="policy version", tickformat="d", dtick=max(1, round(newest / 12)))
    return figure


def trajectory_turns(history: RunHistory) -> go.Figure | None:
    """Distribution of the number of turns of the trajectories that ended with a reward, by success."""
    ended = [each for each in history.trajectories if each.reward is not None]
    counts = {solved: Counter(each.turns for each in ended if each.success is solved) for solved in (True, False, None)}
    if not any(counts.values()):
        return None
    figure = styled_figure(height=320)
    for solved, name, colour in ((True, "solved", TEAL), (False, "not solved", GREY), (None, "not judged", GREY)):
        turns = sorted(counts[solved])
        if not turns:
            continue
        figure.add_bar(
            x=turns,
            y=[counts[solved][turn] for turn in turns],
            name=name,
            marker={"color": colour},
            hovertemplate="%{y} trajectories of %{x} turns<extra>" + name + "</extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.18)
    figure.update_xaxes(title_text="turns of the trajectory", dtick=1)
    figure.update_yaxes(title_text="trajectories")
    return figure


def occupancy(history: RunHistory) -> go.Figure | None:
    """Number of turns in each engine over the run, with the times at which policy versions were published."""
    turns = [turn for turn in history.turns if turn.worker]
    if not turns:
        return None
    began, ended = history.span_seconds
    moments = np.linspace(began, ended, OCCUPANCY_POINTS)
    by_worker = _by_worker(turns)
    workers = {worker: by_worker[worker] for worker in _shown(by_worker)}
    if others := [own for worker, own in by_worker.items() if worker not in workers]:
        workers[f"{len(others)} others"] = list(chain.from_iterable(others))
    figure = styled_figure(height=260)
    colours = [AMBER]
    if len(workers) > 1:
        colours = sample_colorscale([BLUE, TEAL, AMBER], np.linspace(0, 1, len(workers)).tolist())
    for (worker, own), colour in zip(workers.items(), colours, strict=True):
        held = _held(own, moments)
        figure.add_scatter(
            x=moments - began,
            y=held,
            stackgroup="engines",
            line={"width": 0.5, "color": colour},
            fillcolor=colour,
            name=worker,
            hovertemplate="%{y} turns at %{x:.0f} s<extra>" + worker + "</extra>",
        )
    for version in history.versions:
        figure.add_vline(x=version.published_at - began, line={"color": INK, "width": 0.8, "dash": "dot"}, opacity=0.35)
    figure.update_xaxes(title_text="seconds", range=[0, ended - began])
    figure.update_yaxes(title_text="turns in engine")
    return figure


def timeline(history: RunHistory) -> go.Figure | None:
    """Individual turns on the workers, coloured by policy version, in a window around a swap."""
    window = _window(history)
    if not window:
        return None
    began, _ = history.span_seconds
    last = max(turn.times.finished_at for turn in window)
    by_worker = _by_worker(window)
    workers = _shown(by_worker)
    busiest = f", on the {len(workers)} busiest of {len(by_worker)} workers" if len(workers) < len(by_worker) else ""
    versions = sorted({turn.version for turn in window})
    colours = {version: VERSION_COLOURS[version % len(VERSION_COLOURS)] for version in versions}
    figure = make_subplots(rows=len(workers), cols=1, shared_xaxes=True, vertical_spacing=0.1)
    for row, worker in enumerate(workers, 1):
        lanes = _lanes(by_worker[worker])
        for version in versions:
            figure.add_trace(_bars(lanes, version, began, colours[version], legend=row == 1), row=row, col=1)
        figure.update_yaxes(title_text=worker, showticklabels=False, row=row, col=1)
        for swap in history.swaps:
            if swap.worker == worker and _starts(window[0]) <= swap.at <= last:
                figure.add_vline(
                    x=swap.at - began,
                    line={"color": INK, "width": 1.2},
                    annotation={
                        "text": f"version {swap.version}, {1000 * swap.seconds:.0f} ms",
                        "font": {"size": 11, "color": INK},
                        "bgcolor": "rgba(255,255,255,0.85)",
                        "yanchor": "bottom",
                    },
                    row=row,
                    col=1,
                )
    styled_figure(figure, height=90 + 210 * len(workers))
    figure.update_xaxes(title_text="seconds", row=len(workers), col=1)
    figure.update_yaxes(showgrid=False)
    figure.update_layout(barmode="overlay", legend_title_text=f"policy version{busiest}", legend_y=1.06)
    return figure


def latency(history: RunHistory) -> go.Figure | None:
    """Quantiles of the duration of each stage of a turn."""
    turns = history.turns
    if not turns:
        return None
    stages = {
        "bus: three hops": [turn.bus_seconds for turn in turns],
        "wait for an executor with room": [turn.room_seconds for turn in turns],
        "queue in the engine": [turn.queue_seconds for turn in turns],
        "prefill": [turn.prefill_seconds for turn in turns],
        "decode": [turn.decode_seconds for turn in turns],
        "environment step": [turn.environment_seconds for turn in turns],
    }
    figure = styled_figure(height=340)
    names = list(stages)[::-1]
    for share, label, colour in QUANTILES:
        figure.add_bar(
            y=names,
            x=[1000 * max(0.0, float(np.quantile(stages[name], share))) for name in names],
            orientation="h",
            name=label,
            marker={"color": colour},
            width=0.62 - 0.65 * (share - 0.5),
            hovertemplate="%{y}: %{x:.2f} ms<extra>" + label + "</extra>",
        )
    figure.update_layout(barmode="overlay", legend_traceorder="reversed")
    figure.update_xaxes(title_text="milliseconds", type="log", dtick=1)
    figure.update_yaxes(showgrid=False, ticksuffix="  ")
    return figure


def prefix_cache(history: RunHistory) -> go.Figure | None:
    """Share of the context that came from the prefix cache, by turn number."""
    context, cached, reusable = Counter[int](), Counter[int](), Counter[int]()
    for turn in history.turns:
        context[turn.turn] += turn.context_tokens
        cached[turn.turn] += turn.cached_tokens
        reusable[turn.turn] += turn.reusable_tokens
    numbers = [number for number in sorted(context) if context[number]]
    if not numbers:
        return None
    figure = styled_figure(height=320)
    figure.add_bar(
        x=numbers,
        y=[cached[number] / context[number] for number in numbers],
        name="from the cache",
        marker={"color": TEAL},
        hovertemplate="turn %{x}: %{y:.1%} from the cache<extra></extra>",
    )
    figure.add_scatter(
        x=numbers,
        y=[reusable[number] / context[number] for number in numbers],
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 18, "color": INK, "line": {"width": 2}},
        name="computed by the turn before, same version",
        hovertemplate="turn %{x}: %{y:.1%} could have been<extra></extra>",
    )
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02], title_text="share of the context")
    figure.update_xaxes(title_text="turn of the trajectory", dtick=1, range=[numbers[0] - 0.6, numbers[-1] + 0.6])
    return figure


def step_seconds(steps: Sequence[Mapping[str, Any]]) -> go.Figure | None:
    """Time of the trainer between two policy versions; `steps` are the lines of its `metrics.jsonl`."""
    if not steps:
        return None
    figure = styled_figure(height=300)
    parts = (
        ("waiting_seconds", "waiting for samples", GREY),
        ("training_seconds", "training", BLUE),
        ("evaluation_seconds", "holding the version back for an evaluation", ROSE),
        ("checkpoint_seconds", "checkpoint", AMBER),
        ("publishing_seconds", "the version before to its end, copying this one", TEAL),
    )
    for field, name, colour in parts:
        figure.add_bar(
            x=[step["step"] for step in steps],
            y=[step.get(field) or 0.0 for step in steps],
            name=name,
            marker={"color": colour},
            hovertemplate="step %{x}: %{y:.2f} s<extra>" + name + "</extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.18)
    figure.update_xaxes(title_text="optimizer step", tickformat="d", dtick=max(1, round(len(steps) / 12)))
    figure.update_yaxes(title_text="seconds")
    return figure


def _starts(turn: TurnFact) -> float:
    return turn.times.received_at


def _by_worker(turns: Iterable[TurnFact]) -> dict[str, list[TurnFact]]:
    found: defaultdict[str, list[TurnFact]] = defaultdict(list)
    for turn in turns:
        found[turn.worker].append(turn)
    return found


def _shown(by_worker: Mapping[str, Sequence[TurnFact]]) -> list[str]:
    """Return the workers that are shown separately."""
    busiest = sorted(by_worker, key=lambda worker: (-len(by_worker[worker]), worker))
    return sorted(busiest[:SHOWN_WORKERS])


def _held(turns: Sequence[TurnFact], moments: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the number of turns that one engine held at each of the `moments` (Unix seconds)."""
    starts = np.sort([turn.times.received_at for turn in turns])
    ends = np.sort([turn.times.finished_at for turn in turns])
    return np.searchsorted(starts, moments, "right") - np.searchsorted(ends, moments, "right")


def _window(history: RunHistory) -> list[TurnFact]:
    """Return the turns around the swap during which the most turns were held, in the order of their arrival."""
    turns = sorted((turn for turn in history.turns if turn.worker), key=_starts)
    swaps: defaultdict[str, list[float]] = defaultdict(list)
    for swap in history.swaps:
        swaps[swap.worker].append(swap.at)
    lived_through = [
        (int(held), at)
        for worker, own in _by_worker(turns).items()
        for held, at in zip(_held(own, np.asarray(swaps[worker])), swaps[worker], strict=True)
    ]
    index = len(turns) // 2
    if lived_through:
        index = int(np.searchsorted([_starts(turn) for turn in turns], max(lived_through)[1]))
    first = max(0, min(index - TIMELINE_TURNS // 2, len(turns) - TIMELINE_TURNS))
    return turns[first : first + TIMELINE_TURNS]


def _lanes(turns: Sequence[TurnFact]) -> list[tuple[int, TurnFact]]:
    """Put each turn into the lowest lane that is free when the turn arrives."""
    free_at: list[float] = []
    placed = []
    for turn in turns:
        lane = next((number for number, free in enumerate(free_at) if free <= _starts(turn)), len(free_at))
        if lane == len(free_at):
            free_at.append(0.0)
        free_at[lane] = turn.times.finished_at
        placed.append((lane, turn))
    return placed


def _bars(lanes: Sequence[tuple[int, TurnFact]], version: int, began: float, colour: str, *, legend: bool) -> go.Bar:
    own = [(lane, turn) for lane, turn in lanes if turn.version == version]
    return go.Bar(
        y=[lane for lane, _ in own],
        base=[_starts(turn) - began for _, turn in own],
        x=[turn.times.finished_at - _starts(turn) for _, turn in own],
        orientation="h",
        marker={"color": colour, "line": {"width": 0.4, "color": "white"}},
        width=0.86,
        name=str(version),
        legendgroup=str(version),
        showlegend=legend,
        customdata=[
            [turn.trajectory_id, turn.turn, 1000 * (turn.times.finished_at - _starts(turn))] for _, turn in own
        ],
        hovertemplate="%{customdata[0]} turn %{customdata[1]}: %{customdata[2]:.1f} ms<extra>version "
        + f"{version}</extra>",
    )


def styled_figure(figure: go.Figure | None = None, *, height: int) -> go.Figure:
    """Set the common style of the report on a figure, by default a new one, and return the figure."""
    figure = go.Figure() if figure is None else figure
    figure.update_layout(
        height=height,
        margin={"l": 64, "r": 24, "t": 36, "b": 52},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 13, "color": INK},
        hoverlabel={"bgcolor": "white", "bordercolor": GRID, "font": {"family": FONT}},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
    )
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GRID, "tickfont_color": MUTED}
    axis |= {"title_font": {"color": MUTED, "size": 12.5}}
    figure.update_xaxes(showgrid=False, ticks="outside", tickcolor=GRID, **axis)
    figure.update_yaxes(**axis)
    return figure


LENDING_HEIGHTS = (0.15, 0.25, 0.25, 0.35)
"""Relative heights of the panels."""

LENDING_CAPTIONS = (
    ("Tokens generated for serving requests", "tokens a second", BLUE),
    ("TTFT of serving requests", "ms: median and maximum of each second", TEAL),
    ("TPOT of serving requests", "ms", TEAL),
    ("Tokens sampled by the guest", "tokens a second", ROSE),
)
"""Caption, unit and colour of each panel."""

WAIT, LATE = "#9dc9c1", AMBER
"""Colours of a second's slowest request: within its budget, and above it."""

HEADROOM = 1.18
"""Upper end of a latency axis, relative to the highest value."""


def lending_chart(rows: Sequence[LendingSecond], promised: LatencyBudgets) -> go.Figure | None:
    """Return the chart, four panels over one time axis; None without rows."""
    if not rows:
        return None
    seconds = [row.at - rows[0].at for row in rows]
    figure = make_subplots(rows=4, cols=1, shared_xaxes=True, row_heights=LENDING_HEIGHTS, vertical_spacing=0.085)
    styled_figure(figure, height=720)
    _second_bars(figure, 1, seconds, [row.served_tokens for row in rows], BLUE, "%{y:.0f} tokens to users")
    _latency_panel(figure, 2, seconds, [(row.ttft, row.ttft_most) for row in rows], promised.ttft)
    _latency_panel(figure, 3, seconds, [(row.tpot, row.tpot_most) for row in rows], promised.tpot)
    _second_bars(figure, 4, seconds, [row.lent_tokens for row in rows], ROSE, "%{y:.0f} tokens lent")
    _draw_cuts_and_freezes(figure, rows, seconds)
    for number, (caption, unit, colour) in enumerate(LENDING_CAPTIONS, 1):
        figure.add_annotation(
            text=f"<b>{caption}</b>  <span style='color:{MUTED}'>{unit}</span>",
            font={"size": 13, "color": colour},
            x=0,
            y=1,
            xref="x domain" if number == 1 else f"x{number} domain",
            yref="y domain" if number == 1 else f"y{number} domain",
            xanchor="left",
            yanchor="bottom",
            yshift=3,
            showarrow=False,
        )
        figure.update_yaxes(rangemode="tozero", nticks=4, row=number, col=1)
    figure.update_xaxes(range=[0, seconds[-1] + 1])
    figure.update_xaxes(title_text="seconds", row=4, col=1)
    figure.update_layout(showlegend=False, hovermode="x unified", bargap=0, margin={"l": 56, "r": 20, "t": 34, "b": 48})
    return figure


def _second_bars(
    figure: go.Figure, number: int, seconds: Sequence[int], values: Sequence[float], colour: str, label: str
) -> None:
    figure.add_bar(
        x=seconds,
        y=values,
        width=1,
        offset=0,
        marker={"color": colour, "line": {"width": 0}},
        hovertemplate=label + "<extra></extra>",
        row=number,
        col=1,
    )


def _latency_panel(
    figure: go.Figure,
    number: int,
    seconds: Sequence[int],
    waits: Sequence[tuple[float | None, float | None]],
    budget: float,
) -> None:
    """Draw a bar from the median to the slowest request of each second, with the budget as a line; times in seconds."""
    there = [
        (at, 1000 * median, 1000 * most)
        for at, (median, most) in zip(seconds, waits, strict=True)
        if median is not None and most is not None
    ]
    moments, medians, slowest = ([each[part] for each in there] for part in range(3))
    figure.add_bar(
        x=moments,
        base=medians,
        y=[most - median for _, median, most in there],
        marker={"color": [LATE if most > 1000 * budget else WAIT for most in slowest], "line": {"width": 0}},
        width=0.9,
        offset=0,
        customdata=slowest,
        hovertemplate="slowest %{customdata:.1f} ms<extra></extra>",
        row=number,
        col=1,
    )
    figure.add_scatter(
        x=[at + 0.45 for at in moments],
        y=medians,
        mode="markers",
        marker={"size": 3, "color": TEAL},
        hovertemplate="median %{y:.1f} ms<extra></extra>",
        row=number,
        col=1,
    )
    figure.add_hline(y=1000 * budget, line={"color": INK, "width": 1.3, "dash": "dash"}, row=number, col=1)
    figure.add_annotation(
        text=f"<b>target: {1000 * budget:g} ms</b>",
        font={"size": 12, "color": INK},
        x=1,
        xref=f"x{number} domain",
        xanchor="right",
        y=1000 * budget,
        yref=f"y{number}",
        yanchor="bottom",
        yshift=1,
        bgcolor="rgba(255,255,255,0.85)",
        showarrow=False,
    )
    figure.update_yaxes(range=[0, HEADROOM * max([1000 * budget, *slowest])], row=number, col=1)


def _draw_cuts_and_freezes(figure: go.Figure, rows: Sequence[LendingSecond], seconds: Sequence[int]) -> None:
    """Draw freezes as bands, and cuts as triangles above the lent tokens."""
    for begin, end in _unbroken_runs([at for at, row in zip(seconds, rows, strict=True) if row.frozen]):
        figure.add_vrect(x0=begin, x1=end + 1, fillcolor=INK, opacity=0.12, line_width=0, row=4, col=1)
    cut = [(at, row) for at, row in zip(seconds, rows, strict=True) if row.cuts]
    if cut:
        top = max(row.lent_tokens for row in rows)
        figure.add_scatter(
            x=[at for at, _ in cut],
            y=[top] * len(cut),
            mode="markers",
            marker={"symbol": "triangle-down", "size": 9, "color": INK},
            customdata=[row.cuts for _, row in cut],
            hovertemplate="cut %{customdata} times<extra></extra>",
            row=4,
            col=1,
        )


def _unbroken_runs(seconds: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last second of each unbroken run of seconds."""
    runs: list[tuple[int, int]] = []
    for second in seconds:
        if runs and runs[-1][1] == second - 1:
            runs[-1] = runs[-1][0], second
        else:
            runs.append((second, second))
    return runs
