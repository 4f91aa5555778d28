"""`rose submit`, `watch`, `audit`, `report`, `export` and `evaluate`: commands on a log or a run's folder."""

import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rose.pipeline.audit import AuditFailed
from rose.pipeline.clock import format_utc as moment
from rose.pipeline.config.load import Config, load
from rose.pipeline.config.options import Common, is_writable
from rose.pipeline.local.broker import live_bus, readable_log
from rose.pipeline.terminal import print_line
from rose.schemas.errors import RoseError, UsageError
from rose.schemas.prompts import Sampling
from rose.topics.acl import PRODUCER, VIEW, connect_as
from rose.workers.evaluate import Evaluation, evaluate_policy
from rose.workers.executor.vllm.types import EngineConfig


def submit_file(common: Common, file: Path, without: Path | None) -> None:
    """`rose submit`: sends the prompts of a file. Raises BadPrompts."""
    from rose.pipeline.local.submit import count_homes, read_prompts, send_prompts

    config = load(common)
    prompts = read_prompts(file, config.environments, without=without)
    settings = config.bus()
    connect_as(settings, PRODUCER)
    count_homes(settings)  # raises TopicMissing before any prompt is sent
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(prompts))
        send_prompts(settings, prompts, sent=lambda: progress.advance(task))
    print_line(f"{len(prompts)} prompts submitted, {sum(prompt.group_size for prompt in prompts)} trajectories")


def watch_run(common: Common) -> None:
    """`rose watch`: shows the live view until Ctrl-C."""
    from rose.pipeline.monitor.follower import follow_run
    from rose.pipeline.monitor.screen import Screen
    from rose.pipeline.process_setup import stop_on_signals

    with live_bus(config := load(common)) as settings:
        connect_as(settings, VIEW)
        stop = stop_on_signals()
        watch = follow_run(config, settings, whole=False)
        try:
            Screen(watch, Console(), title=f"ROSE on {settings.bootstrap}").run(lambda: not stop.is_set())
        finally:
            watch.close()


def audit_run(common: Common) -> None:
    """`rose audit`: prints the audit. Raises AuditFailed if the conservation law does not hold."""
    from rose.pipeline.audit import inspect_log

    with readable_log(load(common)) as settings:
        connect_as(settings, VIEW)
        found = inspect_log(settings)
    audit, terms = found.audit, found.audit.trajectories()
    if found.since is not None:
        print_line(f"looked at the log from {moment(found.since)} on")
    right = " + ".join(f"{count} {name.replace('_', ' ')}" for name, count in terms.items() if name != "requested")
    print_line(f"{terms['requested']} requested = {right}")
    where = audit.in_flight
    if where.total:
        print_line(
            f"in flight: {where.not_opened} not opened, {where.in_a_turn} in a turn, "
            f"{where.waiting_for_trainer} waiting for the trainer"
        )
    for kind, names in (("lost", audit.lost), ("doubled", audit.doubled), ("unasked", audit.unasked)):
        print_line(
            f"{len(names)} {kind}{': ' if names else ''}{', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
        )
    for topic, count in found.dead_letters.items():
        print_line(f"{count} dead letters of {topic.name}: see `rose dlq list`")
    if not audit.clean:
        raise AuditFailed("the conservation law does not hold on this log: see the trajectories above")


def report_run(common: Common) -> None:
    """`rose report`: writes the report again. Raises UsageError if the run never finished."""
    from rose.pipeline.report.write import print_summary, stored_metadata, write_report

    config = load(common)
    facts = stored_metadata(config.run_folder)
    with readable_log(config) as settings:
        connect_as(settings, VIEW)
        summary = write_report(config, settings, facts)
    print_summary(Console(), summary, config.run_folder)


def export_run(common: Common, target: Path) -> None:
    """`rose export`: writes the newest policy of a run to a new model folder. Raises UsageError if there is none."""
    from rose.workers.trainer.export import export_newest

    version = export_newest(load(common).settings.trainer, target)
    print_line(f"policy version {version} is in {target}")


def evaluate_folder(common: Common, model: Path | None, output: Path | None) -> None:
    """Play the held-out tasks, print the success, and write it to the file `output` if given.

    `model` is the model folder; if None, the folder of the configuration. Raises UsageError, EnvironmentFailed or
    NotWritten.
    """
    if output is not None and not is_writable(output):
        raise UsageError(
            f"--json {output} cannot be written: name a file, in a folder that is there and may be written"
        )
    config = load(common)
    sys.path[:0] = config.import_paths()
    evaluation = held_out(config, model or config.settings.model.folder)
    sys.stdout.write(
        f"{evaluation.success:.4f} of {evaluation.tasks} held-out tasks solved, sampled at temperature 1, "
        f"{evaluation.turns / evaluation.tasks:.1f} turns a task\n"
    )
    if output is not None:
        try:
            output.write_bytes(msgspec.json.encode(evaluation))
        except OSError as error:
            raise NotWritten(f"{output} cannot be written ({error.strerror}): the figures are above") from None


def held_out(config: Config, model_folder: Path) -> Evaluation:
    """Play the held-out tasks of the configuration with the policy in `model_folder`, at temperature 1."""
    settings = config.settings
    tasks, executor, environment = settings.tasks, settings.executor, settings.environment
    return evaluate_policy(
        EngineConfig(
            model_folder=model_folder,
            dtype=executor.dtype,
            max_model_len=executor.max_model_len,
            max_running=executor.max_turns,
            kv_cache_bytes=executor.kv_cache_bytes,
            step_tokens=executor.step_tokens,
            seed=0,
        ),
        environment=tasks.environment,
        arguments=tasks.arguments,
        seeds=range(tasks.held_out_seed, tasks.held_out_seed + tasks.held_out),
        sampling=Sampling(temperature=1.0, max_tokens=environment.max_turn_tokens),
        max_turns=tasks.max_turns,
        max_context_tokens=environment.max_context_tokens,
        step_timeout_seconds=environment.step_timeout_seconds,
    )


class NotWritten(RoseError):
    """The evaluation is done, but its result could not be written to the file."""
