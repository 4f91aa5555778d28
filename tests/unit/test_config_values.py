"""The values of a configuration: a value that cannot work is refused in one sentence before anything starts."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from rose.pipeline.config.load import load, resolved_toml
from rose.pipeline.config.options import Common
from rose.pipeline.config.settings import SHARED, section_types
from rose.schemas.errors import UsageError
from tests.support.config_fixtures import forget_rose_variables, in_file, refusal


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_rose_variables(monkeypatch)


@pytest.mark.parametrize("count", ["0", "1000000001", "-1"])
@pytest.mark.parametrize("field", ["window_groups", "max_live_environments"])
def test_count_outside_its_bounds_is_refused(field: str, count: str) -> None:
    assert f"{field} must be from 1 to" in refusal(Common(settings=[f"environment.{field}={count}"]))


@pytest.mark.parametrize(
    "assignment",
    [
        "acks=0",
        "request.required.acks=1",
        "enable.idempotence=false",
        "max.in.flight.requests.per.connection=6",
        "message.max.bytes=1000",
        "enable.auto.commit=true",
        "isolation.level=read_uncommitted",
        "auto.offset.reset=latest",
        "partition.assignment.strategy=cooperative-sticky",
        "group.protocol=consumer",
        "allow.auto.create.topics=true",
        "delivery.timeout.ms=1",
        "delivery.report.only.error=true",
        "transaction.timeout.ms=900000",
        "session.timeout.ms=5999",
        "heartbeat.interval.ms=10000",
        "bootstrap.servers=other:1",
        "group.id=x",
        "transactional.id=x",
        "error_cb=x",
        "oauth_cb=x",
        "on_commit=x",
        "logger=x",
    ],
)
def test_kafka_property_that_rose_relies_on_cannot_be_changed(assignment: str) -> None:
    assert f"broker.properties: {assignment.partition('=')[0]} " in refusal(Common(properties=[assignment]))


@pytest.mark.parametrize(
    ("name", "most"),
    [("message.timeout.ms", 2**31 - 1), ("transaction.timeout.ms", 60_000), ("session.timeout.ms", 3_600_000)],
)
def test_kafka_timeout_of_any_length_outside_its_range_is_told_the_range(name: str, most: int) -> None:
    for value in (1, most + 1, 999_999_999_999):
        assert f"000 to {most}: " in refusal(Common(properties=[f"{name}={value}"]))
    assert load(Common(properties=[f"{name}={most}"])).settings.broker.properties[name] == str(most)


def test_kafka_property_that_rose_relies_on_may_be_repeated_unchanged() -> None:
    assert load(Common(bootstrap_server="b:1", properties=["bootstrap.servers=b:1"])).bus().bootstrap == "b:1"
    assignments = ["acks=ALL", "enable.idempotence=true", "max.in.flight=5", "isolation.level=read_committed"]
    assignments += ["session.timeout.ms=45000", "heartbeat.interval.ms=15000"]
    assert load(Common(properties=assignments)).settings.broker.properties["acks"] == "ALL"


def test_missing_import_folder_is_named_as_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(Common(settings=['environment.import_paths=["nowhere"]']))
    with pytest.raises(UsageError, match=rf"import_paths: {tmp_path}/nowhere is not there"):
        config.import_paths()


@pytest.mark.parametrize(
    "setting", ["run.folder=~/runs", "model.folder=~you/m", 'environment.import_paths=["~/envs"]', "run.folder=$HOME/r"]
)
def test_path_that_a_shell_would_expand_is_refused(setting: str) -> None:
    assert " is not expanded, write the whole path" in refusal(Common(settings=[setting]))


@pytest.mark.parametrize("setting", ["model.folder=", 'environment.import_paths=[""]', "broker.kafka_home="])
def test_path_that_is_empty_is_refused(setting: str) -> None:
    assert " is empty, which names no file: write a path" in refusal(Common(settings=[setting]))


MINE = ("run", "topics", "metrics", "tracing", "tasks", "router", "control", "lender", "endpoint", "users")
"""Sections with tests in this file; environment, executor, trainer and weights have their own tests."""


def numbers(declared_by: type, path: str) -> Iterator[tuple[str, type]]:
    """Return path and type of every number in a section."""
    for name, kind in get_type_hints(declared_by).items():
        if kind in (int, float):
            yield f"{path}.{name}", kind
        elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from numbers(kind, f"{path}.{name}")


NUMBERS = [each for section in MINE for each in numbers(section_types()[section], section)]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (path, value)
        for path, kind in NUMBERS
        if path not in SHARED
        for value in (("-1", "nan", "inf", "-inf", "1e300") if kind is float else ("-1", str(10**30)))
    ],
)
def test_number_outside_its_bounds_is_refused_in_one_sentence(tmp_path: Path, path: str, value: str) -> None:
    section, name = path.rsplit(".", 1)
    sentence = refusal(in_file(tmp_path, f"[{section}]\n{name} = {value}\n"))
    assert any(word in sentence for word in (name, "the dial", "budgets", "yield bound"))


@pytest.mark.parametrize(
    "path", ["run.folder", "model.folder", "serving.folder", "lender.stop_file", "endpoint.folder"]
)
def test_impossible_path_is_refused_in_one_sentence(tmp_path: Path, path: str) -> None:
    section, name = path.split(".")
    sentence = refusal(in_file(tmp_path, f'[{section}]\n{name} = "a\\u0000b"\n'))
    assert f"rose.toml: {path}" in sentence and "names no file" in sentence


def test_port_above_65535_is_refused() -> None:
    metrics = load(Common(settings=["metrics.executor=65534"])).settings.metrics
    assert metrics.port_of(metrics.executor, 1) == 65535
    with pytest.raises(UsageError, match="port 65536, and 65535 is the last"):
        metrics.port_of(metrics.executor, 2)


def test_inconsistent_sections_are_refused() -> None:
    assert "window_groups" in refusal(Common(settings=["environment.window_groups=4", "trainer.groups_per_step=8"]))
    alone = ["environment.window_groups=4", "run.environment_workers=2", "trainer.groups_per_step=8"]
    assert "window_groups" in refusal(Common(settings=alone)), "all homes may fall to one worker"
    assert "max_model_len" in refusal(Common(settings=["environment.max_context_tokens=2048"]))


@pytest.mark.parametrize("name", ["a b", "a/b", "../up", "x" * 128, "ä", "a\n"])
def test_run_name_invalid_in_a_manifest_is_refused_before_the_start(name: str) -> None:
    refused = refusal(Common(overrides=(("--name", "run.name", name),)))
    assert "characters, of A-Z a-z 0-9" in refused


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_run_name_that_names_no_folder_of_its_own_is_refused(name: str) -> None:
    assert "names a folder of its own" in refusal(Common(overrides=(("--name", "run.name", name),)))


@pytest.mark.parametrize("namespace", ["a b", "a/b", "a:b", "x" * 101, "ä", "rose.b.", "team.rose."])
def test_namespace_invalid_in_a_topic_name_is_refused(namespace: str) -> None:
    assert "broker.namespace" in refusal(Common(namespace=namespace))


@pytest.mark.parametrize("engine", ["float32", "bfloat16", "float16"])
def test_versions_are_published_in_the_element_type_of_the_engines(engine: str) -> None:
    assert load(Common(settings=[f"executor.dtype={engine}"])).weights.dtype == engine
    assert load(Common(settings=["weights.dtype=bfloat16"])).weights.dtype == "bfloat16"
    assert load(Common(settings=["run.name=mine"])).weights.run == "mine"
    refused = refusal(Common(settings=["executor.dtype=bfloat16", "weights.dtype=float32"]))
    assert "weights.dtype (float32) cannot be held exactly by engines in executor.dtype (bfloat16)" in refused
    assert "executor.dtype (int8) must be one of" in refusal(Common(settings=["executor.dtype=int8"]))


LONG = "a" * 300
"""Longer than a file name, a host label or a record allows."""


@pytest.mark.parametrize("many", [1, 17])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (f"run.name={LONG}", "together they may have 127 characters"),
        (f"broker.namespace={LONG}", "it may have 100 characters"),
        (f"model.id={LONG}", "model.id"),
        (f"tasks.environment={LONG}:Own", "tasks.environment: the name of an environment has 1 to 256 characters"),
        (f'environment.environments=["{LONG}:Own"]', "environment.environments: the name of an environment has 1 to"),
        (f"endpoint.url=http://{LONG}", "endpoint.url"),
        (f"tracing.endpoint=http://{LONG}:4318", "tracing.endpoint"),
    ],
)
def test_too_long_name_is_refused_with_the_limit(setting: str, words: str, many: int) -> None:
    assert words in refusal(Common(settings=[setting.replace(LONG, LONG * many)]))


@pytest.mark.parametrize("url", ["http://h:1\t", "http://h\nh", "http://h h", " http://h"])
def test_address_with_blanks_is_refused(url: str) -> None:
    assert "tracing.endpoint" in refusal(Common(settings=[f"tracing.endpoint={url}"]))


@pytest.mark.parametrize(
    ("value_text", "words"),
    [
        ("environment.environments=guessing:Guessing", 'must be a list, as ["a", "b"]'),
        ("serving.flags=--enforce-eager", "must be a list"),
        ("tasks.arguments=3", "must be a table"),
    ],
)
def test_list_or_table_given_as_text_is_refused_with_the_syntax(value_text: str, words: str) -> None:
    assert words in refusal(Common(settings=[value_text]))


def test_arguments_of_vllm_keep_their_types_in_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"enforce_eager": False, "block_size": 64, "kv_cache_dtype": "fp8", "compilation_config": {"mode": 3}}
    text = "[executor.vllm]\nenforce_eager = false\nblock_size = 64\nkv_cache_dtype = 'fp8'\n"
    assert load(in_file(tmp_path, text + "compilation_config = {mode = 3}\n")).settings.executor.vllm == expected
    flags = ["enforce_eager=False", "block_size=64", "kv_cache_dtype=fp8", 'compilation_config={"mode": 3}']
    config = load(Common(settings=[f"executor.vllm.{each}" for each in flags]))
    assert config.settings.executor.vllm == expected
    assert load(in_file(tmp_path, resolved_toml(config, explained=True))).settings.executor.vllm == expected
    for each in flags:
        name, _, value = each.partition("=")
        monkeypatch.setenv(f"ROSE_EXECUTOR__VLLM__{name.upper()}", value)
    assert load(Common()).settings.executor.vllm == expected


def test_argument_of_vllm_that_changes_what_is_sampled_is_refused() -> None:
    refused = refusal(Common(settings=["executor.vllm.hf_overrides={}"]))
    assert "executor: vllm cannot set hf_overrides: it may set attention_backend, " in refused


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "cudagraph_capture_sizes=[1,null]",
            "vllm.cudagraph_capture_sizes must be made of truth values",
        ),
        ("kv_cache_dtype=bfloat16", "take auto, float32 or a type of 8 bits"),
        ("gpu_memory_utilization=NaN", "vllm.gpu_memory_utilization must be made of"),
        ('attention_config={"use_non_causal": true}', "vllm.attention_config cannot set use_non_causal"),
    ],
)
def test_argument_of_vllm_with_an_unusable_value_is_refused(setting: str, words: str) -> None:
    assert words in refusal(Common(settings=[f"executor.vllm.{setting}"]))


def test_date_as_argument_of_vllm_is_refused(tmp_path: Path) -> None:
    assert "vllm.block_size must be made of" in refusal(in_file(tmp_path, "[executor.vllm]\nblock_size = 2024-01-01\n"))
