"""A tokenizer reads a text as in training, whatever state of its last use its file has."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from rose.workers.environments.turn_format import TurnFormat
from rose.workers.tokenizer import TokenizerError, load_tokenizer
from tests.support.tokenizer_fixtures import CHATML, byte_level, folder

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


def test_old_tokenizer_file_without_a_dropout_field_is_accepted(tmp_path: Path) -> None:
    file = folder(tmp_path, byte_level()) / "tokenizer.json"
    tokenizer_json = json.loads(file.read_bytes())
    del tokenizer_json["model"]["dropout"], tokenizer_json["post_processor"], tokenizer_json["truncation"]
    file.write_text(json.dumps(tokenizer_json), encoding="utf-8")
    assert load_tokenizer(file).encode(TEXT).ids == byte_level().encode(TEXT).ids
