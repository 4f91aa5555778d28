"""`rose simulate` and `rose calibrate`: the options of the simulator's commands.

Keeps true: `rose --help` is fast: a command imports what it needs when it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from rose.pipeline.config.options import keep_docstring
from rose.schemas.errors import UsageError


@keep_docstring
def simulate(
    scenario: Annotated[Path | None, typer.Argument(metavar="SCENARIO.toml", help="Scenario to simulate.")] = None,
    arm: Annotated[
        list[str] | None, typer.Option("--arm", metavar="NAME", help="Only this arm. Repeatable; default: all arms.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Simulate all scenarios of --scenarios.")] = False,
    scenarios: Annotated[
        Path, typer.Option("--scenarios", metavar="DIR", help="Folder of the scenarios of --all.")
    ] = Path("bench/scenarios"),
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File for all figures and checks, as JSON.")
    ] = None,
    turns: Annotated[
        Path | None, typer.Option("--turns", metavar="FILE.jsonl", help="File for every turn of every arm, one a line.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.json", help="File for a Perfetto trace of `rose` or the first arm."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="File for the report page of the same arm.")
    ] = None,
) -> None:
    """Simulate a fleet on a virtual clock with the production cores, the arms of a scenario side by side."""
    from rose.pipeline.cli.simulate import Outputs, simulate_all, simulate_one

    if (scenario is None) != every:
        raise UsageError("give a scenario, such as bench/scenarios/NAME.toml, or --all")
    outputs = Outputs(json=output, turns=turns, trace=trace, report=report)
    if scenario is not None:
        simulate_one(scenario, arm or [], outputs)
    elif arm or trace or report:
        raise UsageError("--arm, --trace and --report are about one scenario: name the scenario instead of --all")
    else:
        simulate_all(scenarios, outputs)


@keep_docstring
def calibrate(
    rows: Annotated[
        Path, typer.Argument(metavar="ROWS.csv", help="Measured latencies; with --server, the file to write.")
    ],
    profile: Annotated[
        list[str],
        typer.Option(
            "--profile", metavar="NAME", help="Profile to start from, or its file. Repeat for other parallel sizes."
        ),
    ],
    where: Annotated[
        list[str] | None, typer.Option("--where", metavar="COLUMN=VALUE", help="Only these rows. Repeatable.")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", metavar="URL", help="Measure this server first: a sweep of minutes.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Model at the server; default: its first.")
    ] = None,
    factors: Annotated[
        bool, typer.Option("--factors", help="Also fit memory and compute: for another card or model.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.toml", help="File for the calibrated profile.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="File for the result, as JSON.")] = None,
) -> None:
    """Fit the simulator's cost model to measured latencies, and print its error on rows that it was not fitted to."""
    from rose.pipeline.cli.calibrate import calibrate_profiles

    if model is not None and server is None:
        raise UsageError("--model names a model at a server: give --server URL too")
    calibrate_profiles(rows, profile, where or [], server=server, model=model, factors=factors, out=out, output=output)
