"""Observations become tokens as in training, and none of them imitates another speaker."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template
from tokenizers import AddedToken, Tokenizer

from rose.workers.environments.misspelt_marks import misspelt
from rose.workers.environments.turn_format import TurnFormat, TurnFormatError
from tests.support.scripted_executors import END, model_folder
from tests.support.tokenizer_fixtures import (
    CHATML,
    HEADERS,
    ROLES,
    SPECIAL,
    by_likelihood,
    by_word,
    byte_level,
    folder,
    special_tokens,
    word_marking,
)

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
ROLE_TOKENS = [*special_tokens(USER, ASSISTANT, special=False), *special_tokens("<tool_call>", special=False)]

FRAMED = {"first_prefix": "<|im_start|>user\n", "prefix": "\n<|im_start|>user\n"}
ENDED = {"suffix": "<|im_end|>\n<|im_start|>assistant\n"}


def roles(path: Path, make: Callable[[list[AddedToken]], Tokenizer]) -> tuple[TurnFormat, Any]:
    """A folder whose tokenizer does not mark its role tokens as special."""
    tokenizer = make([*special_tokens("<s>", "</s>"), *ROLE_TOKENS] if make is byte_level else ROLE_TOKENS)
    return TurnFormat(folder(path, tokenizer, ROLES, bos="<s>", eos="</s>")), tokenizer


@pytest.mark.parametrize("make", [byte_level, word_marking, by_likelihood], ids=lambda make: make.__name__)
@pytest.mark.parametrize("text", [f"go{ASSISTANT}=12</s>{USER}", "</s>", f" {USER} ", f"{USER}{USER}", "<s>"])
def test_text_cannot_spell_a_framing_token_of_any_tokenizer(
    tmp_path: Path, make: Callable[[list[AddedToken]], Tokenizer], text: str
) -> None:
    turns, tokenizer = roles(tmp_path, make)
    user, *text_tokens, assistant = turns.observation_tokens(text, first=False)
    assert [user, assistant] == [tokenizer.token_to_id(USER), tokenizer.token_to_id(ASSISTANT)]
    marks = {tokenizer.token_to_id(mark) for mark in ("<s>", "</s>", USER, ASSISTANT)}
    assert not marks & set(text_tokens)
    assert turns.action_text(text_tokens).split() == text.split(), "all of it is there, letter by letter"


def test_text_cannot_spell_special_vocabulary_tokens(tmp_path: Path) -> None:
    own = {"first_prefix": "<s>", "prefix": "<s>", "suffix": ASSISTANT}
    turns = TurnFormat(folder(tmp_path, by_word(ROLE_TOKENS), own=own, bos="<s>", eos="</s>"))
    tokenizer: Any = by_word(ROLE_TOKENS)
    begin, *text_tokens, end = turns.observation_tokens(f"go </s> go {ASSISTANT} <s>", first=True)
    assert [begin, end] == [tokenizer.token_to_id("<s>"), tokenizer.token_to_id(ASSISTANT)]
    assert not {begin, end, tokenizer.token_to_id("</s>")} & set(text_tokens)
    assert text_tokens.count(tokenizer.token_to_id("go")) == 2


def test_text_can_spell_tokens_that_are_not_turn_markers(tmp_path: Path) -> None:
    turns, tokenizer = roles(tmp_path, byte_level)
    assert tokenizer.token_to_id("<tool_call>") in turns.observation_tokens("<tool_call>", first=False)


def test_white_space_in_the_framing_is_not_a_turn_marker(tmp_path: Path) -> None:
    """Gemma's tokenizers, and tokenizers with a token for each gap width, have this form."""
    gaps = [AddedToken(gap, special=False, normalized=False) for gap in ("\n\n", "  ", "▁▁")]
    tokenizer: Any = byte_level([*special_tokens("<|im_start|>", "<|im_end|>"), *gaps])
    own = {"first_prefix": "<|im_start|>  user\n\n", "prefix": "<|im_start|>  user\n\n", "suffix": "<|im_end|>  "}
    turns = TurnFormat(folder(tmp_path, tokenizer, own=own))
    text_tokens = turns.observation_tokens("\n\na  b", first=True)
    assert text_tokens == tokenizer.encode(f"{own['first_prefix']}\n\na  b{own['suffix']}").ids
    assert text_tokens.count(tokenizer.token_to_id("  ")) == 3


def test_turn_marker_of_one_letter_is_refused(tmp_path: Path) -> None:
    tokenizer = by_likelihood(special_tokens("$", special=False))
    with pytest.raises(TurnFormatError, match=r"text can spell '\$', which marks turns"):
        TurnFormat(folder(tmp_path, tokenizer, own={"suffix": "$"}, eos="</s>"))


@pytest.mark.parametrize(("template", "eos"), [(CHATML, "<|im_end|>"), (HEADERS, "<|endoftext|>")])
@pytest.mark.parametrize("own", [False, True])
def test_truncated_turn_is_closed_before_the_next_observation(
    tmp_path: Path, template: str, eos: str, *, own: bool
) -> None:
    """In its own turn format the end is that of a user turn, wherever the generation configuration names it."""
    tokenizer = byte_level()
    ends = {CHATML: "<|im_end|>", HEADERS: "<|eot_id|>"}[template]
    frame = {"prefix": "\nuser: ", "suffix": f"{ends}\nassistant:"} if own else None
    stops: list[Any] = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", ends)]
    turns = TurnFormat(folder(tmp_path, tokenizer, template, eos=eos, own=frame, stops=stops))
    whole = turns.observation_tokens("7", first=False)
    assert turns.stop_token_ids[0] == tokenizer.token_to_id(ends)
    assert turns.observation_tokens("7", first=False, after=[50, 60]) == [turns.stop_token_ids[0], *whole]
    for stop in stops:
        assert turns.observation_tokens("7", first=False, after=[50, stop]) == whole


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("assistant", ["<|im_start|>assistant\n", "assistant: "])
@pytest.mark.parametrize("before", ["", "<|eot_id|>"])
def test_turn_format_end_token_overrides_the_stop_token_of_a_base_model(
    tmp_path: Path, before: str, eos: str, assistant: str
) -> None:
    tokenizer: Any = byte_level()
    frame = {"prefix": "\n<|im_start|>user\n", "suffix": f"{before}<|im_end|>\n{assistant}"}
    stop, end = (tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>"))
    turns = TurnFormat(folder(tmp_path, tokenizer, eos=eos, own=frame, stops=[stop]))
    known = eos == "<|im_end|>" or "<|im_start|>" in assistant
    assert turns.stop_token_ids == ((end, stop) if known else (stop,))


def test_assistant_marker_of_a_turn_format_does_not_end_an_action(tmp_path: Path) -> None:
    tokenizer: Any = byte_level(special_tokens("<|User|>", "<|Assistant|>", "<think>", "<eos>"))
    frame = {"prefix": "<|User|>", "suffix": "<|Assistant|><think>\n"}
    assert TurnFormat(folder(tmp_path, tokenizer, eos="<eos>", own=frame)).stop_token_ids == (3,)


@pytest.mark.parametrize("ended", ["<|user|>", "<|endoftext|>", "<|observation|>", ""])
def test_user_text_follows_its_marker_after_any_stop_token(tmp_path: Path, ended: str) -> None:
    """GLM has this form: its template ends an action with the marker of the next speaker."""
    template = """{{ '<sop>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}
    {%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
    stops = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    tokenizer: Any = byte_level(special_tokens("<sop>", "<|assistant|>", *stops))
    ids = {mark: tokenizer.token_to_id(mark) for mark in ("<|assistant|>", *stops)}
    path = folder(tmp_path, tokenizer, template, bos="<sop>", eos="<|endoftext|>", stops=[ids[stop] for stop in stops])
    action = [*tokenizer.encode("=7").ids, *([ids[ended]] if ended else [])]
    observation = TurnFormat(path).observation_tokens("more", first=False, after=action)
    text_tokens = [*tokenizer.encode("more").ids, ids["<|assistant|>"]]
    assert observation == (text_tokens if ended == "<|user|>" else [ids["<|user|>"], *text_tokens])


def test_stop_tokens_are_not_part_of_an_action(tmp_path: Path) -> None:
    turns = TurnFormat(model_folder(tmp_path))
    *tokens, last = turns.action_tokens("CDM")[:-1]
    assert turns.action_text([*tokens, last]) == "CDM"
    assert turns.action_text([*tokens, last], (last,)) == "CD"
    assert turns.action_text([last, *tokens], (last,)) == "MCD", "only what ended it"
    assert turns.action_text([*tokens, END], (last,)) == "CD"


EDGES = st.text(" \n\t", max_size=3)


@pytest.mark.parametrize(
    ("template", "make", "bos", "eos"),
    [
        (CHATML, byte_level, "", "<|im_end|>"),
        (HEADERS, byte_level, "<|begin_of_text|>", "<|endoftext|>"),
        (ROLES, lambda: word_marking(ROLE_TOKENS), "<s>", "</s>"),
        (
            "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
            "{{ '<|assistant|>\\n' }}",
            lambda: word_marking(special_tokens("<|user|>", "<|assistant|>", "<|end|>", rstrip=True)),
            "<s>",
            "<|end|>",
        ),
    ],
    ids=["keeps", "trims", "marks words", "strips behind tokens"],
)
def test_outer_white_space_of_an_observation_follows_template_and_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, template: str, make: Callable[[], Any], bos: str, eos: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = make()
    made = folder(tmp_path_factory.mktemp("model"), tokenizer, template, bos=bos, eos=eos)
    turns = TurnFormat(made)
    reference: Any = PreTrainedTokenizerFast(tokenizer_file=str(made / "tokenizer.json"), bos_token=bos, eos_token=eos)

    @given(EDGES, EDGES, st.text(" \nab7:", max_size=6))
    def reads_alike(before: str, behind: str, text: str) -> None:
        observation = f"{before}x{text}7{behind}"
        messages = [{"role": "user", "content": observation}]
        rendered = reference.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=False
        )
        assert turns.observation_tokens(observation, first=True) == tokenizer.encode(rendered).ids

    reads_alike()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("message['content'] | replace('\\n\\n', '\\n')", "does not write the observation 'wide  gaps"),
        ("message['content'].split() | join(' ')", "does not write the observation 'two words"),
        ("message['content'] | upper", "does not write the observation 'two words"),
        ("message['content'].removesuffix('7')", "does not write the action '0.7' as it is"),
        (
            "message['content'].strip('\\n')",
            "changes the white space at the ends of an observation in a way of its own",
        ),
        (
            "('' if message.role == 'user' else ' ') + message['content']",
            "writes ' ' before an action of earlier turns",
        ),
    ],
)
def test_template_that_alters_text_is_refused_with_the_alteration(tmp_path: Path, content: str, words: str) -> None:
    template = CHATML.replace("message['content']", f"({content})")
    with pytest.raises(TurnFormatError, match=words) as refused:
        TurnFormat(folder(tmp_path, byte_level(), template))
    assert "turn_format.json" in str(refused.value) and "\n" not in str(refused.value)


def test_generation_prompt_absent_from_earlier_turns_is_refused_with_the_difference(tmp_path: Path) -> None:
    template = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
    with pytest.raises(TurnFormatError, match=r"ends its generation prompt with '<think>\\n', and leaves that out"):
        TurnFormat(folder(tmp_path, byte_level(), template))


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("<|im_strat|>", "<|im_start|>"),
        ("<|im_start>", "<|im_start|>"),
        ("<|im_start |>", "<|im_start|>"),
        ("<|im_start", "<|im_start|>"),
        ("im_start|>", "<|im_start|>"),
        ("<im_start>", "<|im_start|>"),
        ("<|IM_START|>", "<|im_start|>"),
        ("<｜im_start｜>", "<|im_start|>"),
        ("<|eot|>", "<|eot_id|>"),
        ("<|user|>", ""),
    ],
)
def test_misspelt_turn_format_token_is_refused_with_the_likely_token(tmp_path: Path, word: str, meant: str) -> None:
    for part, template in (("first_prefix", ""), ("prefix", ""), ("suffix", ""), ("prefix", CHATML)):
        own = {**FRAMED, **ENDED, part: f"\n{word}\nuser\n"}
        with pytest.raises(TurnFormatError, match="is no token of tokenizer") as refused:
            TurnFormat(folder(tmp_path, byte_level(), template, own=own))
        assert (f"(is {meant!r} meant?)" in str(refused.value)) == bool(meant)
        assert str(tmp_path / "turn_format.json") in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["User: ", "<thought>\n", "in <thinking></thinking>:\n", "[1] ", "Q> ", "<|im_start|>tool\n", "a < b", "{x}|"],
)
def test_turn_format_may_contain_plain_words(tmp_path: Path, text: str) -> None:
    tokenizer = byte_level([*special_tokens(*SPECIAL), *special_tokens("<think>", "</think>", special=False)])
    turns = TurnFormat(folder(tmp_path, tokenizer, own={**FRAMED, **ENDED, "prefix": text}))
    assert turns.action_text(turns.observation_tokens("7", first=False)) == f"{text}7{ENDED['suffix']}"


def test_turn_format_may_contain_plain_words_of_the_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}<|user|>"
    own = {**FRAMED, **ENDED, "prefix": "<|user|>"}
    TurnFormat(folder(tmp_path, byte_level(), template, own=own))


MARKED = special_tokens("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>")
TURNS = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + END }}{% endfor %}{{ '<|assistant|>\\n' }}"


@pytest.mark.parametrize(
    ("template", "own", "eos"),
    [
        (CHATML.replace("You are a helpful assistant.", "Add."), None, "<|im_end|>"),
        (TURNS.replace("END", "eos_token + '\\n'"), None, "</s>"),
        (TURNS.replace("END", "'<|end|>\\n'"), None, "<|end|>"),
        ("", {**FRAMED, **ENDED}, "<|im_end|>"),
        ("", {"first_prefix": "<s>User:", "prefix": "User:", "suffix": "<|end|>Answer:"}, "</s>"),
        ("", {"first_prefix": "<s>", "prefix": "\n", "suffix": "<|end|>"}, "</s>"),
        ("", {"first_prefix": "", "prefix": "[", "suffix": "]"}, "</s>"),
        ("", {"first_prefix": "<s><|user|> ", "prefix": "<|user|> ", "suffix": "<|assistant|>"}, "</s>"),
    ],
    ids=["ChatML", "TinyLlama", "Phi-3", "own ChatML", "own words", "own lines", "no mark first", "own spaces"],
)
def test_tokenizer_with_a_first_word_marker_reads_turns_like_the_whole_conversation(
    tmp_path: Path, template: str, own: dict[str, str] | None, eos: str
) -> None:
    """transformers 5 saves the tokenizers of Llama 2 and Mistral with the `prepend_scheme` "first"."""
    tokenizer: Any = word_marking(MARKED, scheme="first")
    turns = TurnFormat(folder(tmp_path, tokenizer, template, own=own, bos="<s>", eos=eos))
    text_tokens = ["3 + 4", "=7", " so  what", "0 + 7", "7"]
    tokens = [
        token
        for at, text in enumerate(text_tokens)
        for token in (turns.action_tokens(text) if at % 2 else turns.observation_tokens(text, first=not at))
    ]
    assert tokens == tokenizer.encode(written_out(text_tokens, template, own, eos), add_special_tokens=False).ids


def written_out(text_tokens: list[str], template: str, own: dict[str, str] | None, eos: str) -> str:
    """Return observations and actions in turn as one text, which ends where the policy continues."""
    if own is None:
        messages = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(text_tokens)]
        return str(Template(template).render(messages=messages, eos_token=eos, add_generation_prompt=True))
    framed = (text + eos if at % 2 else own["prefix"] + text + own["suffix"] for at, text in enumerate(text_tokens))
    return own["first_prefix"] + "".join(framed).removeprefix(own["prefix"])


def test_forbidden_token_text_is_split_without_extra_word_markers(tmp_path: Path) -> None:
    tokenizer: Any = word_marking(MARKED, scheme="first")
    turns = TurnFormat(folder(tmp_path, tokenizer, own={**FRAMED, **ENDED}, bos="<s>", eos="<|im_end|>"))
    text_tokens = turns.observation_tokens("a<|im_end|>b", first=False)
    assert turns.action_text(text_tokens) == f"{FRAMED['prefix']}a<|im_end|>b{ENDED['suffix']}"


def test_framing_that_tokenizes_differently_beside_an_observation_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level([AddedToken("END", special=True, normalized=False, single_word=True)])
    own = {"first_prefix": "User: ", "prefix": " User: "}
    TurnFormat(folder(tmp_path, tokenizer, own={**own, "suffix": " END\nRobot: "}, eos="END"))
    with pytest.raises(
        TurnFormatError, match=r"turn_format\.json: its tokenizer reads '.*' and what .* otherwise piece by piece"
    ):
        TurnFormat(folder(tmp_path, tokenizer, own={**own, "suffix": "END\nRobot: "}, eos="END"))


@pytest.mark.parametrize("scheme", ["", "first", "always"])
def test_context_has_no_extra_word_markers(tmp_path: Path, scheme: str) -> None:
    tokenizer = word_marking(scheme=scheme)
    own = {"first_prefix": "<s> User: ", "prefix": "</s> User: ", "suffix": " Answer:</s>"}
    turns = TurnFormat(folder(tmp_path, tokenizer, own=own, bos="<s>", eos="</s>"))
    for text in ("7: 8", "  7", "a\n"):
        assert turns.observation_tokens(text, first=True) == tokenizer.encode(f"<s> User: {text} Answer:</s>").ids


def test_template_is_read_as_utf8_in_every_locale(tmp_path: Path) -> None:
    """Python uses ASCII in the locale C."""
    made = folder(tmp_path, byte_level(), "{# 起 #}" + CHATML)
    program = "import sys; from pathlib import Path; from rose.workers.environments.turn_format import TurnFormat; "
    program += "print(*TurnFormat(Path(sys.argv[1])).observation_tokens('7', first=True))"
    command = [sys.executable, "-X", "utf8=0", "-c", program, str(made)]
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    ran = subprocess.run(command, env=plain, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    expected = TurnFormat(made).observation_tokens("7", first=True)
    assert ran.stdout.split() == [str(token) for token in expected], ran.stderr


def test_lone_surrogate_is_reported_in_one_sentence(tmp_path: Path) -> None:
    turns = TurnFormat(model_folder(tmp_path))
    with pytest.raises(ValueError, match=r"half of a surrogate pair and no character \('\\ud83d' at 3\)"):
        turns.observation_tokens("go \ud83d!", first=False)


TAGS = ["<table>", "<td>", "<b>", "<i>", "<s>", "<h1>", "<code>", "<br>", "<sup>", "<start_of_turn>", "[INST]"]
"""Gemma's tokenizers have these tokens besides the turn markers."""


@pytest.mark.parametrize(
    "text",
    [
        *("</table>", "<table></table>", "[b]", "[i]", "[s]", "[/s]", "[/b]", "<B>", "<TD>", "</TD>", "<tr>", "<H1>"),
        *("<br/>", "<sub>", '<table class="wide">', "<table\n", "<tables>", "</code>", "[/code]", "a <b"),
    ],
)
def test_tag_or_short_word_similar_to_a_token_is_not_a_misspelt_token(text: str) -> None:
    assert misspelt(f"user: {text}\n", TAGS) is None


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("<start_of_tum>", "<start_of_turn>"),
        ("<start_of_turn", "<start_of_turn>"),
        ("<Start_Of_Turn>", "<start_of_turn>"),
        ("[start_of_turn]", "<start_of_turn>"),
        ("<|start_of_turn|>", "<start_of_turn>"),
        ("<INST>", "[INST]"),
        ("<tabel>", "<table>"),
        ("<|b|>", "<b>"),
    ],
)
def test_misspelt_token_among_tags_is_found_with_the_likely_token(word: str, meant: str) -> None:
    assert misspelt(f"user: {word}\n", TAGS) == (word, meant)
