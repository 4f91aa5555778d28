"""Model folders with small tokenizers of common policy families, and their chat templates."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML = """
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Template in the form of SmolLM2 and Qwen2.5: a default system prompt, then every message unchanged."""

HEADERS = """
{%- for message in messages %}
{%- set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
{%- set content = head + message['content'] | trim + '<|eot_id|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{- content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
"""Template in the form of Llama 3."""

ROLES = """
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}
{%- else %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}{% endif %}
{%- endfor %}{{ '<｜Assistant｜>' }}
"""
"""Template in the form of the R1 distillations, whose tokenizers do not mark the role tokens as special."""

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
]
SPECIAL += ["<|eot_id|>"]
PIECES = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Pre-tokenization pattern of Qwen and Llama."""

CORPUS = [
    "user assistant system",
    "You are a helpful assistant. Let me see.\n\nIt is 12.",
    "words and lines 1234567890",
]


def special_tokens(*words: str, special: bool = True, rstrip: bool = False) -> list[AddedToken]:
    return [AddedToken(word, special=special, normalized=False, rstrip=rstrip) for word in words]


def byte_level(added: Sequence[AddedToken] = special_tokens(*SPECIAL)) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    byte_level: Any = pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), byte_level(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    first = [token for token in added if token.special]
    alphabet = byte_level.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=first, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer


def word_marking(added: Sequence[AddedToken] = (), *, scheme: str = "") -> Tokenizer:
    """Return a tokenizer in the form of Llama 2: bytes for unknown characters, and `▁` at the beginning of a word.

    `scheme` is that of Metaspace. If it is empty, each part of a text between two special tokens begins with a marker.
    """
    as_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = ["<unk>", "<s>", "</s>", *as_bytes, "▁", *map(chr, range(33, 127))]
    merges = [("▁", "7"), ("7", ":"), ("▁", "▁")]
    ids = {word: index for index, word in enumerate([*vocabulary, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens([*special_tokens("<unk>", "<s>", "</s>"), *added])
    return tokenizer


def by_likelihood(added: Sequence[AddedToken] = ()) -> Tokenizer:
    """Return a Unigram tokenizer whose vocabulary has its special tokens as text pieces."""
    words = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((token.content, -1.0) for token in added)]
    letters = [(letter, -5.0) for letter in ["\n", "\t", "｜", *map(chr, range(32, 127))]]
    tokenizer = Tokenizer(models.Unigram([*words, *letters], 0, False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([*special_tokens("<unk>", "<s>", "</s>"), *added])
    return tokenizer


def by_word(added: Sequence[AddedToken] = ()) -> Tokenizer:
    """Return a tokenizer of whole words whose vocabulary has its special tokens as words."""
    words = ["<unk>", "<s>", "</s>", *(token.content for token in added), "go"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([*special_tokens("<unk>", "<s>", "</s>"), *added])
    return tokenizer


def folder(
    path: Path,
    tokenizer: Tokenizer,
    template: str = "",
    *,
    inside: bool = False,
    bos: str = "<|begin_of_text|>",
    eos: str = "<|im_end|>",
    own: dict[str, str] | None = None,
    stops: Sequence[int] = (),
) -> Path:
    """Write a model folder. If `inside`, the template is a field of the tokenizer configuration; `own` is its turn
    format."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": bos, "eos_token": {"content": eos}}
    if inside:
        config["chat_template"] = template
    elif template:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if own is not None:
        (path / "turn_format.json").write_text(json.dumps(own), encoding="utf-8")
    if own is not None or stops:
        named = list(stops) or tokenizer.token_to_id(eos)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}), encoding="utf-8")
    return path
