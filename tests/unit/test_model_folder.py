"""A broken model folder is reported in one clear sentence before any engine is built."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from rose.schemas.errors import UsageError
from rose.workers.weights.model_folder import FolderError, check_folder, weight_files

VOCABULARY = 12

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123456\n"

OTHER_TASKS = (
    *(
        "LlamaForSequenceClassification",
        "Qwen2ForTokenClassification",
        "Qwen2ForRewardModel",
        "InternLM2ForRewardModel",
    ),
    *("Qwen2ForProcessRewardModel", "LlamaRewardModel", "GPT2ForQuestionAnswering", "BertForMaskedLM"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCABULARY}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": np.zeros((VOCABULARY, 4), np.float32), "model.norm.weight": np.zeros(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def write_tokenizer(folder: Path, tokens: int) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {chr(ord("a") + i): i for i in range(tokens)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))


def test_complete_folder_gives_its_shapes_and_vocabulary(folder: Path) -> None:
    write_tokenizer(folder, VOCABULARY)
    shapes, vocabulary = check_folder(folder)
    assert shapes == {"model.embed_tokens.weight": (VOCABULARY, 4), "model.norm.weight": (4,)}
    assert vocabulary == VOCABULARY


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def rewrite_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_hidden_files_beside_the_weights_are_ignored(folder: Path) -> None:
    (folder / "._model.safetensors").write_bytes(b"attributes")
    assert weight_files(folder) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f: (f / "config.json").unlink(), "no readable config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[" * 100_000), "does not say in which file"),
        (lambda f: rewrite_config(f, architectures=[]), "names no architectures"),
        (lambda f: rewrite_config(f, vocab_size=None), "names no architectures or vocab_size"),
        (lambda f: rewrite_config(f, vocab_size=[12]), "names no architectures or vocab_size"),
        (lambda f: rewrite_config(f, vocab_size="12"), 'vocab_size "12": it must be a whole number above 0'),
        (lambda f: rewrite_config(f, vocab_size=True), "vocab_size true: it must be a whole number above 0"),
        (lambda f: rewrite_config(f, vocab_size=-1), "vocab_size -1: it must be"),
        (lambda f: rewrite_config(f, vocab_size=12.0), r"vocab_size 12\.0: it must be"),
        (lambda f: rewrite_config(f, hidden_size=0), "hidden_size 0: it must be"),
        (lambda f: rewrite_config(f, num_hidden_layers=float("nan")), "num_hidden_layers NaN: it must be"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no"),
        (truncate, "no readable safetensors"),
        (lambda f: (f / "model.safetensors").write_text(POINTER), "is a pointer of git-lfs: .* git lfs pull"),
        (lambda f: rewrite_config(f, dtype="auto"), 'dtype "auto": write the element type'),
        (lambda f: rewrite_config(f, torch_dtype="auto"), 'dtype "auto": write the element type'),
        (lambda f: rewrite_config(f, quantization_config={"quant_method": "fp8"}), "remove the key quantization"),
        (lambda f: rewrite_config(f, quantization_config={"quant_method": "bitnet"}), "a BitNet policy"),
        (lambda f: rewrite_config(f, compression_config={"format": "x"}), "remove the key compression_config"),
        (lambda f: (f / "hf_quant_config.json").write_text("{}"), "not quantized: remove the file hf_quant_config"),
        *(
            (lambda f, name=name: rewrite_config(f, architectures=[name]), f"{name}, which is no causal language model")
            for name in OTHER_TASKS
        ),
        (lambda f: rewrite_config(f, vocab_size=13), "a vocabulary of 13"),
        (lambda f: write_tokenizer(f, 13), "the tokenizer has 13 tokens, the model 12"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "no readable tokenizer"),
    ],
)
def test_broken_folder_is_reported_in_one_sentence(folder: Path, spoil: Callable[[Path], object], reason: str) -> None:
    spoil(folder)
    with pytest.raises(UsageError, match=reason) as caught:
        check_folder(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("said", [{}, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.0.mlp.up_proj.weight", torch.uint8),  # bitsandbytes
        ("model.layers.0.mlp.up_proj.weight", torch.int8),
        ("model.layers.0.mlp.up_proj.qweight", torch.int32),  # GPTQ, AWQ
        ("model.layers.0.mlp.up_proj.weight", torch.float8_e4m3fn),
    ],
)
def test_quantized_weights_are_refused_whatever_the_config_says(
    folder: Path, name: str, dtype: torch.dtype, said: dict[str, object]
) -> None:
    rewrite_config(folder, **said)
    save_torch_file({name: torch.zeros(4, 4, dtype=dtype)}, folder / "model.safetensors")
    with pytest.raises(FolderError, match=rf"quantized weights, .*{name} is .*: take the same model"):
        check_folder(folder)


def test_integer_tensors_that_are_not_weights_are_accepted_and_left_out(folder: Path) -> None:
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "transformer.position_ids": torch.arange(4),
        "transformer.h.0.attn.mask": torch.ones(4, 4, dtype=torch.bool),
    }
    save_torch_file(masks | {"transformer.ln_f.weight": torch.zeros(4)}, folder / "model.safetensors")
    assert check_folder(folder)[0] == {"transformer.ln_f.weight": (4,)}


@pytest.mark.parametrize(
    "name",
    [
        *("transformer.wte.weight", "gpt_neox.embed_in.weight", "embed_out.weight"),
        *("transformer.word_embeddings.weight", "lm_head.weight"),
    ],
)
def test_weights_with_rows_unlike_the_vocabulary_are_refused_with_both_sizes(folder: Path, name: str) -> None:
    save_file({name: np.zeros((VOCABULARY + 1, 4), np.float32)}, folder / "model.safetensors")
    with pytest.raises(FolderError, match=rf"{name} has shape \(13, 4\), config.json says a vocabulary of 12"):
        check_folder(folder)


def test_path_that_is_not_a_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="is not a model folder"):
        check_folder(tmp_path / "nowhere")
