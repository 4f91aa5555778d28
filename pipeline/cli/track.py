"""`rose track`: gives the figures of each training step to an experiment tracker.

Keeps true: `rose --help` is fast: a command imports what it needs when it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from rose.pipeline.config.options import Common, with_common


@with_common
def track(
    common: Common,
    tracker: Annotated[str, typer.Option("--to", metavar="TRACKER", help="`tensorboard`, `mlflow` or `trackio`.")],
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="Folder of TensorBoard; default: tensorboard in the run's."),
    ] = None,
    project: Annotated[
        str, typer.Option("--project", metavar="NAME", help="Experiment of MLflow, project of trackio.")
    ] = "rose",
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of this consumer; default: that of the tracker.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End at the present end of the log; do not wait.")] = False,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Write all steps of the log, not only what is new.")
    ] = False,
) -> None:
    """Give the figures of each training step to a tracker, until stopped; a new start goes on from there."""
    from rose.pipeline.cli.track_run import track_run

    track_run(common, tracker, folder=folder, project=project, name=name, once=once, from_start=from_start)
