"""`rose up`: a configuration's whole run on this machine."""

from pathlib import Path
from time import monotonic, time

from rich.console import Console

from pipeline.command.broker import run_broker
from pipeline.command.closing import facts_now, show_summary, write_report
from pipeline.command.config import load
from pipeline.command.folder import RUN, held
from pipeline.command.options import Common
from pipeline.command.session import Interrupted, prepare, roles_nursery, run_roles, serving_beside
from pipeline.command.submit import read_prompts
from pipeline.report.summary import Success


def run_up(common: Common, prompts_file: Path | None, without: Path | None) -> None:
    """Until the trainer is done or the user ends it; the same name again goes on where the run was."""
    config = load(common)
    console = Console()
    prompts = read_prompts(prompts_file, config.environments, without=without) if prompts_file is not None else []
    started_at, began = time(), monotonic()
    with held(config.run_folder, RUN), roles_nursery() as nursery, run_broker(config) as broker:
        console.print(f"[bold]ROSE[/bold] on {broker.settings.bootstrap} ({broker.name}), in {config.run_folder}")
        try:
            configuration = prepare(config, broker)
            with serving_beside(config, configuration, nursery) as serving:
                run_roles(
                    config,
                    broker,
                    nursery,
                    console,
                    configuration=configuration,
                    serving=serving,
                    prompts=prompts,
                    title=config.settings.run.name,
                )
        except Interrupted:
            console.print("ended before the trainer was done; the same command goes on from here")
        facts = facts_now(broker.name, started_at=started_at, seconds=monotonic() - began, success=Success())
        show_summary(console, write_report(config, broker.settings, facts), config.run_folder)
