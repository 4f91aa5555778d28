"""The configuration: one precedence, one sentence per error, and TOML output that round-trips."""

import dataclasses
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.pipeline.cli.replay_trajectory import print_why
from rose.pipeline.cli.run_commands import watch_run
from rose.pipeline.config.load import Config, load, resolved_toml, without_secrets, without_settings
from rose.pipeline.config.options import Common
from rose.pipeline.config.settings import field_docs, section_types
from rose.pipeline.local.broker import DATA_FOLDER, RunBroker, readable_log, run_broker
from rose.pipeline.local.run import write_configuration
from rose.schemas.errors import UsageError
from rose.topics.errors import BrokerUnreachable
from rose.topics.settings import BusSettings
from tests.support.config_fixtures import forget_rose_variables, in_file, refusal


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_rose_variables(monkeypatch)


def test_flags_override_environment_file_and_defaults_in_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = in_file(tmp_path, "[router]\nmax_attempts = 3\nmax_lag_versions = 3\n[run]\nexecutors = 3\nseed = 3\n")
    monkeypatch.setenv("ROSE_ROUTER__MAX_LAG_VERSIONS", "4")
    monkeypatch.setenv("ROSE_RUN__EXECUTORS", "4")
    config = load(dataclasses.replace(common, settings=["run.executors=5"]).with_overrides(seed=("run.seed", 6)))
    router, run = config.settings.router, config.settings.run
    assert (router.max_attempts, router.max_lag_versions, run.executors, run.seed) == (3, 4, 5, 6)
    assert run.environment_workers == section_types()["run"]().environment_workers
    flags = [
        config.origins.get(f"{path}") for path in ("router.max_attempts", "router.max_lag_versions", "run.executors")
    ]
    assert flags == [str(tmp_path / "rose.toml"), "ROSE_ROUTER__MAX_LAG_VERSIONS", "--set run.executors"]
    assert config.origins["run.seed"] == "--seed"
    assert "run.environment_workers" not in config.origins


def test_stored_run_configuration_keeps_its_flags_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roles of a run read this configuration: with another broker or name they would work for another run."""
    monkeypatch.setenv("ROSE_ROUTER__MAX_ATTEMPTS", "4")
    monkeypatch.setenv("rose_broker__namespace", "other.")
    monkeypatch.setenv("ROSE_BOOTSTRAP", "no setting")
    common = Common(settings=["router.max_attempts=5", f"run.folder={tmp_path}"], namespace="own.")
    written = write_configuration(load(common), RunBroker(BusSettings("named:1", "own."), "named", None))
    read = load(Common(config=written), resolved=True).settings
    assert (read.router.max_attempts, read.broker.namespace, read.broker.bootstrap_server) == (5, "own.", "named:1")
    kept = without_settings(os.environ)
    assert kept.keys() ^ os.environ.keys() == {"ROSE_ROUTER__MAX_ATTEMPTS", "rose_broker__namespace"}


def test_moved_run_folder_is_refused_with_its_former_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo" / DATA_FOLDER).mkdir(parents=True)
    closed = "127.0.0.1:1"
    write_configuration(load(Common()), RunBroker(BusSettings(closed), "own", None))
    (tmp_path / "runs" / "demo").rename(tmp_path / "runs" / "old")
    moved = load(Common(config=Path("runs/old/config.toml")))
    for reach in (readable_log, run_broker):
        with pytest.raises(UsageError, match=r"runs/old was in runs/demo.*move the folder back"), reach(moved):
            pass


def test_run_in_a_renamed_folder_is_refused_before_another_run_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run may have the folder that the file names."""
    monkeypatch.chdir(tmp_path)
    named = RunBroker(BusSettings("named:1"), "named", None)
    write_configuration(load(Common()), named)
    (tmp_path / "runs" / "demo").rename(tmp_path / "runs" / "old")
    write_configuration(load(Common()), named)
    assert "runs/old was in runs/demo, as its config.toml says: move the folder back" in refusal(Common(run="old"))
    assert load(Common(run="old", settings=["run.name=again"])).settings.run.name == "again"
    assert load(Common(run="demo")).run_folder == Path("runs/demo")
    assert load(Common(run=str(tmp_path / "runs" / "demo"))).run_folder == Path("runs/demo")


@pytest.mark.parametrize(
    ("look", "own", "says"),
    [
        (watch_run, True, "the run has ended: `rose status` starts its broker to look at it, and `rose up`"),
        (
            watch_run,
            False,
            "runs/demo/config.toml has it there: start it, or say where it is now by",
        ),
        (
            lambda common: print_why(common, "a:0"),
            False,
            "one that `rose up` started had its log in runs/demo/broker, which is not there",
        ),
    ],
)
def test_unreachable_broker_error_names_the_source_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Common], None], own: bool, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_configuration(load(Common()), RunBroker(BusSettings("127.0.0.1:1"), "own", None))
    if own:
        (tmp_path / "runs" / "demo" / DATA_FOLDER).mkdir()
    with pytest.raises(BrokerUnreachable, match=r"no Kafka broker answers at 127\.0\.0\.1:1") as unreachable:
        look(Common(run="demo"))
    assert says in str(unreachable.value)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ROSE_ENVIRONMENT", "production", "say its fields one by one, as ROSE_ENVIRONMENT__FIELD"),
        ("ROSE_RUN", '"x"', "ROSE_RUN__FIELD"),
        ("ROSE_RUN__NAME__X", "3", "run.name: Input should be a valid string"),
        ("rose_rn__name", "x", "did you mean run?"),
        ("ROSE_RUN_SEED", "77", "write it as ROSE_RUN__SEED"),
        ("rose_broker_bootstrap_server", "b:1", "write it as ROSE_BROKER__BOOTSTRAP_SERVER"),
        ("ROSE_TASKS__ARGUMENTS", '{"a": 1, "a": 2}', "ROSE_TASKS__ARGUMENTS: the key `a` is there twice"),
    ],
)
def test_invalid_environment_variable_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert words in refusal(Common())


def test_kubernetes_service_variable_is_not_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_METRICS_PORT", "tcp://10.0.0.7:9100")
    assert load(Common()).settings.metrics.port == 0


def test_variables_that_differ_only_by_case_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_RUN__SEED", "1")
    monkeypatch.setenv("rose_run__seed", "2")
    message = refusal(Common())
    assert "ROSE_RUN__SEED" in message and "rose_run__seed" in message


@pytest.mark.parametrize(
    ("whole", "value"), [("ROSE_RUN__NAME", "a"), ("ROSE_BROKER__PROPERTIES", '{"client.rack": "a"}')]
)
def test_variable_for_a_part_of_another_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, whole: str, value: str
) -> None:
    monkeypatch.setenv(f"{whole}__x", "1")
    monkeypatch.setenv(whole, value)
    assert refusal(Common()).startswith(f"{whole}__x says a part of what {whole} says")


def test_line_end_is_not_part_of_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_BROKER__BOOTSTRAP_SERVER", "host:9092\n")
    assert load(Common()).settings.broker.bootstrap_server == "host:9092"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[run]\nname = ""\n', "run.name ('')"),
        ("[run]\nenvironment_workers = 9\n", "run.environment_workers (9)"),
        ('[broker]\nnamespace = "a b"\n', "broker.namespace ('a b')"),
        ("[run]\nseed = 1\nname = 'a'\nseed = 2", "at seed"),
        ("[run]\nseed = 1\n[run]\nname = 'a'\n", "at [run]"),
        ("[tasks]\nsteps = ?\n", "at steps"),
    ],
)
def test_error_in_a_file_names_the_file_and_the_key(tmp_path: Path, text: str, words: str) -> None:
    message = refusal(in_file(tmp_path, text))
    assert words in message and "rose.toml" in message


def test_value_that_breaks_the_toml_syntax_is_not_shown(tmp_path: Path) -> None:
    message = refusal(in_file(tmp_path, '[broker.properties]\n"sasl.password" = hidden\n'))
    assert 'at "sasl.password"' in message and "hidden" not in message


def test_flag_table_with_a_duplicate_key_is_refused() -> None:
    assert "`a` is there twice" in refusal(Common(settings=['tasks.arguments={"a": 1, "a": 2}']))


def test_empty_path_of_the_configuration_is_refused_as_such() -> None:
    assert "--config is empty" in refusal(Common(config=Path()))


def test_numeric_name_in_a_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert "run.name: Input should be a valid string" in refusal(in_file(tmp_path, "[run]\nname = 3\n"))


def test_librdkafka_flags_are_merged_over_file_settings(tmp_path: Path) -> None:
    more = tmp_path / "client.properties"
    more.write_text("# a comment\nsasl.username=file\nssl.ca.location = /ca.pem\n")
    toml = '[broker]\nproperties = { "sasl.mechanism" = "PLAIN", "sasl.username" = "toml" }\n'
    common = dataclasses.replace(in_file(tmp_path, toml), command_config=more, properties=["sasl.username=flag"])
    assert load(common).settings.broker.properties == {
        "sasl.mechanism": "PLAIN",
        "sasl.username": "flag",
        "ssl.ca.location": "/ca.pem",
    }


def test_shared_role_fields_follow_their_source_section(tmp_path: Path) -> None:
    config = load(Common(settings=[f"model.folder={tmp_path}", "model.id=other", "run.seed=7"]))
    assert config.settings.executor.model_id == config.settings.trainer.model_id == "other"
    assert config.settings.trainer.seed == 7
    assert config.settings.environment.model_folder == config.settings.executor.model_folder == tmp_path
    assert config.settings.trainer.run_folder == config.run_folder


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[router]\nmax_atempts = 3\n", ["rose.toml", "router.max_atempts", "did you mean max_attempts"]),
        ("[topics]\nsamples_retention_seconds = 59\n", ["topics", "samples_retention_seconds (59.0) must be from 60"]),
        ("[topics]\nweights_retention_seconds = 60\n", ["weights_retention_seconds (60.0) must be from 3600"]),
        ("[topics]\ndispatches_retention_seconds = 60\n", ["dispatches_retention_seconds (60.0) must be from 600"]),
        (
            "[topics]\nsamples_retention_seconds = 5e6\n",
            ["outcomes_retention_seconds (2592000) must not be less than samples_retention_seconds (5000000)", "again"],
        ),
        (
            "[topics]\ndead_letters_retention_seconds = 3600\n",
            ["dead_letters_retention_seconds (3600) must not be less than prompts_retention_seconds (604800)", "again"],
        ),
        ("[ruter]\nmax_attempts = 3\n", ["rose.toml", "no section ruter", "did you mean router"]),
        ("max_attempts = 3\n", ["rose.toml", "max_attempts", "no section"]),
        ('[router]\nmax_attempts = "three"\n', ["rose.toml", "router.max_attempts", "integer", "'three'"]),
        ("[environment]\nwindow_groups = 0\n", ["environment", "window_groups must be from 1 to"]),
        ("[environment]\nstep_timeout_seconds = inf\n", ["step_timeout_seconds must be from 0.01 to 604800"]),
        ("[environment]\nstep_timeout_seconds = nan\n", ["step_timeout_seconds must be from 0.01 to 604800"]),
        ("[environment]\nstep_timeout_seconds = 0\n", ["step_timeout_seconds must be from 0.01 to 604800"]),
        ("[environment]\nturn_patience_seconds = inf\n", ["turn_patience_seconds must be from 0.01 to 604800"]),
        ("[environment]\nturn_patience_seconds = -1\n", ["turn_patience_seconds must be from 0.01 to 604800"]),
        ("[environment]\ntemperature = nan\n", ["temperature must be from"]),
        (
            "[environment]\nmax_live_environments = 10000000\n",
            ["max_live_environments must be from 1 to"],
        ),
        ('[environment]\nisolation = "container"\n', ["isolation must be auto, process or thread"]),
        ('[executor]\nmodel_id = "x"\n', ["rose.toml", "executor.model_id always follows model.id"]),
        ("[router\n", ["rose.toml", "no TOML"]),
    ],
)
def test_error_in_a_file_is_one_sentence_with_file_and_key(tmp_path: Path, toml: str, words: list[str]) -> None:
    sentence = refusal(in_file(tmp_path, toml))
    assert all(word in sentence for word in words), sentence


def test_error_in_a_variable_or_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--set router.max_attempts" in refusal(Common(settings=["router.max_attempts=many"]))
    assert "section.key=value" in refusal(Common(settings=["router"]))
    assert "cannot read nowhere.toml" in refusal(Common(config=Path("nowhere.toml")))
    assert "give one of them" in refusal(Common(config=Path("a.toml"), run="demo"))
    assert "no key=value" in refusal(Common(properties=["security.protocol"]))
    with monkeypatch.context() as patch:
        patch.setenv("ROSE_ROUTER__MAX_ATEMPTS", "3")
        assert "ROSE_ROUTER__MAX_ATEMPTS: there is no router.max_atempts" in refusal(Common())
    monkeypatch.setenv("ROSE_RUTER__MAX_ATTEMPTS", "3")
    assert "ROSE_RUTER__MAX_ATTEMPTS: there is no section ruter" in refusal(Common())


def test_configuration_file_is_read_as_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rose.toml"
    path.write_bytes('\ufeff[run]\nfolder = "Läufe"\n'.encode())
    assert load(Common(config=path)).settings.run.folder == Path("Läufe")
    path.write_bytes(b'[run]\nfolder = "L\xe4ufe"\n')
    assert "is no TOML" in refusal(Common(config=path))


def test_every_field_has_a_description() -> None:
    for section, declared_by in section_types().items():
        sentences = field_docs(declared_by)
        for field in dataclasses.fields(declared_by):
            assert sentences.get(field.name, "").endswith("."), f"{section}.{field.name} has no sentence"


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0~$%("), max_size=20)
"""Hypothesis also tries strings of the code: `~` as a folder and `(not shown)` in a property are refused, and so are
names of properties that ROSE sets, hence the `x` before them."""


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    folder=TEXT.filter(bool),
    properties=st.dictionaries(TEXT.map("x{}".format), TEXT, max_size=3),
    arguments=st.dictionaries(TEXT, st.integers(-(2**40), 2**40) | st.booleans() | TEXT | st.lists(TEXT), max_size=3),
    learning_rate=st.floats(1e-12, 1),
)
def test_resolved_configuration_round_trips(
    tmp_path: Path, folder: str, properties: dict[str, str], arguments: dict[str, object], learning_rate: float
) -> None:
    common = Common(overrides=(("-", "run.folder", folder), ("-", "trainer.learning_rate", str(learning_rate))))
    config = load(common)
    broker = dataclasses.replace(config.settings.broker, properties=properties)
    tasks = dataclasses.replace(config.settings.tasks, arguments=arguments)
    config = Config(config.settings.model_copy(update={"broker": broker, "tasks": tasks}), {})
    for explained in (True, False):
        text = resolved_toml(config, explained=explained)
        tomllib.loads(text)
        assert load(in_file(tmp_path, text)).settings == config.settings


def test_secrets_are_left_out_of_shown_configurations() -> None:
    secret = 'a"b\\c } \n\u00fc hidden'
    secrets = ("sasl.password", "ssl.key.password", "ssl.key.pem", "sasl.oauthbearer.client.secret")
    properties = {"sasl.username": "rose", **dict.fromkeys(secrets, secret), "ssl.key.location": "/etc/key.pem"}
    variables = {"HF_TOKEN": secret, "VLLM_API_KEY": secret, "AWS_SECRET_ACCESS_KEY": secret, "TZ": "UTC"}
    flags = ["--api-key", secret, "--max-num-seqs", "8", f"--hf_token={secret}", "--api-key=hidden"]
    settings = load(Common()).settings
    broker = dataclasses.replace(settings.broker, properties=properties)
    serving = dataclasses.replace(settings.serving, environment=variables, flags=flags)
    config = Config(settings.model_copy(update={"broker": broker, "serving": serving}), {})
    shown = without_secrets(resolved_toml(config, explained=True))
    assert "hidden" not in shown
    message, kept = tomllib.loads(shown), "(not shown)"
    assert message["broker"]["properties"] == properties | dict.fromkeys(secrets, kept)
    assert message["serving"]["environment"] == dict.fromkeys(variables, kept) | {"TZ": "UTC"}
    assert message["serving"]["flags"] == [
        "--api-key",
        kept,
        "--max-num-seqs",
        "8",
        f"--hf_token={kept}",
        f"--api-key={kept}",
    ]
    plain = resolved_toml(load(Common()), explained=True)
    assert without_secrets(plain) == plain, "nothing is left out of a configuration without secrets"


def test_refused_value_is_not_shown_if_it_may_be_a_password(tmp_path: Path) -> None:
    numeric = in_file(tmp_path, '[broker]\nproperties = { "sasl.password" = 12345678 }\n')
    assert "sasl.password" in refusal(numeric) and "12345678" not in refusal(numeric)
    nameless = tmp_path / "client.properties"
    nameless.write_text("sasl.username=me\nsasl.password hidden\n")
    for options in (Common(command_config=nameless), Common(properties=["sasl.password hidden"])):
        assert "no key=value" in refusal(options) and "hidden" not in refusal(options)


@pytest.mark.parametrize(
    "assignments",
    [
        ["run.name=a", "run.name.x=3"],
        ["broker.properties=a", "broker.properties.x=3"],
        ["broker.namespace=a", "broker.namespace.x.y=3"],
    ],
)
def test_key_below_a_scalar_setting_is_refused_with_its_source(assignments: list[str]) -> None:
    assert refusal(Common(settings=assignments)).startswith(f"--set {assignments[1].partition('=')[0]}: ")


@pytest.mark.parametrize(
    "text",
    [
        '[broker.properties]\nsecurity.protocol = "ssl"\n"client.rack" = "a"\n',
        '[broker.properties.security]\nprotocol = "ssl"\n[broker.properties.client]\nrack = "a"\n',
        '[broker]\nproperties = { security.protocol = "ssl", "client.rack" = "a" }\n',
    ],
)
def test_librdkafka_settings_mean_the_same_quoted_and_unquoted(tmp_path: Path, text: str) -> None:
    expected = {"security.protocol": "ssl", "client.rack": "a"}
    assert load(in_file(tmp_path, text)).settings.broker.properties == expected
    flags = Common(settings=[f"broker.properties.{name}={value}" for name, value in expected.items()])
    assert load(flags).settings.broker.properties == expected


def test_password_placeholder_is_not_accepted_as_a_password(tmp_path: Path) -> None:
    options = Common(properties=["sasl.password=hidden", "client.rack=a"])
    shown = in_file(tmp_path, without_secrets(resolved_toml(load(options), explained=True)))
    assert "broker.properties has (not shown) in it" in refusal(shown)
    again = dataclasses.replace(shown, properties=["sasl.password=hidden"])
    assert load(again).settings.broker.properties == {"sasl.password": "hidden", "client.rack": "a"}
