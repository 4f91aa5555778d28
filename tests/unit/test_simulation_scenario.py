"""A scenario refuses what it does not know or what contradicts itself, in one sentence; arms change what they name."""

from pathlib import Path

import pytest

from rose.pipeline.simulation.scenario import load_scenario
from rose.schemas.errors import UsageError

BASE = """
[[dedicated]]
profile = "qwen3-8b-h800-tp1"
count = 2
[lending]
serving_profile = "qwen3-8b-h800-tp1"
guest_profile = "qwen3-8b-h800-tp1"
count = 2
[tasks]
groups = 4
"""

CPU = """
elastic.how = "none"
[[dedicated]]
profile = "calculator-cpu-tp1"
count = 2
[tasks]
groups = 4
"""


def written(folder: Path, text: str) -> Path:
    (folder / "case.toml").write_text(text)
    return folder / "case.toml"


def test_arm_replaces_its_fields_and_keeps_the_others(tmp_path: Path) -> None:
    arms = load_scenario(written(tmp_path, BASE + '[arms.none]\nelastic.how = "none"\ntasks.turns = 9\n'))
    assert list(arms) == ["rose", "none"]
    assert (arms["none"].elastic.how, arms["none"].tasks.turns, arms["none"].tasks.groups) == ("none", 9, 4)
    assert (arms["rose"].elastic.how, arms["rose"].name) == ("lend", "case")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (BASE + "turnz = 3\n", "unknown field `turnz`"),
        (BASE + "[arms.a]\nfleet = 3\n", "arm a: .*unknown field `fleet`"),
        (BASE + "[arms]\na = 3\n", "each arm is a table"),
        (BASE + 'turns = "six"\n', "Expected `int`, got `str`"),
        (BASE + "group_size = 0\n", "group_size"),
        (BASE + "context_tokens = 2000\n", "no room for a prompt and a turn of 5096 tokens"),
        (BASE + '[[failures]]\nwhat = "fire"\nat_seconds = 1\n', "fire"),
        ('[[dedicated]]\nprofile = "x"\ncount = 1\n[tasks]\ngroups = 1\n', "needs a `.lending.` part"),
        ("[tasks\n", "is no TOML"),
        (BASE + "[paper]\nrose = nan\n", "paper"),
        (BASE + '[prices]\ncurrency = ""\ndedicated = 1\nborrowed = 1\ntrainer = 1\n', "currency"),
        (BASE + "[users]\nbusy = 0.1\nminute_peak = 5\n", "`second_peak` is less than `minute_peak`"),
        (BASE + "[users]\nbusy = 0.1\nminute_peak = 20\nsecond_peak = 20\n", "minute_peak"),
        (BASE + "[users]\nbusy = 0.1\nprompt_tokens = 40_000\n", "exceeds `max_prompt_tokens`"),
        (
            BASE + "[users]\nbusy = 0.1\nprompt_tokens = 300_000\nmax_prompt_tokens = 1_000_000\n",
            "exceeds what the KV memory of",
        ),
        (BASE + '[training]\ncolocated = true\nmode = "asynchronous"\n', "contradicts an asynchronous trainer"),
        (BASE + "[training]\ncolocated = true\nlends_gpus = 1\n", "contradicts `colocated`"),
        (BASE + "[training]\ncolocated = true\ngpus = 3\n", "3 GPUs, and the dedicated engines have 2"),
        (BASE + "[training]\nlends_gpus = 17\n", "17 engines need 17 GPUs, and the trainer has 16"),
        (BASE + "[arms.a]\ndedicated = []\ntraining.lends_gpus = 1\n", "arm a: .*lends_gpus. needs"),
        (BASE + '[arms.a]\nlending.count = 0\nelastic.how = "whole"\n', "arm a: .*no engine to move"),
        (BASE + '[arms.a]\nlending.serving_profile = "foo"\n', "arm a: there is no profile foo"),
        (CPU + "context_tokens = 200_000\n", "no engine has KV memory for more than 32736"),
        (CPU.replace("count = 2", "count = 0"), "no engine ever takes a turn"),
    ],
)
def test_unknown_or_contradictory_field_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load_scenario(written(tmp_path, text))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")
