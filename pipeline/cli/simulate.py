"""`rose simulate`: runs scenarios, prints the arms side by side, and writes the files that were asked for.

Keeps true
- Everything is checked before anything is simulated: options, scenarios, and whether the files can be written.
- Figures, turns and trace hold nothing of the machine or the wall clock: one seed gives the same bytes. How long a
  simulation took is on standard error. The report page names the machine.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rose.pipeline.config.options import is_writable
from rose.pipeline.simulation.comparison import run_arms
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.recorder import Recorder
from rose.pipeline.simulation.results import ROSE, ScenarioResult, checks, encode_results, encode_turns
from rose.pipeline.simulation.scenario import Scenario, load_scenario
from rose.pipeline.simulation.tables import print_checks, print_result
from rose.pipeline.simulation.trace import encode_trace
from rose.pipeline.terminal import escape_control_chars
from rose.schemas.errors import UsageError

LINE_SECONDS, BAR_SECONDS = 10.0, 0.25
"""Time between two lines of progress, and between two updates of the bar on a terminal."""

TABLE_WIDTH = 140
"""Least characters of a line: a narrow terminal breaks lines, and no figure is cut."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files to write."""

    json: Path | None = None
    turns: Path | None = None
    trace: Path | None = None
    report: Path | None = None

    def check(self) -> None:
        """Raise UsageError for a file that cannot be written."""
        for option, file in vars(self).items():
            if file is not None and not is_writable(file):
                raise UsageError(
                    f"--{option} {file} cannot be written: name a file, in a folder that is there and may be written"
                )


def simulate_one(file: Path, chosen: Sequence[str], outputs: Outputs) -> None:
    """Simulate a scenario: the chosen arms, or all if none is chosen. Raises UsageError or Stalled."""
    outputs.check()
    arms = load_scenario(file)
    for arm in chosen:
        if arm not in arms:
            raise UsageError(f"the scenario {file} has no arm {arm}: it has {', '.join(arms)}")
    _simulate([{arm: scenario for arm, scenario in arms.items() if not chosen or arm in chosen}], outputs)


def simulate_all(folder: Path, outputs: Outputs) -> None:
    """Simulate all scenarios of a folder. Raises UsageError or Stalled."""
    outputs.check()
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise UsageError(f"there is no scenario in {folder}: start it in a checkout of ROSE, or name a --scenarios DIR")
    scenarios = [load_scenario(file) for file in files]
    names = [_name(arms) for arms in scenarios]
    for name, file in zip(names, files, strict=True):
        if names.count(name) > 1:
            raise UsageError(f"the scenario {file} has the name {name} of another scenario: give it another `name`")
    _simulate(scenarios, outputs)


def _simulate(scenarios: Sequence[Mapping[str, Scenario]], outputs: Outputs) -> None:
    results: list[ScenarioResult] = []
    console = Console(width=max(Console().width, TABLE_WIDTH))
    if outputs.turns is not None:
        outputs.turns.write_bytes(b"")
    for arms in scenarios:
        results.append(_run(arms, outputs))
        print_result(console, results[-1])
    found = checks(results, {_name(arms): arms for arms in scenarios})
    print_checks(console, found)
    if outputs.json is not None:
        outputs.json.write_bytes(encode_results(results, found))


def _run(arms: Mapping[str, Scenario], outputs: Outputs) -> ScenarioResult:
    """Run a scenario; write the files that show its turns."""
    name, shown = _name(arms), ROSE if ROSE in arms else next(iter(arms))
    recorder = Recorder()

    def ended(arm: str, fleet: Fleet) -> None:
        if outputs.turns is not None:
            with outputs.turns.open("ab") as file:
                file.writelines(encode_turns(name, arm, fleet.rollout.turns))
        if outputs.trace is not None and arm == shown:
            with outputs.trace.open("wb") as file:
                file.writelines(encode_trace(recorder, fleet.trainer.figures.steps))
        if outputs.report is not None and arm == shown:
            # numpy and the parts of the report are loaded only for the page
            from rose.pipeline.simulation.report_page import simulation_page

            outputs.report.write_text(simulation_page(fleet, recorder, name=f"{name}, {arm}"), encoding="utf-8")

    recorders = {shown: recorder} if outputs.trace is not None or outputs.report is not None else {}
    return run_arms(name, arms, watch=watch, ended=ended, recorders=recorders)


def _name(arms: Mapping[str, Scenario]) -> str:
    return next(iter(arms.values())).name


@contextmanager
def watch(name: str, fleet: Fleet, ends_at: float | None) -> Iterator[None]:
    """Show the progress of a fleet on standard error: a bar on a terminal, otherwise a line now and then.

    A thread reads the fleet's clock, so that the simulation runs as it would without it.
    """
    console, ended, progress = Console(stderr=True), threading.Event(), _Progress(name, fleet, ends_at)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(name, total=progress.total)

        def show() -> None:
            while not ended.wait(BAR_SECONDS if console.is_terminal else LINE_SECONDS):
                bar.update(task, description=str(progress), completed=progress.done)
                if not console.is_terminal:
                    console.print(str(progress), highlight=False, markup=False, soft_wrap=True)

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
    console.print(str(progress), highlight=False, markup=False, soft_wrap=True)


class _Progress:
    """How far a fleet is."""

    def __init__(self, name: str, fleet: Fleet, ends_at: float | None) -> None:
        self._name = escape_control_chars(name)
        self._fleet = fleet
        self._ends_at = ends_at
        self._began = monotonic()
        self._handled = fleet.events.handled

    @property
    def total(self) -> float:
        """Seconds of the simulation if their number is known, otherwise training steps."""
        return self._fleet.scenario.training.steps if self._ends_at is None else self._ends_at

    @property
    def done(self) -> float:
        """How much of the total is done."""
        return len(self._fleet.trainer.figures.steps) if self._ends_at is None else self._fleet.events.now

    def __str__(self) -> str:
        seconds, handled = monotonic() - self._began, self._fleet.events.handled - self._handled
        steps = f", {self.done:g} of {self.total:g} steps" if self._ends_at is None else ""
        rate = handled / seconds if seconds else 0.0
        return (
            f"{self._name}: {self._fleet.events.now:,.0f} simulated seconds{steps}, "
            f"{handled:,} events in {seconds:,.1f} s, {rate:,.0f} a second"
        )
