"""The `rose` command: its subcommands and their options.

Keeps true
- `rose --help` is fast: a command imports what it needs when it runs.
- An error that a user can correct is one sentence on standard error and an exit status, 2 for bad input; never a
  traceback.
"""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from rose.pipeline.cli.command_groups import dlq, topics
from rose.pipeline.config.field_docs import keep_docstring
from rose.pipeline.config.options import Common, with_common
from rose.pipeline.process.standard_streams import flush_streams, print_error, repair_streams
from rose.pipeline.process.terminal import WaitNotice, escape_control_chars, file_error
from rose.schemas.errors import RoseError, UsageError
from rose.schemas.setting_bounds import MAX_FINISH_SECONDS

MOST_NUMBER = 65_535
"""Largest number of a process of one kind."""

RUNNING, ROLES, LOOKING = "Run", "Roles, one process each", "Look"

app = typer.Typer(
    help="Lends idle vLLM serving capacity to agentic RL rollouts, turn by turn, over Kafka.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(topics, name="topics", rich_help_panel=LOOKING)
app.add_typer(dlq, name="dlq", rich_help_panel=LOOKING)


@app.callback()
def begin() -> None:
    """Before any command: what is logged goes to standard error, what was asked for to standard output."""
    from rose.pipeline.process.process_setup import configure_logging, dump_stacks_on_crash

    configure_logging()
    dump_stacks_on_crash()


def _check_text(text: str) -> str:
    """Return the text. Raises UsageError for bytes that are not UTF-8, which Python decodes to surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("--reason is not UTF-8 text: give it in UTF-8") from None
    return text


Worker = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Its own on the bus; left out, the host's.")]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the run.")]
Without = Annotated[
    Path | None,
    typer.Option("--without", metavar="METRICS.jsonl", help="Leave out the groups that a run's metrics.jsonl names."),
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="For people.", callback=_check_text)]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of tasks, sampling and training.")]


@app.command(rich_help_panel=RUNNING)
@with_common
def demo(common: Common, name: Name = None, seed: Seed = None) -> None:
    """A policy that learns: everything on this machine, success measured before and after, and a report."""
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
    """All roles of a configuration on this machine, until the trainer is done."""
    from rose.pipeline.local.run import run_up

    run_up(common.with_overrides(name=("run.name", name), seed=("run.seed", seed)), prompts, without)


@app.command(rich_help_panel=RUNNING)
@with_common
def submit(
    common: Common,
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One prompt a line.")],
    without: Without = None,
) -> None:
    """Prompts to the input topic: every line is checked first, and all are sent or none."""
    from rose.pipeline.cli.run_commands import submit_file

    submit_file(common, file, without)


@app.command(rich_help_panel=RUNNING)
@with_common
def evaluate(
    common: Common,
    model: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Model folder; left out, model.folder.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")] = None,
) -> None:
    """Success of a policy on the held-out tasks, sampled at temperature 1, in one process without Kafka."""
    from rose.pipeline.cli.evaluate import evaluate_folder

    evaluate_folder(common, model, output)


@app.command(rich_help_panel=ROLES)
@with_common
def environment(
    common: Common,
    number: Annotated[
        int, typer.Option("--number", metavar="N", min=0, max=MOST_NUMBER, help="Which environment worker this is.")
    ] = 0,
) -> None:
    """An environment worker: opens groups, steps environments, asks for turns."""
    from rose.pipeline.cli.roles import run_environment

    run_environment(common, number)


@app.command(rich_help_panel=ROLES)
@with_common
def executor(common: Common, name: Worker = None) -> None:
    """A rollout executor: runs turns on vLLM and takes up new policy versions."""
    from rose.pipeline.cli.roles import run_executor_role

    run_executor_role(common.with_overrides(name=("executor.name", name)))


@app.command(rich_help_panel=ROLES)
@with_common
def lend(
    common: Common,
    model: Annotated[Path | None, typer.Option("--model", metavar="FOLDER", help="What a new server serves.")] = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="URL", help="A server of the policy that is there already.")
    ] = None,
    flags: Annotated[list[str] | None, typer.Argument(metavar="-- FLAGS", help="vLLM's own, after two dashes.")] = None,
    name: Worker = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="Lend nothing: log and export what could be lent. Needs no broker.")
    ] = False,
) -> None:
    """A vLLM server that runs rollout turns while it has nothing to serve; or turns by request, from one elsewhere."""
    from rose.pipeline.cli.roles import run_endpoint_role, run_lender_role

    common = common.with_overrides(name=("executor.name", name), endpoint=("endpoint.url", endpoint))
    if (model is None) == (endpoint is None) or (endpoint and (flags or observe)):
        raise UsageError("give --model FOLDER, with vLLM's flags after two dashes, or --endpoint URL alone")
    if model is not None:
        run_lender_role(common, model, flags or [], observe=observe)
    else:
        run_endpoint_role(common)


@app.command(rich_help_panel=ROLES)
@with_common
def loadgen(
    common: Common,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where the server answers, without a path.")],
) -> None:
    """Load on a serving engine, replayed from a trace; how long each request took goes to the run's folder."""
    from rose.pipeline.cli.roles import run_loadgen_role

    run_loadgen_role(common, url)


@app.command(rich_help_panel=ROLES)
@with_common
def router(
    common: Common,
    number: Annotated[
        int,
        typer.Option(
            "--number",
            metavar="N",
            min=0,
            max=MOST_NUMBER,
            help="Which router this is: they share the cells, any more wait.",
        ),
    ] = 0,
) -> None:
    """The router: places every turn on an executor."""
    from rose.pipeline.cli.roles import run_router_role

    run_router_role(common, number)


@app.command(rich_help_panel=ROLES)
@with_common
def control(
    common: Common,
    number: Annotated[
        int,
        typer.Option(
            "--number",
            metavar="N",
            min=0,
            max=MOST_NUMBER,
            help="Which control app this is: one decides, any others wait.",
        ),
    ] = 0,
) -> None:
    """The control app: decides which serving workers lend, by leases that it renews, and shows why on a page."""
    from rose.pipeline.cli.roles import run_control_role

    run_control_role(common, number)


@app.command(rich_help_panel=ROLES)
@with_common
def trainer(common: Common) -> None:
    """The trainer: learns from finished groups and publishes policy versions."""
    from rose.pipeline.cli.roles import run_trainer_role

    run_trainer_role(common)


@app.command(rich_help_panel=ROLES)
@keep_docstring
def keys(file: Annotated[Path, typer.Argument(metavar="FILE", help="where the private key goes")]) -> None:
    """Make the key with which a trainer signs its versions, and the public one (FILE.pub) for executors."""
    from rose.workers.weights.trust import make_keys

    public = make_keys(file)
    sys.stdout.write(f"weights.signing_key = {file}\nweights.trusted_key = {public}\n")


@app.command(rich_help_panel=RUNNING)
@with_common
def grant(
    common: Common,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As `rose status` names it.")],
    lend: Annotated[bool, typer.Option("--lend/--no-lend", help="Lend, or park.")] = True,
    kv_bytes: Annotated[
        int, typer.Option("--kv-bytes", metavar="N", min=0, help="KV cache that turns may hold; 0: no limit.")
    ] = 0,
    token_budget: Annotated[
        int, typer.Option("--token-budget", metavar="N", min=0, help="Tokens that turns may hold; 0: no limit.")
    ] = 0,
    reason: Reason = "",
    release: Annotated[
        bool, typer.Option("--release", help="Take the grant by hand back: the control app decides again.")
    ] = False,
) -> None:
    """Have a lending server lend, or park, whatever the control app says, until that is taken back."""
    from rose.pipeline.cli.grants import release_grant, send_grant

    if not release:
        send_grant(common, worker, lend=lend, kv_bytes=kv_bytes, token_budget=token_budget, reason=reason)
    elif lend and not (kv_bytes or token_budget or reason):
        release_grant(common, worker)
    else:
        raise UsageError("--release takes a grant back, and says nothing else: give it alone")


@app.command(rich_help_panel=RUNNING)
@with_common
def drain(
    common: Common,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As `rose status` names it.")],
    within: Annotated[
        float | None,
        typer.Option(
            "--within",
            metavar="SECONDS",
            min=0,
            max=MAX_FINISH_SECONDS,
            help="What it holds may end for so long; default 60.",
        ),
    ] = None,
    reason: Reason = "",
    release: Annotated[bool, typer.Option("--release", help="Take the drain back: it takes turns again.")] = False,
) -> None:
    """Have an executor or a lending server take no more turns, and wait until it holds none: its node can go then."""
    from rose.pipeline.cli.grants import DRAIN_TIMEOUT_SECONDS, release_drain
    from rose.pipeline.cli.grants import drain as drain_worker

    if not release:
        drain_worker(common, worker, within_seconds=DRAIN_TIMEOUT_SECONDS if within is None else within, reason=reason)
    elif within is None and not reason:
        release_drain(common, worker)
    else:
        raise UsageError("--release takes a drain back, and says nothing else: give it alone")


@app.command(rich_help_panel=RUNNING)
@with_common
def settle(
    common: Common,
    name: Annotated[str, typer.Argument(metavar="TRAJECTORY", help="GROUP_ID:INDEX, or a GROUP_ID: all of it.")],
    reason: Reason = "",
) -> None:
    """End a trajectory, or all of a group, as a failure of the infrastructure: one that ends its worker, say."""
    from rose.pipeline.cli.settle import settle_by_hand as settle_by_hand

    settle_by_hand(common, name, reason)


@app.command(rich_help_panel=LOOKING)
@with_common
def watch(common: Common) -> None:
    """A live view of a run."""
    from rose.pipeline.cli.run_commands import watch_run

    watch_run(common)


@app.command(rich_help_panel=LOOKING)
@with_common
def status(
    common: Common,
    as_json: Annotated[bool, typer.Option("--json", help="Everything that is known, for programs.")] = False,
) -> None:
    """Who waits for whom, and why, on one screen. Exit status 1 if something is unwell."""
    waits = WaitNotice()
    waits.show("loads what it looks with")
    from rose.pipeline.cli.status import show_status

    show_status(common, as_json=as_json, waits=waits)


@app.command(rich_help_panel=LOOKING)
@with_common
def health(
    common: Common,
    address: Annotated[
        str | None, typer.Argument(metavar="HOST:PORT", help="Its metrics; left out, metrics.port of this machine.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Whether its loop turns over at all.")] = False,
) -> None:
    """Whether one process does what it is there for, in a sentence. Exit status 1 if it does not."""
    from rose.pipeline.process.health_server import print_health

    print_health(common, address, live=live)


@app.command(rich_help_panel=LOOKING)
@with_common
def why(
    common: Common,
    name: Annotated[str, typer.Argument(metavar="TRAJECTORY", help="GROUP_ID:INDEX, or a GROUP_ID.")],
) -> None:
    """Where a trajectory or a group is, and why, in a sentence."""
    from rose.pipeline.cli.replay import print_why

    print_why(common, name)


@app.command(rich_help_panel=LOOKING)
@with_common
def audit(common: Common) -> None:
    """The conservation law, from the log alone: one end for every trajectory. Exit status 1 if it is broken."""
    from rose.pipeline.cli.run_commands import audit_run

    audit_run(common)


@app.command(rich_help_panel=LOOKING)
@with_common
def replay(
    common: Common, trajectory: Annotated[str, typer.Argument(metavar="TRAJECTORY", help="GROUP_ID:INDEX")]
) -> None:
    """The life of one trajectory, turn by turn."""
    from rose.pipeline.cli.replay import print_replay

    print_replay(common, trajectory)


@app.command(rich_help_panel=LOOKING)
@with_common
def report(common: Common) -> None:
    """Write summary.json and report.html of a run again, from its log."""
    from rose.pipeline.cli.run_commands import report_run

    report_run(common)


@app.command("config", rich_help_panel=LOOKING)
@with_common
def show_config(common: Common) -> None:
    """The resolved configuration: every field, its value, what it is and who said so. Passwords are not shown."""
    from rose.pipeline.config.load import load, resolved_toml, without_secrets

    sys.stdout.write(without_secrets(resolved_toml(load(common), explained=True)))


def main() -> None:
    """The console script."""
    repair_streams()
    try:
        try:
            app()
        finally:
            flush_streams()
    except RoseError as error:
        print_error(escape_control_chars(str(error)))
        sys.exit(error.exit_status)
    except OSError as error:
        if (refused := file_error(error)) is None:
            raise
        print_error(escape_control_chars(str(refused)))
        sys.exit(refused.exit_status)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # as in shells


if __name__ == "__main__":
    main()
