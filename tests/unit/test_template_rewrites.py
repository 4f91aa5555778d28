"""Templates that rewrite earlier turns, by the two ways to use them; the templates are those that TRL ships.

Each context is compared token by token with what transformers makes of the template, over five turns.
"""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rose.workers.environments.turn_format import TurnFormat, TurnFormatError
from tests.support.template_fixtures import model, reasoning_tokenizer, shipped
from tests.support.tokenizer_fixtures import CHATML

OBSERVATIONS = ("+7-3+8", "7", '{"result": [1, 2.5]}', "two words\nand a line", "over")
PLAIN = ("0+7", "Let me see.\n\nIt is 12.", "=12", "none", "1")
REASONED = tuple(f"<think>\n7 and 3, try {number}\n</think>\n\n={number}" for number in range(5))
BEGUN = tuple(f"7 and 3, try {number}\n</think>\n\n={number}" for number in range(5))
"""Actions without reasoning, with it, and with reasoning that the generation prompt has begun."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return reasoning_tokenizer()


def reference(made: Path, template: str, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens that transformers makes of a conversation, with the generation prompt."""
    from transformers import PreTrainedTokenizerFast

    reader: Any = PreTrainedTokenizerFast(tokenizer_file=str(made / "tokenizer.json"), bos_token="<|begin_of_text|>")
    text = reader.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False)
    tokens: list[int] = reader.encode(text, add_special_tokens=False)
    return tokens


def play(turns: TurnFormat, actions: tuple[str, ...]) -> Any:
    """Yield, at each observation, the conversation so far, its context, and how many tokens were just appended."""
    messages: list[dict[str, str]] = []
    context: list[int] = []
    sampled: list[int] = []
    for observation, action in zip(OBSERVATIONS, actions, strict=True):
        seen = turns.observation_tokens(observation, first=not messages, after=sampled)
        messages.append({"role": "user", "content": observation})
        context += seen
        yield list(messages), list(context), len(seen)
        sampled = turns.action_tokens(action)
        messages.append({"role": "assistant", "content": action})
        context += sampled


@pytest.mark.parametrize(
    ("name", "actions"),
    [("qwen3", REASONED), ("qwen3", PLAIN), ("deepseek_r1_distill", BEGUN), ("qwen3_5_think", BEGUN)],
)
def test_suffix_rendering_appends_what_the_template_writes_behind_the_newest_action(
    tmp_path: Path, tokenizer: Tokenizer, name: str, actions: tuple[str, ...]
) -> None:
    template = shipped(name)
    made = model(tmp_path, tokenizer, template, turn_format__json='{"rendering": "suffix"}')
    turns = TurnFormat(made)
    for messages, context, appended in play(turns, actions):
        written = reference(made, template, messages)
        first = len(messages) == 1
        assert context[-appended - (not first) :] == written[-appended - (not first) :], "with the stop token before"
        assert not first or context == written


def test_suffix_rendering_equals_the_template_whole_where_nothing_is_rewritten(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    template = shipped("qwen3")
    made = model(tmp_path, tokenizer, template, turn_format__json='{"rendering": "suffix"}')
    for messages, context, _ in play(TurnFormat(made), PLAIN):
        assert context == reference(made, template, messages)


@pytest.mark.parametrize(("name", "actions"), [("qwen3", REASONED), ("qwen3_5_think", BEGUN)])
def test_context_by_a_training_template_equals_the_training_template_whole(
    tmp_path: Path, tokenizer: Tokenizer, name: str, actions: tuple[str, ...]
) -> None:
    training = shipped(f"{name}_training")
    made = model(tmp_path, tokenizer, shipped(name), training_template__jinja=training)
    for messages, context, _ in play(TurnFormat(made), actions):
        assert context == reference(made, training, messages)


def test_template_that_drops_reasoning_is_refused_with_both_ways(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(TurnFormatError, match="leaves out the reasoning of earlier turns") as refused:
        TurnFormat(model(tmp_path, tokenizer, shipped("qwen3")))
    assert "training_template.jinja" in str(refused.value) and '{"rendering": "suffix"}' in str(refused.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"turn_format__json": '{"rendering": "suffix", "suffix": "x"}'}, "remove the other fields"),
        ({"turn_format__json": '{"rendering": "prefix"}'}, "rendering"),
        ({"training_template__jinja": CHATML.replace("helpful", "careful")}, "writes the first observation"),
        (
            {"training_template__jinja": CHATML.replace("message['content']", "(message['content'] | upper)")},
            "writes the first observation",
        ),
        ({"training_template__jinja": "{% for %}"}, "fails on plain messages"),
    ],
    ids=["two ways", "unknown way", "other prompt", "upper case", "broken"],
)
def test_way_that_contradicts_the_chat_template_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, files: dict[str, str], words: str
) -> None:
    with pytest.raises(TurnFormatError, match=words):
        TurnFormat(model(tmp_path, tokenizer, CHATML, **files))
