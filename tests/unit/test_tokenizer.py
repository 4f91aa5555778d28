"""A tokenizer reads a text as in training, whatever state of its last use its file has."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, processors

from rose.schemas.errors import UsageError
from rose.workers.environments.turn_format import TurnFormat
from rose.workers.tokenizer import TokenizerError, check_reading, load_tokenizer
from rose.workers.trainer.policy import load_policy
from tests.support.tokenizer_fixtures import CHATML, byte_level, folder, word_marking

TEXT = "words and lines, see? " * 300


def drops_out(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.5


REMEMBERED: dict[str, Callable[[Tokenizer], object]] = {
    "truncation": lambda tokenizer: tokenizer.enable_truncation(8),
    "padding": lambda tokenizer: tokenizer.enable_padding(length=4096),
    "a post-processor": lambda tokenizer: setattr(
        tokenizer,
        "post_processor",
        processors.TemplateProcessing(single="<|im_start|> $A $A", special_tokens=[("<|im_start|>", 0)]),
    ),
    "dropout": drops_out,
}


@pytest.mark.parametrize("remembers", REMEMBERED.values(), ids=REMEMBERED.keys())
def test_tokenizer_state_changes_no_observation(tmp_path: Path, remembers: Callable[[Tokenizer], object]) -> None:
    fresh = TurnFormat(folder(tmp_path / "fresh", byte_level(), CHATML)).observation_tokens(TEXT, first=False)
    used = byte_level()
    remembers(used)
    turns = TurnFormat(folder(tmp_path / "used", used, CHATML))
    assert len(fresh) > 900
    assert [turns.observation_tokens(TEXT, first=False) for _ in range(3)] == [fresh] * 3


def test_tokenizer_has_all_tokens_by_every_loader(tmp_path: Path) -> None:
    file = folder(tmp_path, byte_level()) / "tokenizer.json"
    whole, loaded = Tokenizer.from_file(str(file)), load_tokenizer(file, special=["words"])
    assert loaded.get_vocab(with_added_tokens=True) == whole.get_vocab(with_added_tokens=True)
    assert loaded.encode(TEXT).ids == whole.encode(TEXT).ids


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b'{"model": []}', b'{"model": {"type": "Unheard"}}'])
def test_invalid_tokenizer_file_is_reported_in_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is no readable tokenizer") as refused:
        load_tokenizer(tmp_path / "tokenizer.json")
    assert "\n" not in str(refused.value)


def test_tokenizer_in_the_format_of_mistral_alone_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"has tekken\.json, .* no tokenizer\.json: take the tokenizer\.json and"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_old_tokenizer_file_without_a_dropout_field_is_accepted(tmp_path: Path) -> None:
    file = folder(tmp_path, byte_level()) / "tokenizer.json"
    tokenizer_json = json.loads(file.read_bytes())
    del tokenizer_json["model"]["dropout"], tokenizer_json["post_processor"], tokenizer_json["truncation"]
    file.write_text(json.dumps(tokenizer_json), encoding="utf-8")
    assert load_tokenizer(file).encode(TEXT).ids == byte_level().encode(TEXT).ids


def flagged(place: Path, tokenizer: Tokenizer, kind: str, **flags: object) -> Path:
    """A folder of a model of this type, whose tokenizer_config.json has these flags."""
    made = folder(place, tokenizer, CHATML)
    (made / "tokenizer_config.json").write_text(json.dumps(flags))
    config = {"model_type": kind, "architectures": ["Some"], "transformers_version": "4.50.0"}
    (made / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.get_vocab_size()}))
    save_file({"model.norm.weight": np.zeros(4, np.float32)}, made / "model.safetensors")
    return made


def large() -> Tokenizer:
    """A tokenizer of so many tokens that transformers asks whether it is Mistral's."""
    said = json.loads(byte_level().to_str())
    vocabulary = said["model"]["vocab"]
    vocabulary |= {f"<{number}>": number for number in range(len(vocabulary), 100_001)}
    return Tokenizer.from_str(json.dumps(said))


BYTES, WORDS = {"tokenizer_class": "GPT2Tokenizer"}, {"tokenizer_class": "LlamaTokenizer"}

FLAGS: dict[str, tuple[Callable[[], Tokenizer], str, dict[str, object]]] = {
    "a space in front": (byte_level, "gpt2", BYTES | {"add_prefix_space": True}),
    "no space in front": (word_marking, "llama", WORDS | {"add_prefix_space": False}),
    "no space behind a special token": (lambda: word_marking(scheme="always"), "llama", {**WORDS}),
    "special tokens by letters": (byte_level, "llama", {"split_special_tokens": True}),
    "Mistral's pieces": (large, "mistral", {"fix_mistral_regex": True}),
    "a class with pieces of its own": (byte_level, "qwen2", {"tokenizer_class": "Qwen2Tokenizer"}),
}


@pytest.mark.parametrize(("make", "kind", "flags"), FLAGS.values(), ids=FLAGS.keys())
def test_flag_that_only_transformers_applies_is_refused_by_trainer_and_evaluation(
    make: Callable[[], Tokenizer], kind: str, flags: dict[str, object], tmp_path: Path
) -> None:
    made = flagged(tmp_path, make(), kind, **flags)
    for start in (check_reading, load_policy):
        with pytest.raises(UsageError, match=r"AutoTokenizer makes other tokens of .* write the files with") as refused:
            start(made)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_class_that_reads_the_file_as_it_is_is_not_compared_with_that_of_the_model_type(
    tmp_path: Path, named: str
) -> None:
    """AutoTokenizer takes the class of Qwen 2 for every policy of that type, also if its tokenizer is another one."""
    check_reading(flagged(tmp_path, byte_level(), "qwen2", tokenizer_class=named))


@pytest.mark.parametrize("flag", [True, False])
def test_tokenizer_written_by_transformers_gives_the_tokens_of_transformers(tmp_path: Path, *, flag: bool) -> None:
    from transformers import AutoTokenizer

    made = flagged(tmp_path, byte_level(), "gpt2", **BYTES, add_prefix_space=flag)
    AutoTokenizer.from_pretrained(made).save_pretrained(made)
    check_reading(made)
    theirs = AutoTokenizer.from_pretrained(made)(TEXT)["input_ids"]
    assert load_tokenizer(made / "tokenizer.json").encode(TEXT, add_special_tokens=False).ids == theirs
