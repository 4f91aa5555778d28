"""The environment worker as a program."""

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import structlog

from rose.schemas.errors import UsageError, describe_error
from rose.schemas.prompts import Sampling
from rose.topics.admin import connect
from rose.topics.health import HEALTH, START_SECONDS
from rose.topics.settings import BusSettings
from rose.workers.environments.config import EnvironmentConfig
from rose.workers.environments.jobs import ResultCallback, Runner, RunnerLimits
from rose.workers.environments.process_runner import ProcessRunner
from rose.workers.environments.registry import BUILT_IN, UnknownEnvironment, load_environment
from rose.workers.environments.rounds import Rounds
from rose.workers.environments.runner_pool import LOOK_SECONDS, NewRunner, RunnerPool
from rose.workers.environments.runner_server import ProcessSetup
from rose.workers.environments.runner_supervisor import BEGIN_SECONDS
from rose.workers.environments.sandbox.host import SandboxSettings, configure_sandboxes
from rose.workers.environments.thread_runner import ThreadRunner
from rose.workers.environments.trajectory import TrajectoryRules
from rose.workers.environments.turn_format import TurnFormat
from rose.workers.environments.worker import EnvironmentWorker
from rose.workers.import_path import with_import_paths
from rose.workers.tokenizer import vocabulary_of

PROCESS = "rose.workers.environments.runner_server"
"""Module that a process of environments imports first."""

EXIT_SECONDS = 5.0
"""Time that the process may take to end after the worker has ended."""

log = structlog.get_logger()


def run_environment_worker(settings: BusSettings, config: EnvironmentConfig, name: str, stop: threading.Event) -> None:
    """Run until `stop` is set; being killed at any moment loses nothing.

    `name` identifies the worker: a worker that starts again under the same name continues.
    Raises UsageError for a broken model folder or environment, BrokerUnreachable, TopicMissing, BusError, and
    WorkerFenced when another worker takes the name.
    """
    turn_format = TurnFormat(config.model_folder)
    before = set(threading.enumerate())
    if not all(_in_process(config, name) for name in config.environments):
        sys.path[:] = with_import_paths(config.import_paths)
    configure_sandboxes(_sandbox_settings(config))
    limits = RunnerLimits(
        max_live=config.max_live_environments,
        timeout_seconds=config.step_timeout_seconds,
        max_context_tokens=config.max_context_tokens,
        memory_bytes=config.process_memory_bytes,
        max_runners=config.max_processes,
    )
    stage = RunnerPool(runners_of(config, turn_format, limits), limits)
    try:
        check = begin_environments(config, stage, stop)
        connect(settings)
        sampling = Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_turn_tokens,
            stop_token_ids=turn_format.stop_token_ids,
        )
        worker = EnvironmentWorker(
            settings,
            name,
            rules=TrajectoryRules(
                model_id=config.model_id,
                sampling=sampling,
                turn_patience_seconds=config.turn_patience_seconds,
                max_context_tokens=config.max_context_tokens,
                vocabulary=vocabulary_of(config.model_folder),
                members_ratio=config.members_ratio,
                deadline_seconds=config.trajectory_deadline_seconds,
            ),
            rounds=Rounds(
                window_groups=config.window_groups,
                groups_ratio=config.groups_ratio,
                max_deferrals=config.max_deferrals,
            ),
            runners=stage,
            check_environment=check,
        )
        worker.run(stop)
    finally:
        stage.close()
        _end_soon(before)


def _sandbox_settings(config: EnvironmentConfig) -> SandboxSettings:
    return SandboxSettings(
        store=str(config.sandbox_store.resolve()) if config.sandbox_store else "",
        store_seconds=config.sandbox_store_seconds,
        bytes_per_second=config.sandbox_bytes_per_second,
    )


def _in_process(config: EnvironmentConfig, name: str) -> bool:
    """Whether environments of this name run in a process of their own."""
    return config.isolation == "process" or (config.isolation == "auto" and name not in BUILT_IN)


def runners_of(config: EnvironmentConfig, turn_format: TurnFormat, limits: RunnerLimits) -> NewRunner:
    """Return a function that makes the runner of a kind of environments. Raises UsageError."""
    own_folders = [str(path.resolve()) for path in config.import_paths]
    if config.python is not None:
        _check_python(config.python)

    def new_runner(name: str, answer: ResultCallback, life: int) -> Runner:
        if not _in_process(config, name):
            return ThreadRunner(turn_format, lambda own: load_environment(own)(), answer, limits, generation=life)
        kind = ProcessSetup(
            environment=name,
            model_folder=str(config.model_folder.resolve()),
            import_paths=with_import_paths(config.import_paths) if config.python is None else own_folders,
            own_python=config.python is not None,
            limits=limits,
            generation=life,
            sandboxes=_sandbox_settings(config),
        )
        return ProcessRunner(kind, answer, python=str(config.python.absolute()) if config.python else sys.executable)

    return new_runner


def _check_python(python: Path) -> None:
    """Raises UsageError if the interpreter cannot run environments of this worker."""
    own, ask = (
        version("rose-rollouts"),
        f"import {PROCESS}; import importlib.metadata as m; print(m.version('rose-rollouts'))",
    )
    try:
        asked = subprocess.run([python, "-P", "-c", ask], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(
            f"environment.python: {python} cannot be run ({error.strerror}): name an interpreter"
        ) from None
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"it ends with status {asked.returncode}"])[-1]
        raise UsageError(
            f"environment.python: {python} cannot import ROSE ({last}): install rose-rollouts {own} for it"
        )
    if (found := asked.stdout.strip()) != own:
        raise UsageError(f"environment.python: {python} has rose-rollouts {found}, and the worker {own}: install {own}")


def begin_environments(config: EnvironmentConfig, stage: RunnerPool, stop: threading.Event) -> Callable[[str], None]:
    """Return a check that refuses names other than built-in ones and those of the configuration.

    A prompt comes from the bus: importing any name in a prompt would run code that the sender of the prompt chose.
    Environments of the configuration that run in processes are imported only there. Raises UsageError for a name of the
    configuration that cannot be loaded.
    """
    own = dict.fromkeys(config.environments)
    if own:
        log.info("environments_loading", names=[*own])
        HEALTH.report(f"loads {', '.join(own)}", ready=False, lasts_seconds=START_SECONDS)
    runners = {name: _warm_up(stage, name) for name in own if _in_process(config, name)}
    for name in own:
        if name not in runners:
            load_environment(name)
    deadline = time.monotonic() + BEGIN_SECONDS
    for name, runner in runners.items():
        while not (runner.ready or runner.exit_reason or stop.wait(LOOK_SECONDS)):
            if time.monotonic() > deadline:
                raise UnknownEnvironment(f"environment {name!r}: its import takes longer than {BEGIN_SECONDS:g} s")
        if runner.exit_reason:
            how = f"its import ends the process, which{runner.exit_reason}: correct the module"
            raise UnknownEnvironment(runner.load_error or f"environment {name!r}: {how}")

    @functools.cache
    def check(name: str) -> None:
        if name in own:
            return
        if name not in BUILT_IN:
            known = ", ".join([*BUILT_IN, *own])
            raise UnknownEnvironment(
                f"unknown environment {name!r}: this worker has {known}; all workers of a namespace need the same "
                "environment.environments"
            )
        load_environment(name)

    return check


def _warm_up(stage: RunnerPool, name: str) -> Runner:
    try:
        return stage.warm_up(name)
    except (OSError, RuntimeError) as error:
        raise UsageError(
            f"environment {name!r}: a process for it cannot be started ({describe_error(error)})"
        ) from None


def _end_soon(before: set[threading.Thread]) -> None:
    """End this process though environments have left threads behind that Python would wait for."""
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in before]
    if not left or threading.current_thread() is not threading.main_thread():
        return
    log.warning("environment_threads_left", threads=left)
    status = 1 if sys.exc_info()[0] else 0

    def end() -> None:
        time.sleep(EXIT_SECONDS)
        os._exit(status)

    threading.Thread(target=end, name="end-soon", daemon=True).start()
