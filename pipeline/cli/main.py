"""The `rose` command: its subcommands and their options.

Keeps true
- `rose --help` is fast: a command imports what it needs when it runs.
- An error that a user can correct is one sentence on standard error and an exit status, 2 for bad input; never a
  traceback.
"""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rose.pipeline.cli.environment import MOST_NUMBER, environment
from rose.pipeline.cli.replay import replay, why
from rose.pipeline.cli.samples import samples
from rose.pipeline.cli.simulator import calibrate, estimate, simulate
from rose.pipeline.cli.topics import topics
from rose.pipeline.cli.track import track
from rose.pipeline.config.options import Common, keep_docstring, with_common
from rose.pipeline.terminal import (
    WaitNotice,
    escape_control_chars,
    file_error,
    flush_streams,
    print_error,
    repair_streams,
)
from rose.schemas.errors import RoseError, ThreadRefused, UsageError, is_start_refused
from rose.schemas.setting_bounds import MAX_FINISH_SECONDS

RUNNING, ROLES, LOOKING = "Run", "Roles, one process each", "Look"

app = typer.Typer(
    help="Lends idle vLLM serving capacity to agentic RL rollouts, turn by turn, over Kafka.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
dlq = typer.Typer(help="List dead letters, show one, send one back.", no_args_is_help=True)
app.add_typer(environment, name="environment", rich_help_panel=ROLES)
app.add_typer(topics, name="topics", rich_help_panel=LOOKING)
app.add_typer(dlq, name="dlq", rich_help_panel=LOOKING)
app.add_typer(samples, name="samples", rich_help_panel=LOOKING)


def number_option(help_text: str) -> Any:
    """Return the option `--number` of a role of which several processes may run."""
    return typer.Option("--number", metavar="N", min=0, max=MOST_NUMBER, help=help_text)


@app.callback()
def begin() -> None:
    """Set up logging for every command: logs go to standard error, results to standard output."""
    from rose.pipeline.process_setup import configure_logging, dump_stacks_on_crash

    configure_logging()
    dump_stacks_on_crash()


def _check_text(text: str) -> str:
    """Return the text. Raises UsageError for bytes that are not UTF-8, which Python decodes to surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("--reason is not UTF-8 text: give it in UTF-8") from None
    return text


Worker = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Unique name of the worker; default: the host's name.")
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the run.")]
Without = Annotated[
    Path | None,
    typer.Option("--without", metavar="METRICS.jsonl", help="Leave out the groups that a run's metrics.jsonl names."),
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason, for people.", callback=_check_text)]
WorkerName = Annotated[str, typer.Argument(metavar="WORKER", help="Name of the worker, as in `rose status`.")]
Place = Annotated[str, typer.Argument(metavar="PLACE", help="TOPIC/PARTITION/OFFSET, as in `rose dlq list`.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of tasks, sampling and training.")]


@app.command(rich_help_panel=RUNNING)
@with_common
def demo(common: Common, name: Name = None, seed: Seed = None) -> None:
    """Train a small policy on this machine: all roles, success before and after, and a report."""
    from rose.pipeline.local.demo import run_demo

    run_demo(common.with_overrides(name=("run.name", name), seed=("run.seed", seed)))


@app.command(rich_help_panel=RUNNING)
@with_common
def up(
    common: Common,
    name: Name = None,
    seed: Seed = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE.jsonl", help="Prompts to submit at the start.")
    ] = None,
    without: Without = None,
) -> None:
    """Run all roles of a configuration on this machine until the trainer is done."""
    from rose.pipeline.local.run import run_up

    run_up(common.with_overrides(name=("run.name", name), seed=("run.seed", seed)), prompts, without)


@app.command(rich_help_panel=RUNNING)
@with_common
def submit(
    common: Common,
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="File with one prompt a line.")],
    without: Without = None,
) -> None:
    """Write prompts to the input topic. Every line is checked first, and all are sent or none."""
    from rose.pipeline.cli.run_commands import submit_file

    submit_file(common, file, without)


@app.command(rich_help_panel=RUNNING)
@with_common
def evaluate(
    common: Common,
    model: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="Model folder; default: model.folder.")] = None,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File for the results, as JSON.")
    ] = None,
) -> None:
    """Measure the success of a policy on the held-out tasks, at temperature 1, in one process without Kafka."""
    from rose.pipeline.cli.run_commands import evaluate_folder

    evaluate_folder(common, model, output)


@app.command(rich_help_panel=RUNNING)
@with_common
def export(
    common: Common,
    target: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Folder to write; it must not exist.")],
) -> None:
    """Write the newest policy of a run, running or ended, as a Hugging Face model folder."""
    from rose.pipeline.cli.run_commands import export_run

    export_run(common, target)


@app.command(rich_help_panel=ROLES)
@with_common
def executor(common: Common, name: Worker = None) -> None:
    """Run an executor, which runs turns on vLLM and activates new policy versions."""
    from rose.pipeline.cli.roles import run_executor_role

    run_executor_role(common.with_overrides(name=("executor.name", name)))


@app.command(rich_help_panel=ROLES)
@with_common
def lend(
    common: Common,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="Model folder that a new server serves.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="URL", help="URL of an existing server of the policy.")
    ] = None,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- FLAGS", help="Flags of vLLM, after two dashes.")
    ] = None,
    name: Worker = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="Lend nothing: log and export what could be lent. Needs no broker.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="FILE.csv", help="With --observe: append a row of load and idle time every 10 s."
        ),
    ] = None,
) -> None:
    """Run a vLLM server that lends idle capacity to rollouts, or lend an existing server over HTTP."""
    from rose.pipeline.cli.roles import run_endpoint_role, run_lender_role

    common = common.with_overrides(name=("executor.name", name), endpoint=("endpoint.url", endpoint))
    if (model is None) == (endpoint is None) or (endpoint and (flags or observe)):
        raise UsageError("give --model FOLDER, with vLLM's flags after two dashes, or --endpoint URL alone")
    if record is not None and not observe:
        raise UsageError("--record records an observed server: give --observe too")
    if model is not None:
        run_lender_role(common, model, flags or [], observe=observe, record=record)
    else:
        run_endpoint_role(common)


@app.command(rich_help_panel=ROLES)
@with_common
def loadgen(
    common: Common,
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of the server, without a path.")],
) -> None:
    """Replay a trace as load on a serving engine, and write the latency of each request to the run's folder."""
    from rose.pipeline.cli.roles import run_loadgen_role

    run_loadgen_role(common, url)


@app.command(rich_help_panel=ROLES)
@with_common
def router(
    common: Common,
    number: Annotated[int, number_option("Number of this router. Routers share the cells; further routers wait.")] = 0,
) -> None:
    """Run a router, which assigns every turn to an executor."""
    from rose.pipeline.cli.roles import run_router_role

    run_router_role(common, number)


@app.command(rich_help_panel=ROLES)
@with_common
def control(
    common: Common,
    number: Annotated[int, number_option("Number of this control app. One decides; the others wait.")] = 0,
) -> None:
    """Run the control app, which decides by leases which workers lend, and shows the reasons on a page."""
    from rose.pipeline.cli.roles import run_control_role

    run_control_role(common, number)


@app.command(rich_help_panel=ROLES)
@with_common
def trainer(common: Common) -> None:
    """Run the trainer, which learns from finished groups and publishes policy versions."""
    from rose.pipeline.cli.roles import run_trainer_role

    run_trainer_role(common)


@app.command(rich_help_panel=ROLES)
@with_common
def evaluator(common: Common) -> None:
    """Run the evaluator, which has policy versions sampled on prompts that are never trained on."""
    from rose.pipeline.cli.roles import run_evaluator_role

    run_evaluator_role(common)


@app.command(rich_help_panel=ROLES)
@keep_docstring
def keys(file: Annotated[Path, typer.Argument(metavar="FILE", help="File for the private key.")]) -> None:
    """Make the private key with which a trainer signs its versions, and the public key (FILE.pub) for executors."""
    from rose.workers.weights.trust import make_keys

    public = make_keys(file)
    sys.stdout.write(f"weights.signing_key = {file}\nweights.trusted_key = {public}\n")


@app.command(rich_help_panel=RUNNING)
@with_common
def grant(
    common: Common,
    worker: WorkerName,
    lend: Annotated[bool, typer.Option("--lend/--no-lend", help="Lend, or park.")] = True,
    kv_bytes: Annotated[
        int, typer.Option("--kv-bytes", metavar="N", min=0, help="KV cache that turns may hold; 0: no limit.")
    ] = 0,
    token_budget: Annotated[
        int, typer.Option("--token-budget", metavar="N", min=0, help="Tokens that turns may hold; 0: no limit.")
    ] = 0,
    reason: Reason = "",
    release: Annotated[
        bool, typer.Option("--release", help="Delete the manual grant: the control app decides again.")
    ] = False,
) -> None:
    """Make a lending server lend or park until the grant is released; this overrides the control app."""
    from rose.pipeline.cli.interventions import release_grant, send_grant

    if not release:
        send_grant(common, worker, lend=lend, kv_bytes=kv_bytes, token_budget=token_budget, reason=reason)
    elif lend and not (kv_bytes or token_budget or reason):
        release_grant(common, worker)
    else:
        raise UsageError("--release deletes the manual grant and accepts no other option")


@app.command(rich_help_panel=RUNNING)
@with_common
def drain(
    common: Common,
    worker: WorkerName,
    within: Annotated[
        float | None,
        typer.Option(
            "--within",
            metavar="SECONDS",
            min=0,
            max=MAX_FINISH_SECONDS,
            help="Time that running turns may take to end; default: 60.",
        ),
    ] = None,
    reason: Reason = "",
    release: Annotated[bool, typer.Option("--release", help="End the drain: the worker takes turns again.")] = False,
) -> None:
    """Stop new turns for a worker, and wait until it holds none. Its node can then be removed."""
    from rose.pipeline.cli.interventions import DRAIN_TIMEOUT_SECONDS, release_drain
    from rose.pipeline.cli.interventions import drain as drain_worker

    if not release:
        drain_worker(common, worker, within_seconds=DRAIN_TIMEOUT_SECONDS if within is None else within, reason=reason)
    elif within is None and not reason:
        release_drain(common, worker)
    else:
        raise UsageError("--release ends the drain and accepts no other option")


@app.command(rich_help_panel=RUNNING)
@with_common
def settle(
    common: Common,
    name: Annotated[str, typer.Argument(metavar="TRAJECTORY", help="GROUP_ID:INDEX, or GROUP_ID for the whole group.")],
    reason: Reason = "",
) -> None:
    """End a trajectory or a whole group as an infrastructure failure, for instance if it crashes its worker."""
    from rose.pipeline.cli.interventions import settle_by_hand

    settle_by_hand(common, name, reason)


@app.command(rich_help_panel=LOOKING)
@with_common
def watch(common: Common) -> None:
    """Show a live view of a run."""
    from rose.pipeline.cli.run_commands import watch_run

    watch_run(common)


@app.command(rich_help_panel=LOOKING)
@with_common
def status(
    common: Common,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that is known, as JSON.")] = False,
) -> None:
    """Show which role waits for which, and why, on one screen. Exit status 1 if there is a problem."""
    waits = WaitNotice()
    waits.show("loads the Kafka client")
    from rose.pipeline.cli.status import show_status

    show_status(common, as_json=as_json, waits=waits)


@app.command(rich_help_panel=LOOKING)
@with_common
def health(
    common: Common,
    address: Annotated[
        str | None,
        typer.Argument(metavar="HOST:PORT", help="Address of its metrics; default: metrics.port of this machine."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Check only whether the process is alive.")] = False,
) -> None:
    """Say in one sentence whether a process does its work. Exit status 1 if it does not."""
    from rose.pipeline.health_server import print_health

    print_health(common, address, live=live)


app.command(rich_help_panel=LOOKING)(why)


@app.command(rich_help_panel=LOOKING)
@with_common
def audit(common: Common) -> None:
    """Check the conservation law on the log: every trajectory has one end. Exit status 1 if it is broken."""
    from rose.pipeline.cli.run_commands import audit_run

    audit_run(common)


app.command(rich_help_panel=LOOKING)(replay)


@app.command(rich_help_panel=LOOKING)
@with_common
def report(common: Common) -> None:
    """Write summary.json and report.html of a run again, from its log."""
    from rose.pipeline.cli.run_commands import report_run

    report_run(common)


app.command(rich_help_panel=LOOKING)(simulate)
app.command(rich_help_panel=LOOKING)(estimate)
app.command(rich_help_panel=LOOKING)(calibrate)
app.command(rich_help_panel=LOOKING)(track)


@app.command("config", rich_help_panel=LOOKING)
@with_common
def show_config(common: Common) -> None:
    """Print the resolved configuration: every field with its value, meaning and origin. Passwords are hidden."""
    from rose.pipeline.config.load import load, resolved_toml, without_secrets

    sys.stdout.write(without_secrets(resolved_toml(load(common), explained=True)))


@dlq.command("list")
@with_common
def dlq_list(
    common: Common,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="Only dead letters of this topic.")
    ] = None,
) -> None:
    """List the dead letters, one a line: position, time, reason and key."""
    from rose.pipeline.cli.dead_letters import list_dead_letters

    list_dead_letters(common, topic)


@dlq.command("show")
@with_common
def dlq_show(common: Common, place: Place) -> None:
    """Show one dead letter with its headers and its content."""
    from rose.pipeline.cli.dead_letters import show_dead_letter

    show_dead_letter(common, place)


@dlq.command("retry")
@with_common
def dlq_retry(
    common: Common,
    place: Place,
    edit: Annotated[
        Path | None, typer.Option("--edit", metavar="FILE", help="Send the content of this file instead.")
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option("--field", metavar="FIELD=VALUE", help="Set a field of the record. Repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Send it even if it was sent back before.")] = False,
) -> None:
    """Send a dead letter back to its topic, corrected or unchanged."""
    from rose.pipeline.cli.dead_letters import retry_dead_letter

    retry_dead_letter(common, place, edit, field, again=again)


def main() -> None:
    """Run the command; this is the console script."""
    repair_streams()
    try:
        try:
            app()
        finally:
            flush_streams()
    except RoseError as error:
        print_error(escape_control_chars(str(error)))
        sys.exit(error.exit_status)
    except (OSError, RuntimeError) as error:
        refused = file_error(error) if isinstance(error, OSError) else None
        if is_start_refused(error):
            refused = ThreadRefused()
        if refused is None:
            raise
        print_error(escape_control_chars(str(refused)))
        sys.exit(refused.exit_status)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # as in shells


if __name__ == "__main__":
    main()
