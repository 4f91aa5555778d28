"""Tiny random models of serving whose KV cache or input differs from that of a text model with one kind of layer.

Each folder has the tokenizer of the shipped policy, so that requests and guest turns use the same tokens.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.lender_server_fixtures import MODEL, VOCABULARY
from tests.support.model_families import tiny_policy

IMAGE_TOKENS = {
    token: VOCABULARY + number
    for number, token in enumerate(("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"))
}
"""Tokens of images by their text. The ids follow those of the shipped policy."""

IMAGE_PIXELS, PATCH_PIXELS = 56, 14

CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endfor %}"
)


def windowed_model(folder: Path) -> None:
    """Save a model with two layers with a window of 32 tokens and two layers without: its cache has two groups."""
    layers = ["sliding_attention", "full_attention"] * 2
    tiny_policy("gemma3_text", folder, layer_types=layers, sliding_window=32, **_sizes(num_hidden_layers=4))
    _copy_tokenizer(folder)


def recurrent_model(folder: Path) -> None:
    """Save a model with recurrent layers (Mamba) and attention: its cache has two groups, and one holds states."""
    layers = ["mamba", "attention"] * 2
    tiny_policy("granitemoehybrid", folder, layer_types=layers, **_sizes(num_hidden_layers=4))
    _copy_tokenizer(folder)


def image_model(folder: Path) -> None:
    """Save a model that takes images, each of which becomes four tokens of its prompt."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 128}
    text = _sizes(vocab_size=VOCABULARY + len(IMAGE_TOKENS), num_key_value_heads=2, pad_token_id=0)
    config = Idefics3Config(
        text_config={**layers, **text},
        vision_config={**layers, "image_size": IMAGE_PIXELS, "patch_size": PATCH_PIXELS},
        image_token_id=IMAGE_TOKENS["<image>"],
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    _copy_tokenizer(folder)
    _add_tokens(folder)
    edge = {"longest_edge": IMAGE_PIXELS}
    image = {"image_processor_type": "Idefics3ImageProcessor", "size": edge, "max_image_size": edge}
    (folder / "preprocessor_config.json").write_text(json.dumps(image | {"do_image_splitting": False}))
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": (IMAGE_PIXELS // PATCH_PIXELS // 2) ** 2}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


MODELS: dict[str, Callable[[Path], None]] = {
    "window": windowed_model,
    "recurrent": recurrent_model,
    "image": image_model,
}


def _sizes(**sizes: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "max_position_embeddings": 1024} | sizes


def _copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)


def _add_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": number, "content": token, **plain} for token, number in IMAGE_TOKENS.items()]
    file.write_text(json.dumps(tokenizer))
