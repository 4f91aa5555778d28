"""The `rose` command as users run it: a process, its output and its exit status."""

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest

from rose.pipeline.config.options import Common
from rose.pipeline.health_server import ProcessUnhealthy, print_health
from rose.schemas.prompts import Prompt
from rose.schemas.samples import Outcome, SampleOutcome
from rose.topics.admin import create_topics
from rose.topics.catalog import CATALOG, OUTCOMES, PROMPTS, Partitions, home_partition
from rose.topics.local_broker import free_ports
from rose.topics.log_reader import read_whole_topics
from rose.topics.writer import Writer
from tests.support.brokers import AnyBroker, any_broker, flags
from tests.support.log_fixtures import Log
from tests.support.roles import role_process, rose, started, stop
from tests.support.waiting import until

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


def on(broker: AnyBroker, namespace: str) -> tuple[str, ...]:
    return flags(broker.settings(namespace))


def refused(done: subprocess.CompletedProcess[str], *words: str, status: int) -> None:
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("rose: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_help_imports_no_heavy_module() -> None:
    program = (
        "import sys\n"
        "from rose.pipeline.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'pydantic', 'numpy', 'plotly', 'confluent_kafka', 'msgspec'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("heavy: []")
    for command in (
        "demo",
        "up",
        "submit",
        "environment",
        "executor",
        "router",
        "trainer",
        "watch",
        "status",
        "why",
        "dlq",
        "audit",
        "replay",
    ):
        assert re.search(rf"\b{command}\b", done.stdout)


HEAVY = {"numpy", "prometheus_client", "pydantic_settings", "torch", "transformers", "tokenizers", "vllm", "faust"}
"""Modules that no status command needs."""


def imported_by(*arguments: str) -> set[str]:
    """Return the modules of a fresh process that has run the command to any end."""
    program = (
        "import sys\n"
        "from rose.pipeline.cli.main import main\n"
        "sys.argv = ['rose', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('\\n' + ' '.join(sys.modules))\n"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, env=without_settings())
    return set(done.stdout.splitlines()[-1].split())


def without_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}


@any_broker
def test_status_command_imports_no_heavy_module(broker: AnyBroker, namespace: str) -> None:
    log = Log(broker.settings(namespace))
    log.group("a")
    log.progress("a:0")
    log.prompt("b")
    log.heartbeat()
    common = on(broker, namespace)
    for look in (("status", *common), ("why", "a:0", *common), ("dlq", "list", *common)):
        imported = imported_by(*look)
        assert "confluent_kafka" in imported, look
        assert not HEAVY & imported, look
    for local in (("health", "127.0.0.1:1"), ("health", *common), ("--help",), ("status", "--help")):
        imported = imported_by(*local)
        assert "rose.pipeline.cli.main" in imported, local
        assert not HEAVY & imported, local


def test_unknown_command_is_a_usage_error() -> None:
    assert started("foo").returncode == 2
    assert rose("replay").returncode == 2


@pytest.mark.slow
def test_topics_are_created_once_described_and_checked(broker: AnyBroker, namespace: str) -> None:
    common = on(broker, namespace)
    missing = rose("topics", "check", *common)
    refused(missing, "rose topics create", status=1)
    assert f"{namespace}rose.prompts.submitted.v1: topic is missing" in missing.stdout
    created = rose("topics", "create", *common)
    assert created.returncode == 0, created.stderr
    assert f"{len(CATALOG)} topics created" in created.stdout
    assert "0 topics created" in rose("topics", "create", *common).stdout
    described = rose("topics", "describe", *common).stdout
    assert all(f"{namespace}{topic.name}" in described for topic in CATALOG)
    assert rose("topics", "check", *common).returncode == 0


@any_broker
def test_create_and_check_report_drift(broker: AnyBroker, namespace: str) -> None:
    common = on(broker, namespace)
    rose("topics", "create", *common, "--set", "topics.home_partitions=2")
    again = rose("topics", "create", *common).stdout
    assert again.count("not changed: ") == 6 and "`rose topics check` says what to do" in again
    drifted = rose("topics", "check", *common)
    refused(drifted, "differs from the catalog in 6 things", status=1)
    assert f"{namespace}rose.turns.requested.v1: partitions is 2, the catalog says 8" in drifted.stdout


@any_broker
@pytest.mark.slow
def test_submit_sends_all_prompts_or_none(broker: AnyBroker, namespace: str, tmp_path: Path) -> None:
    common = on(broker, namespace)
    settings = broker.settings(namespace)
    prompts = [Prompt(group_id=f"g{n}", group_size=2, environment="calculator", seed=n) for n in range(5)]
    good = tmp_path / "prompts.jsonl"
    good.write_bytes(b"\n".join(msgspec.json.encode(prompt) for prompt in prompts))
    refused(rose("submit", str(good), *common), "rose topics create", status=1)
    rose("topics", "create", *common)
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(good.read_bytes() + b"\n{}\n")
    refused(rose("submit", str(bad), *common), "line 6", "nothing was sent", status=2)
    assert list(read_whole_topics(settings, [PROMPTS])) == []
    done = rose("submit", str(good), *common)
    assert done.returncode == 0, done.stderr
    assert "5 prompts submitted, 10 trajectories" in done.stdout
    sent = list(read_whole_topics(settings, [PROMPTS]))
    assert sorted((envelope.record for envelope in sent), key=str) == sorted(prompts, key=str)
    assert all(envelope.partition == home_partition(envelope.key, Partitions().home) for envelope in sent)


@any_broker
@pytest.mark.slow
def test_audit_prints_the_conservation_law_and_its_violations(broker: AnyBroker, namespace: str) -> None:
    common = on(broker, namespace)
    rose("topics", "create", *common)
    settings = broker.settings(namespace)
    writer = Writer(settings, "test")
    writer.write(PROMPTS, Prompt(group_id="g", group_size=2, environment="calculator", seed=0), key="g")
    writer.flush()
    clean = rose("audit", *common)
    assert clean.returncode == 0, clean.stderr
    assert "2 requested = 0 trained" in clean.stdout
    assert "2 not opened" in clean.stdout
    for _ in range(2):
        outcome = SampleOutcome(
            trajectory_id="g:0",
            group_id="g",
            outcome=Outcome.TRAINED,
            step=1,
            policy_version=1,
            recorded_at=0.0,
        )
        writer.write(OUTCOMES, outcome, key="g:0")
    writer.flush()
    broken = rose("audit", *common)
    refused(broken, "conservation law", status=1)
    assert "1 doubled: g:0" in broken.stdout
    output = rose("replay", "g:0", *common)
    assert output.returncode == 0, output.stderr
    assert "calculator, seed 0" in output.stdout
    assert output.stdout.count("trained at step 1") == 2
    for unknown in ("g:2", "h:0", "g"):
        refused(rose("replay", unknown, *common), f"no trajectory {unknown}", status=2)


@pytest.mark.parametrize("command", ["topics create", "audit", "router"])
def test_silent_broker_is_reported_in_one_sentence(command: str) -> None:
    done = rose(*command.split(), "--bootstrap-server", "127.0.0.1:1")
    refused(done, "no Kafka broker answers at 127.0.0.1:1", "--bootstrap-server", status=1)
    assert done.stderr.count("\n") == 1, done.stderr


def test_invalid_settings_are_usage_errors(tmp_path: Path) -> None:
    refused(rose("audit"), "no broker is named", status=2)
    refused(started("audit", "--run", "nowhere", folder=tmp_path), "cannot read runs/nowhere/config.toml", status=2)
    refused(rose("config", "--set", "router.nothing=1"), "no router.nothing", status=2)
    refused(started("config", ROSE_RUTER__X="1"), "ROSE_RUTER__X", status=2)
    unknown = ("--bootstrap-server", "127.0.0.1:1", "-X", "no.such.property=1")
    refused(rose("audit", *unknown), "no.such.property", status=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("evaluate", "--json", "missing/figures.json"), "missing/figures.json cannot be written: name a file"),
        (("keys", "."), "is a folder"),
        (("health", "a..b:9464"), "no HOST:PORT"),
        (("config", "--set", "metrics.port=70000"), "metrics.port (70000) must be a port"),
        (("loadgen", "somewhere"), "somewhere is no address of a server"),
        (("loadgen", "http://127.0.0.1:99999"), "is no address of a server"),
        *(
            ((command, "--set", f"run.folder={folder}", "--bootstrap-server", "127.0.0.1:1"), f"{folder}/demo cannot")
            for command in ("up", "trainer")
            for folder in ("/dev/null", "/dev/null/there", "/proc/there", "/sys/there")
        ),
        (("demo", "--set", "run.folder=/dev/null"), "the run's folder /dev/null cannot be written"),
        (("demo", "--set", "run.folder=/sys/there"), "the run's folder /sys/there cannot be written"),
        (("loadgen", "http://127.0.0.1:1", "--set", "run.folder=/dev/null"), "/dev/null/demo cannot be written"),
    ],
)
def test_usage_error_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = rose(*arguments)
    refused(done, words, status=2)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr


@any_broker
@pytest.mark.parametrize(
    ("name", "folder", "words"),
    [
        ("config.toml", True, "config.toml cannot be used (Is a directory): mend that"),
        ("logs", False, "logs cannot be used (File exists): mend that"),
        ("run.lock", True, "cannot be written (Is a directory"),
        ("prompts.sent", True, "prompts.sent cannot be used (Is a directory): mend that"),
    ],
)
def test_obstacle_in_a_run_folder_is_reported_in_one_sentence(
    broker: AnyBroker, namespace: str, tmp_path: Path, name: str, folder: bool, words: str
) -> None:
    place = tmp_path / "demo" / name
    place.parent.mkdir()
    if folder:
        place.mkdir()
    else:
        place.touch()
    done = rose("up", *on(broker, namespace), "--set", f"run.folder={tmp_path}", "--set", "run.executors=0")
    refused(done, words, status=2)
    assert done.stderr.count("\n") == 1, done.stderr


def test_config_prints_every_value_with_description_and_origin(tmp_path: Path) -> None:
    (tmp_path / "rose.toml").write_text("[router]\nmax_attempts = 3\n")
    done = started("config", "--config", "rose.toml", "--set", "run.seed=7", folder=tmp_path, ROSE_RUN__EXECUTORS="4")
    assert done.returncode == 0, done.stderr
    for words in (
        "not count. (rose.toml)\nmax_attempts = 3\n",
        "# Seed of tasks, sampling and training. (--set run.seed)\nseed = 7\n",
        "(ROSE_RUN__EXECUTORS)\nexecutors = 4\n",
        "(default)\nenvironment_workers = 1\n",
    ):
        assert words in done.stdout


@any_broker
@pytest.mark.slow
def test_environment_worker_is_healthy_once_it_owns_homes(
    broker: AnyBroker, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions())
    (port,) = free_ports(1)

    def has_homes() -> bool:
        try:
            print_health(Common(), f"127.0.0.1:{port}", live=False)
        except ProcessUnhealthy:
            return False
        return "owns homes [0, 1, 2, 3, 4, 5, 6, 7]" in capsys.readouterr().out

    with role_process("environment", settings, 0, {"metrics.port": port}) as worker:
        until(has_homes)
        stop(worker)


@any_broker
@pytest.mark.slow
def test_role_serves_its_metrics_and_stops_with_status_0(broker: AnyBroker, namespace: str, tmp_path: Path) -> None:
    common, settings, log = on(broker, namespace), broker.settings(namespace), tmp_path / "log"
    create_topics(settings, Partitions())
    (port,) = free_ports(1)
    with role_process("router", settings, 0, {"metrics.router": port}, log=log) as router:
        until(lambda: "event=cell_session_started" in log.read_text() or router.poll() is not None)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        well = rose("health", f"127.0.0.1:{port}")
        second = rose("router", *common, "--set", f"metrics.router={port}")
        stop(router)
    assert "rose_router_" in text
    assert (well.returncode, well.stdout) == (0, "serves cell 0 of 1\n"), well.stderr
    refused(second, f"metrics cannot be served on 127.0.0.1:{port}", status=2)
