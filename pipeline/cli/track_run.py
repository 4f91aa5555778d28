"""The loop of `rose track`: step by step from the log to the tracker, then the commit.

Keeps true: offsets are committed after the tracker has stored the steps before them. A kill in between repeats a step,
and a repeated step replaces itself.
"""

import re
from contextlib import closing
from pathlib import Path
from threading import Event

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.broker import readable_log, starts_own_broker
from rose.pipeline.process_setup import stop_on_signals
from rose.pipeline.terminal import print_line
from rose.pipeline.tracking.evaluations import EvaluationTracking
from rose.pipeline.tracking.log import StepLog
from rose.pipeline.tracking.trackers import Target, Tracker, open_tracker
from rose.schemas.errors import UsageError
from rose.topics.acl import TRACKER, connect_as
from rose.workers.weights.trust import run_id

FLUSHED_STEPS = 100
"""Steps that are written before they are stored and committed, while the tracker catches up."""

NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
"""Names of consumers, which are a part of the name of a group."""


def track_run(
    common: Common, tracker: str, *, folder: Path | None, project: str, name: str | None, once: bool, from_start: bool
) -> None:
    """Write steps until a signal, or to the end of the log if `once` or the run has ended. Raises RoseError."""
    if not NAME.fullmatch(name or tracker):
        raise UsageError(f"--name {name} is no name: use up to 100 letters, digits, dots, dashes and underscores")
    if folder is not None and tracker != "tensorboard":
        raise UsageError("--folder is that of TensorBoard's event files: it goes with --to tensorboard")
    config = load(common)
    target = Target(
        run=f"{config.settings.broker.namespace}{config.settings.run.name}",
        project=project,
        folder=folder or config.run_folder / "tensorboard",
    )
    follow = not once and not starts_own_broker(config)
    writer = open_tracker(tracker, target)
    stop = stop_on_signals()
    try:
        with readable_log(config) as settings:
            connect_as(settings, TRACKER)
            model = config.settings.trainer.model_id
            run = run_id(settings.namespace, config.weights.run)
            evaluations = EvaluationTracking(
                settings, model, run, lambda: open_tracker(tracker, target.for_evaluations)
            )
            with (
                closing(evaluations),
                StepLog(settings, model, name or tracker, from_start=from_start) as log,
            ):
                count = write_steps(log, writer, follow=follow, stop=stop, evaluations=evaluations)
    finally:
        writer.close()
    print_line(f"{count} steps written to {tracker}")


def write_steps(
    log: StepLog, tracker: Tracker, *, follow: bool, stop: Event, evaluations: EvaluationTracking | None = None
) -> int:
    """Write the steps of the log to the tracker, and return how many. Raises RoseError.

    `evaluations`: writes the results of evaluations at each end of the log.
    """
    count, pending = 0, 0
    for point in log.steps(follow=follow, should_stop=stop.is_set):
        if point is not None:
            tracker.write(point)
            count, pending = count + 1, pending + 1
        if pending and (point is None or pending >= FLUSHED_STEPS):
            tracker.flush()
            log.commit()
            pending = 0
        if point is None and evaluations is not None:
            evaluations.update()
    if pending:
        tracker.flush()
        log.commit()
    return count
