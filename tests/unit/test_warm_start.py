"""The demonstrator, the turn format and the shipped model folder."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.plain_engine import Task, sample_trajectories
from bench.warm_start import (
    CHARACTERS,
    FIRST_HELD_OUT_SEED,
    SPECIALS,
    WarmStartSettings,
    build_model,
    build_tokenizer,
    demonstrate,
    held_out_success,
    save,
)
from rose.workers.environments.calculator import Calculator
from rose.workers.environments.turn_format import TurnFormat, TurnFormatError
from rose.workers.trainer.policy import load_policy

SHIPPED = Path(__file__).parents[2] / "workers" / "models" / "calculator"
TEXT = st.text(alphabet=CHARACTERS, max_size=40)


@pytest.fixture(scope="module")
def turn_format() -> TurnFormat:
    return TurnFormat(SHIPPED)


def test_shipped_folder_is_small_and_equals_the_warm_start_output(tmp_path: Path) -> None:
    assert all(file.stat().st_size < 1_000_000 for file in SHIPPED.iterdir())
    save(build_model(0), tmp_path)
    written = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    shipped = {file.name: file.read_bytes() for file in SHIPPED.iterdir()}
    assert written.keys() == shipped.keys()
    assert {name for name in written if written[name] != shipped[name]} == {"model.safetensors"}
    assert len(written["model.safetensors"]) == len(shipped["model.safetensors"])
    assert sum(parameter.numel() for parameter in load_policy(SHIPPED).parameters()) < 1_000_000


@pytest.mark.slow
def test_shipped_policy_has_the_success_rate_of_the_demo_page() -> None:
    arguments = WarmStartSettings().arguments
    success = held_out_success(load_policy(SHIPPED), TurnFormat(SHIPPED), tasks=512, arguments=arguments, seed=0)
    assert 0.25 <= success <= 0.38


@given(seed=st.integers(0, FIRST_HELD_OUT_SEED - 1), luck=st.integers(0, 2**32))
@settings(max_examples=60)
def test_demonstrator_without_slips_always_reaches_the_goal(turn_format: TurnFormat, seed: int, luck: int) -> None:
    tokens, mask = asyncio.run(demonstrate(turn_format, seed, WarmStartSettings(slip=0.0), random.Random(luck)))
    assert len(tokens) == len(mask)
    environment = Calculator()
    asyncio.run(environment.reset(seed, {}))
    steps = [asyncio.run(environment.step(action)) for action in actions_of(turn_format, tokens, mask)]
    assert steps[-1].success


def actions_of(turn_format: TurnFormat, tokens: list[int], mask: list[int]) -> list[str]:
    actions: list[list[int]] = []
    for position, (token, sampled) in enumerate(zip(tokens, mask, strict=True)):
        if sampled and not mask[position - 1]:
            actions.append([])
        if sampled:
            actions[-1].append(token)
    assert all(action[-1] in turn_format.stop_token_ids for action in actions)
    return [turn_format.action_text(action) for action in actions]


def test_sampled_trajectory_decodes_to_the_environment_text(turn_format: TurnFormat) -> None:
    """The context has the given observations and the sampled actions, and replays to the same end."""
    tasks = [Task(environment=Calculator, seed=seed, arguments={}) for seed in range(20)]
    import torch

    played = sample_trajectories(
        load_policy(SHIPPED), turn_format, tasks, generator=torch.Generator().manual_seed(0), max_tokens=16
    )
    for task, one in zip(tasks, played, strict=True):
        environment = Calculator()
        expected = turn_format.observation_tokens(asyncio.run(environment.reset(task.seed, {})), first=True)
        at = reward = 0
        while True:
            assert one.tokens[at : at + len(expected)] == expected
            assert not any(one.loss_mask[at : at + len(expected)])
            start = at = at + len(expected)
            while at < len(one.tokens) and one.loss_mask[at]:
                at += 1
            step = asyncio.run(environment.step(turn_format.action_text(one.tokens[start:at])))
            reward += int(step.reward)
            if step.done:
                break
            expected = turn_format.observation_tokens(step.observation, first=False)
        assert at == len(one.tokens) and reward == one.reward


@given(observation=TEXT, action=TEXT)
def test_text_round_trips(turn_format: TurnFormat, observation: str, action: str) -> None:
    assert turn_format.action_text(turn_format.action_tokens(action)) == action
    assert len(turn_format.observation_tokens(observation, first=True)) == len(observation) + 1


def test_environment_cannot_forge_special_tokens(turn_format: TurnFormat) -> None:
    specials = {SPECIALS.index(token) for token in SPECIALS}
    *text, act = turn_format.observation_tokens("<end><act><pad>", first=False)
    assert act == SPECIALS.index("<act>") and not specials & set(text)


def test_special_tokens_in_an_action_are_read_as_malformed_text(turn_format: TurnFormat) -> None:
    act = SPECIALS.index("<act>")
    assert turn_format.action_text([act, *turn_format.action_tokens("=1")]) == "<act>=1"
    assert turn_format.action_text([]) == ""


def test_later_observations_may_have_another_framing_than_the_first(tmp_path: Path) -> None:
    save(build_model(0), tmp_path)
    frame = {"first_prefix": "a", "prefix": "<end>b", "suffix": "<act>"}
    (tmp_path / "turn_format.json").write_bytes(msgspec.json.encode(frame))
    framed = TurnFormat(tmp_path)
    a, b = (build_tokenizer().convert_tokens_to_ids(letter) for letter in "ab")
    assert framed.observation_tokens("", first=True) == [a, SPECIALS.index("<act>")]
    assert framed.observation_tokens("", first=False) == [SPECIALS.index("<end>"), b, SPECIALS.index("<act>")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, content) for name in ("turn_format.json", "tokenizer.json") for content in (None, b'{"surprise": 1}')),
        *((name, b"") for name in ("turn_format.json", "tokenizer.json", "generation_config.json")),
        ("generation_config.json", b'{"eos_token_id": "<end>"}'),
    ],
)
def test_folder_without_a_turn_format_is_refused(tmp_path: Path, name: str, content: bytes | None) -> None:
    save(build_model(0), tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TurnFormatError, match=name.replace(".", r"\.")):
        TurnFormat(tmp_path)


def test_transformers_and_turn_format_agree_on_the_shipped_tokenizer(turn_format: TurnFormat) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(SHIPPED, local_files_only=True)
    assert tokenizer.eos_token_id in turn_format.stop_token_ids
    assert tokenizer.encode("+7-3<act>", add_special_tokens=False) == turn_format.observation_tokens("+7-3", first=True)
    assert tokenizer.decode(turn_format.action_tokens("0+7")) == "0+7<end>"
