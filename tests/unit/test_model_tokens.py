"""Tokens of a folder equal those of transformers, and all are within the model's vocabulary."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from rose.workers.environments.turn_format import TurnFormat, TurnFormatError
from rose.workers.tokenizer import TokenizerError
from rose.workers.weights.model_folder import check_folder
from tests.support.tokenizer_fixtures import CHATML, byte_level, folder, special_tokens, word_marking

MARKS = ("<|im_start|>", "<|im_end|>")
FRAME = {"first_prefix": "<|im_start|>user\n", "prefix": "\n<|im_start|>user\n", "suffix": "<|im_end|>\n<|im_start|>"}
SIZE = 313
"""Tokens of `byte_level` before any is added."""


def entry(text: str, *, special: bool = True, rstrip: bool = False) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    return {"content": text, "special": special, "rstrip": rstrip, **flags}


def written(path: Path, tokenizer: Tokenizer, template: str = CHATML, **files: dict[str, Any]) -> Path:
    """Write a folder with files of these names and contents."""
    made = folder(path, tokenizer, template)
    files["tokenizer_config"] = {"tokenizer_class": "PreTrainedTokenizerFast"} | files.get("tokenizer_config", {})
    for name, content in files.items():
        (made / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return made


def reads_as_transformers(made: Path) -> TurnFormat:
    """Return the turn format, after a check that a conversation equals that of transformers."""
    from transformers import AutoTokenizer

    turns, reference = TurnFormat(made), AutoTokenizer.from_pretrained(made, local_files_only=True)
    messages = [("user", "7 and 3"), ("assistant", "10, I think"), ("user", "over")]
    conversation = [{"role": role, "content": text} for role, text in messages]
    rendered = reference.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    context = turns.observation_tokens("7 and 3", first=True) + turns.action_tokens("10, I think")
    context += turns.observation_tokens("over", first=False)
    assert context == reference.encode(rendered, add_special_tokens=False)
    return turns


NAMED: dict[str, dict[str, Any]] = {
    "as text": {"tokenizer_config": {"bos_token": "<s>"}},
    "in the map": {"special_tokens_map": {"bos_token": "<s>"}},
    "in the map as an object": {"special_tokens_map": {"bos_token": {"content": "<s>", "lstrip": False}}},
    "in the map over the configuration": {
        "tokenizer_config": {"bos_token": "<|im_end|>"},
        "special_tokens_map": {"bos_token": "<s>"},
    },
    "not in the map of a newer folder": {
        "tokenizer_config": {"added_tokens_decoder": {"0": entry("<s>")}, "bos_token": "<s>"},
        "special_tokens_map": {"bos_token": "<|im_end|>"},
    },
    "nowhere": {},
    "null": {"tokenizer_config": {"bos_token": None}},
}


@pytest.mark.parametrize("files", NAMED.values(), ids=NAMED.keys())
@pytest.mark.parametrize(
    "begin", ["{{- bos_token }}", "{%- if bos_token is defined %}{{- bos_token + 'x' }}{% endif %}"]
)
def test_special_tokens_are_found_where_transformers_finds_them(
    tmp_path: Path, files: dict[str, Any], begin: str
) -> None:
    tokenizer = byte_level(special_tokens("<s>", *MARKS))
    named: dict[str, Any] = {name: dict(content) for name, content in files.items()}
    reads_as_transformers(written(tmp_path, tokenizer, begin + CHATML, **named))


def test_named_tokens_of_the_folder_are_passed_to_its_template(tmp_path: Path) -> None:
    tokenizer = byte_level(special_tokens("<image>", *MARKS))
    template, named = "{{- image_token }}" + CHATML, {"image_token": "<image>"}
    reads_as_transformers(written(tmp_path / "plain", tokenizer, template, tokenizer_config=named))
    extra = {"extra_special_tokens": named}
    reads_as_transformers(written(tmp_path / "extra", tokenizer, template, tokenizer_config=extra))


def test_template_with_an_unnamed_token_known_to_the_tokenizer_is_refused(tmp_path: Path) -> None:
    made = written(
        tmp_path, byte_level(), "{{- bos_token }}" + CHATML, tokenizer_config={"tokenizer_class": "LlamaTokenizer"}
    )
    with pytest.raises(TurnFormatError, match=r"writes bos_token, and no file says which token that is"):
        TurnFormat(made)


ELSEWHERE: dict[str, dict[str, Any]] = {
    "decoder": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                str(SIZE): entry(MARKS[0]),
                str(SIZE + 1): entry(MARKS[1]),
                str(SIZE + 2): entry("<tool>", special=False),
            }
        }
    },
    "added_tokens": {
        "added_tokens": {MARKS[1]: SIZE + 1, "<tool>": SIZE + 2, MARKS[0]: SIZE},
        "special_tokens_map": {"eos_token": MARKS[1], "additional_special_tokens": [MARKS[0]]},
    },
    "names": {"tokenizer_config": {"bos_token": MARKS[0], "eos_token": MARKS[1]}},
    "a list": {"tokenizer_config": {"additional_special_tokens": list(MARKS)}},
}


@pytest.mark.parametrize("files", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_tokens_from_auxiliary_files_are_tokens(tmp_path: Path, files: dict[str, Any]) -> None:
    named: dict[str, Any] = {name: dict(content) for name, content in files.items()}
    turns = reads_as_transformers(written(tmp_path, byte_level([]), **named))
    assert turns.stop_token_ids[0] == SIZE + 1
    plain, spelt = (turns.observation_tokens(text, first=False) for text in ("go", "".join(MARKS)))
    assert [spelt.count(mark) for mark in (SIZE, SIZE + 1)] == [plain.count(mark) for mark in (SIZE, SIZE + 1)]
    named["generation_config"] = {"eos_token_id": SIZE + 1}
    own = TurnFormat(written(tmp_path, byte_level([]), turn_format=FRAME, **named))
    assert own.observation_tokens("", first=True)[0] == SIZE


def test_configuration_flags_override_tokenizer_flags(tmp_path: Path) -> None:
    tokenizer = byte_level(special_tokens(*MARKS))
    template = (
        "{% for m in messages %}{{ '<|im_start|>\\n' + m.content + '<|im_end|>' }}{% endfor %}{{ '<|im_start|>\\n' }}"
    )
    flags = {"added_tokens_decoder": {"0": entry(MARKS[0], rstrip=True), "1": entry(MARKS[1])}}
    turns = reads_as_transformers(written(tmp_path, tokenizer, template, tokenizer_config=flags))
    assert turns.observation_tokens("\n\n7", first=True) == turns.observation_tokens("7", first=True)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {"7000": entry("<|im_start|>")}}}, "is token 7000, and by"),
        ({"added_tokens": {"<|im_start|>": 7000}}, "is token 7000, and by"),
        ({"added_tokens": {"<|im_start|>": "first"}}, "is no map from tokens to ids"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "is no map from ids to tokens"),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": "x"}}}, "is no map from ids to tokens"),
    ],
)
def test_tokens_with_impossible_ids_are_refused(tmp_path: Path, files: dict[str, Any], reason: str) -> None:
    named: dict[str, Any] = {name: dict(content) for name, content in files.items()}
    with pytest.raises(TurnFormatError, match=reason) as refused:
        TurnFormat(written(tmp_path, byte_level([]), **named))
    assert "\n" not in str(refused.value)


def renamed(entry: dict[str, Any]) -> None:
    entry["content"] = "<|im_start|>"  # model.vocab keeps the old name


def behind_a_gap(entry: dict[str, Any]) -> None:
    entry |= {"id": 7000, "content": "<|im_start|>"}


@pytest.mark.parametrize("change", [renamed, behind_a_gap])
def test_ids_unlike_those_of_the_library_are_refused_by_every_reader(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    tokenizer = byte_level(special_tokens("<spare>", MARKS[1]))
    made = with_model(tmp_path, 8000, tokenizer)
    said = json.loads((made / "tokenizer.json").read_bytes())
    change(said["added_tokens"][0])
    (made / "tokenizer.json").write_text(json.dumps(said))
    for start, error in ((TurnFormat, TurnFormatError), (check_folder, TokenizerError)):
        with pytest.raises(error, match=r"tokenizer\.json: added_tokens says that '<\|im_start\|>' is token"):
            start(made)


def test_configured_id_unknown_to_the_tokenizer_is_refused(tmp_path: Path) -> None:
    configuration = {"added_tokens_decoder": {"0": entry(MARKS[0]), "7": entry(MARKS[1])}}
    with pytest.raises(
        TurnFormatError, match=r"'<.im_end.>' is token 7, and by the tokens of tokenizer\.json it would be 1"
    ):
        TurnFormat(written(tmp_path, byte_level(special_tokens(*MARKS)), tokenizer_config=configuration))


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.model"])
def test_folder_with_only_an_old_tokenizer_format_is_refused_with_the_conversion(name: str, tmp_path: Path) -> None:
    made = written(tmp_path, byte_level())
    (made / "tokenizer.json").rename(made / name)
    with pytest.raises(
        TurnFormatError, match=rf"has {name} and no tokenizer\.json: write the file with .*AutoTokenizer"
    ):
        TurnFormat(made)


MODEL = SIZE + len(MARKS)
"""Tokens of `byte_level` with those markers."""


def with_model(path: Path, vocabulary: int, tokenizer: Tokenizer, *, nested: bool = False, **files: Any) -> Path:
    """Write a folder whose model has this many tokens."""
    size = {"vocab_size": vocabulary}
    config = {"architectures": ["Qwen3ForCausalLM"], **({"text_config": size} if nested else size)}
    files["tokenizer_config"] = {"eos_token": MARKS[1]} | files.get("tokenizer_config", {})
    made = written(path, tokenizer, config=config, **files)
    save_file({"model.embed_tokens.weight": np.zeros((vocabulary, 4), np.float32)}, made / "model.safetensors")
    return made


def with_hole(number: int) -> Tokenizer:
    """Return a tokenizer with this id."""
    json_content = json.loads(byte_level(special_tokens(*MARKS)).to_str())
    json_content["model"]["vocab"]["zz"] = number
    json_content["model"]["merges"].append(["z", "z"])
    return Tokenizer.from_str(json.dumps(json_content))


def test_text_with_ids_beyond_the_model_is_refused_by_every_reader(tmp_path: Path) -> None:
    made = with_model(tmp_path, MODEL, with_hole(5000))
    with pytest.raises(TurnFormatError, match=r"an observation with 'zz' \(token 5000\) could not be computed"):
        TurnFormat(made)
    with pytest.raises(TokenizerError, match=r"an observation with 'zz' \(token 5000\) could not be computed"):
        check_folder(made)
    with pytest.raises(TurnFormatError, match=r"\(token 5000\)"):
        TurnFormat(with_model(tmp_path, MODEL, with_hole(5000), nested=True))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("stops", [151645, [1, 151645], [MODEL]])
def test_stop_token_beyond_the_model_vocabulary_is_refused(tmp_path: Path, stops: Any, *, own: bool) -> None:
    files: dict[str, Any] = {"generation_config": {"eos_token_id": stops}} | ({"turn_format": FRAME} if own else {})
    with pytest.raises(TurnFormatError, match=rf"token \d+, and the model has {MODEL} tokens") as refused:
        TurnFormat(with_model(tmp_path, MODEL, byte_level(special_tokens(*MARKS)), **files))
    assert "generation_config.json" in str(refused.value)


def test_turn_marker_beyond_the_model_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level(special_tokens(MARKS[1]))
    tokenizer.add_tokens(special_tokens(MARKS[0]))
    with pytest.raises(TurnFormatError, match=rf"token {MODEL - 1} \('<\|im_start\|>'\), and the model has"):
        TurnFormat(with_model(tmp_path, MODEL - 1, tokenizer))


def test_added_tokens_beyond_the_model_vocabulary_are_never_used(tmp_path: Path) -> None:
    """Many tokenizers got a padding token that their models lack."""
    tokenizer = byte_level(special_tokens(*MARKS))
    tokenizer.add_tokens([*special_tokens("<tool>", special=False), *special_tokens("[PAD]")])
    made = with_model(tmp_path, MODEL, tokenizer, tokenizer_config={"pad_token": "[PAD]", "unk_token": "<unk>"})
    turns = TurnFormat(made)
    text = "<tool>[PAD]<unk> go"
    text_tokens = turns.observation_tokens(text, first=False)
    assert max(text_tokens) < MODEL
    assert text in turns.action_text(text_tokens)
    assert check_folder(made)[1] == MODEL


def test_model_with_more_tokens_than_its_tokenizer_is_accepted(tmp_path: Path) -> None:
    made = with_model(tmp_path, MODEL + 64, byte_level(special_tokens(*MARKS)))
    assert TurnFormat(made).stop_token_ids == (1,)
    assert check_folder(made)[1] == MODEL + 64


NO_EOS: list[dict[str, Any] | None] = [None, {"do_sample": True}, {"eos_token_id": None}]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("generation", NO_EOS)
def test_stop_token_comes_from_the_tokenizer_without_a_generation_configuration(
    tmp_path: Path, generation: dict[str, Any] | None, *, own: bool
) -> None:
    files: dict[str, Any] = {"turn_format": FRAME} if own else {}
    files |= {} if generation is None else {"generation_config": generation}
    tokenizer, eos = byte_level(special_tokens("<eos>", *MARKS)), {"eos_token": "<eos>"}
    assert TurnFormat(written(tmp_path, tokenizer, tokenizer_config=eos, **files)).stop_token_ids[-1] == 0
    config = {"text_config": {"eos_token_id": [0, 1]}}
    assert set(TurnFormat(written(tmp_path, tokenizer, config=config, **files)).stop_token_ids) >= {0, 1}


def test_turn_format_without_a_stop_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TurnFormatError, match=r"generation_config\.json has no eos_token_id, and no other file"):
        TurnFormat(written(tmp_path, byte_level(), turn_format=FRAME))


@pytest.mark.parametrize("scheme", ["", "always"])
def test_action_within_a_line_is_parsed_as_an_action(tmp_path: Path, scheme: str) -> None:
    """Zephyr has this form: each text between special tokens begins with a word marker, and an action follows plain
    words."""
    template = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    template += "{{ '<|assistant|>\\n' }}"
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    turns = reads_as_transformers(written(tmp_path, word_marking(scheme=scheme), template, tokenizer_config=named))
    assert turns.action_text(turns.action_tokens("\n7")) == "\n7"


def test_empty_reasoning_blocks_of_a_template_are_part_of_the_framing(tmp_path: Path) -> None:
    """Qwen3 and SmolLM3 without thinking have this form: reasoning markers are in the framing, and text cannot spell
    them."""
    tokenizer = byte_level([*special_tokens(*MARKS), *special_tokens("<think>", "</think>", special=False)])
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    template += (
        "{{ '<think>\\n\\n</think>\\n\\n' if m.role == 'assistant' }}{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    )
    template += "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
    turns = reads_as_transformers(written(tmp_path, tokenizer, template, tokenizer_config={"eos_token": MARKS[1]}))
    think: Any = tokenizer.token_to_id("<think>")
    assert turns.observation_tokens("<think>", first=False).count(think) == 1


def test_python_number_literals_outside_json_are_read(tmp_path: Path) -> None:
    tokenizer = byte_level()
    path = folder(tmp_path, tokenizer, CHATML, stops=[2])
    for name, field in (("config.json", "time_step_limit"), ("generation_config.json", "min_length")):
        file = path / name
        json_content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"vocab_size": 512}
        file.write_text(json.dumps({**json_content, field: float("inf"), "other": float("nan")}), encoding="utf-8")
    assert TurnFormat(path).stop_token_ids == (1, 2)


def test_lone_surrogate_in_a_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    path = folder(tmp_path, byte_level(), own=FRAME)
    (path / "turn_format.json").write_text('{"prefix": "\\ud800"}', encoding="utf-8")
    with pytest.raises(TurnFormatError, match=r"turn_format\.json"):
        TurnFormat(path)
