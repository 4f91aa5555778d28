"""Chat templates as turn formats: appending templates are accepted, and others are refused."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from rose.workers.environments.turn_format import TurnFormat, TurnFormatError
from tests.support.tokenizer_fixtures import CHATML, HEADERS, byte_level, folder

REASONING = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Template in the form of Qwen3: the reasoning of all turns before the last question is left out."""

ANSWER = REASONING.replace("</think>", "<answer>")
TWO_MARKS = REASONING.replace("'</think>' in content", "'[THINK]' in content and content.endswith('=12')")
"""Templates that leave reasoning out by other marks."""

LAST_LINE = REASONING.replace("'</think>' in content", "content.startswith('FINAL')").replace(
    ".split('</think>')", ".split('and')"
)
SET_ASIDE = "{%- set mark = '[Y]' %}" + REASONING.replace("'</think>'", "mark")
FILTERED = REASONING.replace("'</think>' in content", "true").replace(
    "content.split('</think>')[-1]", "(content|replace('[X]', ''))"
)
"""Templates that name their marks in other ways."""

CAREFUL = "{%- if '<image>' in messages[-1].content %}{{- raise_exception('no images') }}{%- endif %}"
CAREFUL += "{%- if messages[1] and messages[1].content.startswith('<tool_response>') %}{%- endif %}" + CHATML
"""The template looks for texts, and changes none of them."""

LATEST_FIRST = """
{%- for message in messages %}
{%- if loop.last %}{{- '<|im_start|>system\\nAnswer in one line.<|im_end|>\\n' }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
"""
"""The template puts its instructions before the newest message, so they move with every turn."""

MARKED = CHATML.replace(
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}",
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}{%- generation %}{{- message['content'] + '<|im_end|>' }}"
    "{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}{{- '\\n' }}",
)
"""Template in the form of SmolLM3 and of training templates: it marks the tokens of the policy."""

TOOLS = "{%- set calls = [{'name': 'add', 'of': [1, 2.5], 'about': '<rechnet für \"alle\">'}] %}"
TOOLS += "{{- '<|im_start|>system\\n' + (calls | tojson) + (calls | tojson(indent=2)) + '<|im_end|>\\n' }}"
TOOLS += "{%- if tools is not none or documents is not none %}{{- 'more' }}{%- endif %}" + CHATML
"""The template writes its own tools, and requests others."""

PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{{ 'assistant: ' }}"
"""No special token ends a message."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


TALK = (("+7-3+8", "0+7"), ("7", "It is\n\n12."), ("over", ""))


def conversation(turns: TurnFormat) -> list[int]:
    """Return the context at the third turn, as an environment worker builds it."""
    tokens: list[int] = []
    for number, (observation, action) in enumerate(TALK):
        tokens += turns.observation_tokens(observation, first=not number)
        tokens += turns.action_tokens(action) if action else []
    return tokens


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("template", "eos", "stop"),
    [
        (CHATML, "<|im_end|>", "<|im_end|>"),
        (HEADERS, "<|endoftext|>", "<|eot_id|>"),
        (MARKED, "<|im_end|>", "<|im_end|>"),
        (TOOLS, "<|im_end|>", "<|im_end|>"),
        (CAREFUL, "<|im_end|>", "<|im_end|>"),
    ],
    ids=["chatml", "headers", "marked", "tools", "careful"],
)
def test_context_equals_the_template_rendering_of_the_conversation(
    tmp_path: Path, tokenizer: Tokenizer, template: str, eos: str, stop: str, *, inside: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    made = folder(tmp_path, tokenizer, template, inside=inside, eos=eos)
    turns = TurnFormat(made)
    reference: Any = PreTrainedTokenizerFast(tokenizer_file=str(made / "tokenizer.json"), bos_token="<|begin_of_text|>")
    messages = [
        {"role": role, "content": text}
        for pair in TALK
        for role, text in zip(("user", "assistant"), pair, strict=True)
        if text
    ]
    rendered = reference.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert conversation(turns) == reference.encode(rendered, add_special_tokens=False)
    assert turns.stop_token_ids[0] == reference.convert_tokens_to_ids(stop)
    assert reference.convert_tokens_to_ids(eos) in turns.stop_token_ids


def test_generation_configuration_adds_its_stop_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = folder(tmp_path, tokenizer, CHATML)
    (made / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert TurnFormat(made).stop_token_ids == (1, 2)


def test_own_turn_format_takes_precedence_over_the_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = folder(tmp_path, tokenizer, REASONING)
    (made / "generation_config.json").write_text('{"eos_token_id": 1}')
    (made / "turn_format.json").write_text('{"suffix": "<|im_start|>"}')
    assert TurnFormat(made).observation_tokens("", first=True) == [0]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (REASONING, "leaves out the reasoning of earlier turns"),
        (ANSWER, r"changes actions of earlier turns, such as '7 and 3\\n<answer>\\n=12'"),
        (TWO_MARKS, r"changes actions of earlier turns, such as .*\[THINK\].*</think>"),
        (LAST_LINE, r"changes actions of earlier turns, such as 'FINAL7 and 3'"),
        (SET_ASIDE, r"changes actions of earlier turns, such as '7 and 3\\n\[Y\]\\n=12'"),
        (FILTERED, r"changes actions of earlier turns, such as '7 and 3\\n\[X\]\\n=12'"),
        (LATEST_FIRST, "changes earlier turns"),
        (PLAIN, "ends an assistant's message with no special token"),
        ("{{ raise_exception('system first') }}", "system first"),
        ("{{ messages[0].nothing.at.all }}", "fails on plain messages"),
        ("{% for %}", "fails on plain messages"),
        ("{{ ''.__class__.__mro__ }}{{ messages[0].content }}", "template"),
        ("nothing of it", "does not write a user's message"),
    ],
    ids=[
        "reasoning",
        "answer",
        "two marks",
        "start",
        "variable",
        "filter",
        "moving",
        "plain",
        "raises",
        "undefined",
        "broken",
        "escape",
        "deaf",
    ],
)
def test_template_that_is_not_a_turn_format_is_refused_with_the_fix(
    tmp_path: Path, tokenizer: Tokenizer, template: str, words: str
) -> None:
    with pytest.raises(TurnFormatError, match=words) as refused:
        TurnFormat(folder(tmp_path, tokenizer, template))
    assert "turn_format.json" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_tokenizer_that_merges_text_with_adjacent_tokens_is_refused(tmp_path: Path) -> None:
    words = ["<s>", "</s>", "[A]", "[A]0", *map(chr, range(32, 127)), "\n", "]0"]
    merges = [("]", "0")]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ("<s>", "</s>")])
    template = "{% for m in messages %}{{ m.content if m.role == 'user' else m.content + '</s>' }}"
    template += "{{ '[A]' if m.role == 'user' }}{% endfor %}"
    with pytest.raises(TurnFormatError, match=r"joins '.*' or '0"):
        TurnFormat(folder(tmp_path, tokenizer, template, eos="</s>"))


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": b"\xff\xfe"},
        {"tokenizer_config.json": b'{"chat_template": "\xff"}'},
        {"tokenizer_config.json": b'{"chat_template": [{"template": "x"}, {"name": [1], "template": "y"}]}'},
        {"turn_format.json": b'{"prefix": "\xff"}', "generation_config.json": b'{"eos_token_id": 1}'},
        {"turn_format.json": b"{}", "generation_config.json": b'{"eos_token_id": []}'},
        {"turn_format.json": b"{}", "generation_config.json": b'{"eos_token_id": -5}'},
        {"turn_format.json": b"{}", "generation_config.json": b'{"eos_token_id": "\xff"}'},
    ],
)
def test_broken_files_are_reported_in_one_sentence(
    tmp_path: Path, tokenizer: Tokenizer, files: dict[str, bytes]
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TurnFormatError) as refused:
        TurnFormat(tmp_path)
    assert "\n" not in str(refused.value)


def test_template_with_a_byte_order_mark_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, byte_level(), CHATML)
    (path / "chat_template.jinja").write_text(CHATML, encoding="utf-8-sig")
    with pytest.raises(TurnFormatError, match="begins with a byte order mark"):
        TurnFormat(path)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("chat_template.json", '{"chat_template": "{{ x }}"}', r"chat_template\.json"),
        ("processor_config.json", '{"chat_template": "{{ x }}"}', r"processor_config\.json"),
        ("additional_chat_templates/tools.jinja", "{{ x }}", "additional_chat_templates"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "tools", "template": "{{ x }}"}]}',
            r"tokenizer_config\.json, in a list without the name default",
        ),
    ],
)
def test_template_in_another_place_is_named(tmp_path: Path, name: str, content: str, named: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(TurnFormatError, match=rf"a template is in {named}: copy it to chat_template\.jinja, or write"):
        TurnFormat(tmp_path)


def test_folder_without_a_turn_format_is_refused_with_the_options(tmp_path: Path) -> None:
    with pytest.raises(TurnFormatError, match=r"neither a chat_template\.jinja nor a turn_format\.json"):
        TurnFormat(tmp_path)
