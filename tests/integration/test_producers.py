"""The snippets of docs/guides/producers.md, extracted from the page and run unchanged."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rose.schemas.prompts import Prompt
from rose.schemas.wire import SCHEMA_HEADER, decode
from rose.topics.admin import create_topics
from rose.topics.catalog import PROMPTS, home_partition
from rose.topics.log_reader import read_keyed_messages, topic_starts
from rose.topics.settings import BusSettings
from tests.support import brokers as kinds
from tests.support.brokers import AnyBroker
from tests.support.environment_worker_fixtures import PARTITIONS, dead_letters
from tests.support.scripted_executors import ScriptedExecutors, worker_process

DOCUMENT = (Path(__file__).parents[2] / "docs" / "guides" / "producers.md").read_text()
SNIPPETS = re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
KCAT, JAVA, DEAD_LETTERS = (text for language, text in SNIPPETS if language == "sh")
(SUBMIT,) = (text for language, text in SNIPPETS if language == "java")
(READ,) = (text for language, text in SNIPPETS if language == "python")
GROUPS = {"kcat-1", "kcat-2", "java-1", "java-2", "java-3"}
SECONDS = 120.0


def output_of(command: list[str], settings: BusSettings, folder: Path) -> str:
    """Return the output of a snippet that exits with status 0."""
    surroundings = {**os.environ, "BOOTSTRAP": settings.bootstrap, "NAMESPACE": settings.namespace}
    done = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shell(snippet: str) -> list[str]:
    for program in ("kcat", "java"):
        if snippet.startswith(program) and shutil.which(program) is None:
            pytest.skip(f"{program} is not there")
    return ["bash", "-euc", snippet]


def submit(settings: BusSettings, folder: Path) -> None:
    """Run the snippets that write prompts. Skip the test if kcat, Java or Kafka's client is missing."""
    kinds.home_of(kinds.KAFKA)
    (folder / "Submit.java").write_text(SUBMIT)
    output_of(shell(KCAT), settings, folder)
    assert output_of(shell(JAVA), settings, folder).count("stored at") == 3


@pytest.mark.long
def test_prompts_of_kcat_and_java_are_valid_and_in_their_home(
    brokers: Callable[[str], AnyBroker], namespace: str, tmp_path: Path
) -> None:
    kinds.home_of(kinds.KAFKA)
    settings = brokers(kinds.KAFKA).settings(namespace)
    create_topics(settings, PARTITIONS)
    submit(settings, tmp_path)
    found = list(read_keyed_messages(settings, topic_starts(settings, [PROMPTS])))
    assert {each.key for each in found} == GROUPS | {"kcat-3"}
    for each in found:
        assert each.partition == home_partition(each.key, PARTITIONS.home)
        assert each.raw.header(SCHEMA_HEADER) == Prompt.SCHEMA.encode()
        if each.key in GROUPS:
            assert decode(Prompt, each.raw.value or b"", each.raw.headers).group_id == each.key
    kinds.clear(brokers(kinds.KAFKA), namespace)


@pytest.mark.long
def test_external_prompts_are_run_refused_and_reported_by_outcome(
    brokers: Callable[[str], AnyBroker], namespace: str, model: str, tmp_path: Path
) -> None:
    kinds.home_of(kinds.KAFKA)
    executors = ScriptedExecutors(brokers(kinds.KAFKA).settings(namespace), PARTITIONS)
    settings = executors.settings
    submit(settings, tmp_path)
    with worker_process(settings, 0, {"model_folder": model}):
        executors.pump_until(lambda: len(executors.samples) == 2 * len(GROUPS), what="samples of all groups")
        executors.pump_until(lambda: len(dead_letters(settings)) == 1, what="a dead letter")
    executors.pump()
    executors.close()
    dead = output_of(shell(DEAD_LETTERS), settings, tmp_path)
    assert '"kcat-3"' in dead and "rose-letter-reason=not a prompt/3" in dead and "rose-letter-key=kcat-3" in dead
    lines = [line.split() for line in output_of([sys.executable, "-c", READ], settings, tmp_path).splitlines()]
    samples = {line[0]: line[1:] for line in lines if len(line) == 4}
    outcomes = {line[0]: line[1] for line in lines if len(line) == 2}
    assert samples.keys() == outcomes.keys() == {f"{group}:{index}" for group in GROUPS for index in range(2)}
    for name, (sample,) in executors.samples.items():
        reward, tokens, sampled = samples[name]
        assert (float(reward), int(tokens), int(sampled)) == (
            sample.reward,
            len(sample.tokens) // 4,
            sum(sample.loss_mask),
        )
    assert set(outcomes.values()) == {"trained"}
    kinds.clear(brokers(kinds.KAFKA), namespace)
