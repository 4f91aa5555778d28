"""`rose simulate`, `rose estimate` and `rose calibrate`: the options of the simulator's commands.

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
def estimate(
    recordings: Annotated[
        list[Path],
        typer.Argument(metavar="RECORDING.csv...", help="Recordings of `rose lend --observe`, one for each server."),
    ],
    serving_profile: Annotated[
        str, typer.Option("--serving-profile", metavar="NAME", help="Profile of the servers, or its file.")
    ],
    guest_profile: Annotated[
        str | None,
        typer.Option("--guest-profile", metavar="NAME", help="Profile of the policy there; default: the servers'."),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", min=1, max=16_384, help="Median prompt of a user's request.")
    ] = 1020,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", metavar="N", min=1, max=4_096, help="Median answer to a user's request.")
    ] = 129,
    ttft_seconds: Annotated[
        float, typer.Option("--ttft", metavar="SECONDS", min=0.001, max=3600, help="Promised time to the first token.")
    ] = 0.5,
    tpot_seconds: Annotated[
        float,
        typer.Option("--tpot", metavar="SECONDS", min=0.001, max=3600, help="Promised time between two tokens."),
    ] = 0.15,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the requests and rollouts.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File for the figures, as JSON.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="File for a page for the fleet's owner.")
    ] = None,
) -> None:
    """Estimate what observed servers would lend in a day, and what their users would notice."""
    from rose.pipeline.cli.estimate import estimate_fleet
    from rose.pipeline.cli.simulate import Outputs
    from rose.pipeline.simulation.estimate import Assumptions

    assumed = Assumptions(
        serving_profile=serving_profile,
        guest_profile=guest_profile or serving_profile,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        ttft_seconds=ttft_seconds,
        tpot_seconds=tpot_seconds,
        seed=seed,
    )
    estimate_fleet(recordings, assumed, Outputs(json=output, report=report))


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
