"""`rose why` and `rose replay`: the options of the commands that explain or repeat what is on the log.

Keeps true: `rose --help` is fast: a command imports what it needs when it runs.
"""

from typing import Annotated

import typer

from rose.pipeline.config.options import Common, with_common
from rose.schemas.errors import UsageError


@with_common
def why(
    common: Common,
    name: Annotated[str, typer.Argument(metavar="TRAJECTORY", help="GROUP_ID:INDEX, or GROUP_ID.")],
) -> None:
    """Say in one sentence where a trajectory or a group is, and why."""
    from rose.pipeline.cli.replay_trajectory import print_why

    print_why(common, name)


@with_common
def replay(
    common: Common,
    trajectory: Annotated[str | None, typer.Argument(metavar="TRAJECTORY", help="GROUP_ID:INDEX")] = None,
    since: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Repeat decisions from here on, e.g. 2026-01-31T12:00.")
    ] = None,
    until: Annotated[str | None, typer.Option("--to", metavar="TIME", help="End of that stretch of time.")] = None,
    step: Annotated[bool, typer.Option("--step", help="Walk through the trajectory, attempt by attempt.")] = False,
    serve: Annotated[
        str | None,
        typer.Option("--serve", metavar="PREFIX", help="Write the records to this scratch namespace instead."),
    ] = None,
    speed: Annotated[
        float | None, typer.Option("--speed", metavar="X", min=0.001, help="With --serve: times the pace of the run.")
    ] = None,
    topic_names: Annotated[
        str | None, typer.Option("--topics", metavar="NAME,...", help="With --serve: topics, e.g. turns.requested.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="FIELD=VALUE",
            help="Simulate the run with this change of a scenario field. Repeatable.",
        ),
    ] = None,
) -> None:
    """Show the life of one trajectory, or repeat the decisions of a stretch of time and compare them with the log.

    Exit status 1 if a decision differs. With --what-if simulate the run with a change, with --serve write its records
    again.
    """
    if what_if and (
        trajectory is not None or step or serve is not None or speed is not None or topic_names is not None
    ):
        raise UsageError("--what-if goes with --from and --to, and nothing else")
    if what_if:
        from rose.pipeline.cli.replay_what_if import simulate_change

        simulate_change(common, what_if, since, until)
    elif serve is not None and trajectory is None and not step:
        from rose.pipeline.cli.replay_serve import serve_records

        serve_records(common, serve, since, until, speed=1.0 if speed is None else speed, topics=topic_names)
    elif serve is not None or speed is not None or topic_names is not None:
        raise UsageError("--speed and --topics go with --serve, and --serve takes --from and --to, but no TRAJECTORY")
    elif trajectory is not None and since is None and until is None:
        from rose.pipeline.cli.replay_trajectory import print_replay

        print_replay(common, trajectory, stepwise=step)
    elif trajectory is None and (since or until) and not step:
        from rose.pipeline.cli.replay_decisions import compare_decisions

        compare_decisions(common, since, until)
    else:
        raise UsageError("give a TRAJECTORY, with --step or without, or --from TIME and --to TIME")
