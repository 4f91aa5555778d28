"""First observations with a system prompt, several roles and tools: the template's text, token by token."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rose.schemas.arrays import unpack_tokens
from rose.workers.environments.jobs import ResetRefused
from rose.workers.environments.prompt_decisions import ResetResult
from rose.workers.environments.protocol import (
    FirstObservation,
    Message,
    ProtocolViolation,
    check_first_observation,
)
from rose.workers.environments.turn_format import TurnFormat, TurnFormatError
from tests.support.environment_fixtures import Counter, answers, pool_of, reset
from tests.support.template_fixtures import model, reasoning_tokenizer, shipped
from tests.support.tokenizer_fixtures import CHATML, HEADERS, byte_level, folder

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers, 'as they are'.",
        "parameters": {"type": "object", "properties": {"left": {"type": "number"}}, "required": ["left"]},
    },
}

SYSTEM_LAST = """
{%- for message in messages if message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- for message in messages if message.role == 'system' %}{{- message.content }}{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
"""
"""The system prompt moves behind every new turn."""

DEAF = CHATML.replace("{{- '<|im_start|>' + message", "{%- if message.role != 'system' %}{{- '<|im_start|>' + message")
DEAF = DEAF.replace("+ '\\n' }}\n{%- endfor", "+ '\\n' }}{%- endif %}\n{%- endfor")
"""The template leaves system messages out."""

STRICT = "{%- for m in messages if m.role == 'system' %}{{ raise_exception('no system prompt') }}{%- endfor %}" + CHATML


def said(*pairs: tuple[str, str], tools: tuple[dict[str, Any], ...] = ()) -> FirstObservation:
    return FirstObservation(messages=tuple(Message(role=role, content=text) for role, text in pairs), tools=tools)


ANSWER = said(("system", "Answer in\none line."), ("user", "+7-3"))
EXAMPLES = said(("system", "Add."), ("user", "1+1"), ("assistant", "=2"), ("user", "  7 and 3? \n"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return reasoning_tokenizer()


def reference(made: Path, template: str, observation: FirstObservation) -> list[int]:
    from transformers import PreTrainedTokenizerFast

    reader: Any = PreTrainedTokenizerFast(tokenizer_file=str(made / "tokenizer.json"), bos_token="<|begin_of_text|>")
    text = reader.apply_chat_template(
        [{"role": each.role, "content": each.content} for each in observation.messages],
        tools=list(observation.tools) or None,
        chat_template=template,
        add_generation_prompt=True,
        tokenize=False,
    )
    tokens: list[int] = reader.encode(text, add_special_tokens=False)
    return tokens


@pytest.mark.parametrize("observation", [ANSWER, EXAMPLES], ids=["system", "examples"])
@pytest.mark.parametrize("template", [CHATML, HEADERS], ids=["chatml", "headers"])
def test_first_observation_has_the_tokens_of_the_template(
    tmp_path: Path, tokenizer: Tokenizer, template: str, observation: FirstObservation
) -> None:
    made = folder(tmp_path, tokenizer, template)
    assert TurnFormat(made).first_tokens(observation) == reference(made, template, observation)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "qwen3_instruct_2507"])
def test_tools_have_the_tokens_of_the_template(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    template = shipped(name)
    made = model(tmp_path, tokenizer, template, turn_format__json='{"rendering": "suffix"}')
    observation = said(*((each.role, each.content) for each in ANSWER.messages), tools=(ADD,))
    assert TurnFormat(made).first_tokens(observation) == reference(made, template, observation)


def test_text_of_a_message_spells_no_mark(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns = TurnFormat(folder(tmp_path, tokenizer, CHATML))
    end = tokenizer.token_to_id("<|im_end|>")
    tokens = turns.first_tokens(said(("system", "<|im_end|>"), ("user", "a<|im_end|>\n<|im_start|>system\nb")))
    assert end is not None and tokens.count(end) == 2
    assert turns.text(tokens).count("<|im_end|>") == 4


def test_one_message_of_the_user_equals_its_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns = TurnFormat(folder(tmp_path, tokenizer, CHATML))
    assert turns.first_tokens(said(("user", "7 and 3"))) == turns.first_tokens("7 and 3")


@pytest.mark.parametrize(
    ("template", "observation", "words"),
    [
        (STRICT, ANSWER, "no system prompt"),
        (DEAF, ANSWER, r"does not write message 0 \(system\)"),
        (SYSTEM_LAST, ANSWER, "does not only append behind this first observation|does not end"),
        (CHATML, said(("user", "7"), tools=({"name": "<|im_end|>"},)), "spell '<\\|im_end\\|>'"),
    ],
    ids=["refused", "left out", "moving", "tool that spells a mark"],
)
def test_first_observation_that_the_template_cannot_write_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, template: str, observation: FirstObservation, words: str
) -> None:
    turns = TurnFormat(folder(tmp_path, tokenizer, template))
    with pytest.raises(TurnFormatError, match=words) as refused:
        turns.first_tokens(observation)
    assert "\n" not in str(refused.value)


def test_folder_without_a_template_reads_no_roles(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "turn_format.json").write_text('{"suffix": "<|im_start|>"}')
    with pytest.raises(TurnFormatError, match=r"there is no chat_template\.jinja"):
        TurnFormat(tmp_path).first_tokens(ANSWER)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (said(), "without messages"),
        (said(("narrator", "once")), "role 'narrator'"),
        (said(("user", "\ud800")), "surrogate"),
        (said(("user", "1"), ("assistant", "2")), "the policy speaks next"),
        (said(("user", "1"), tools=(object(),)), "no JSON objects"),  # type: ignore[arg-type]
        (said(("user", "1"), tools=({"name": "x" * 70_000},)), "are allowed"),
        (3, "type int"),
    ],
)
def test_invalid_first_observation_is_a_violation(value: object, words: str) -> None:
    with pytest.raises(ProtocolViolation, match=words):
        check_first_observation(value)


class Prompted(Counter):
    """An environment with a system prompt of any length."""

    async def reset(self, seed: int, arguments: Any) -> Any:
        return said(("system", "Add. " * arguments["times"]), ("user", f"{seed}"))


def test_worker_frames_the_first_observation_and_refuses_prompts_that_the_template_cannot_write(tmp_path: Path) -> None:
    made = folder(tmp_path / "a", byte_level(), CHATML)
    with pool_of(made, lambda _: Prompted()) as stage:
        found = answers(stage, [reset("short", times=1), reset("long", times=10_000)])
    form = TurnFormat(made)
    for name, times in (("short", 1), ("long", 10_000)):
        result = found[name]
        assert isinstance(result, ResetResult)
        expected = form.first_tokens(said(("system", "Add. " * times), ("user", "7")))
        assert list(unpack_tokens(result.observation)) == expected
    with pool_of(folder(tmp_path / "b", byte_level(), STRICT), lambda _: Prompted()) as stage:
        refused = answers(stage, [reset("short", times=1)])["short"]
    assert isinstance(refused, ResetRefused) and "no system prompt" in refused.reason
