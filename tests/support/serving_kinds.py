"""Kinds of vLLM servers that production uses: their flags, and requests that use what the kind adds."""

import base64
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.lender_server_fixtures import MODEL, VOCABULARY

Fields = dict[str, Any]
"""Fields of a completion request that replace those of a greedy request."""

SEEDED: Fields = {"temperature": 1.0, "seed": 5}
GREEDY: Sequence[Fields] = ({},)
"""Requests of a server that speculates: with speculation, vLLM's answer to a seeded request varies on a CPU."""

TRANSFERS = "tests.support.fake_transfers"
NO_PREFIXES = ("--no-enable-prefix-caching",)
"""Without a prefix cache of its own, the server takes every prefix from its KV connector."""


@dataclass(frozen=True)
class ServingKind:
    """One kind of server."""

    flags: Callable[[Path], Sequence[str]]
    """Makes the flags of the server; may write to a folder."""
    requests: Sequence[Fields] = ({}, SEEDED)
    """Requests that are sent in this order, for each prompt."""
    module: str = ""
    """Module of the server; empty: vLLM's API server."""


def lora_flags(folder: Path) -> Sequence[str]:
    """Write a random adapter."""
    torch.manual_seed(0)
    adapter, targets = {}, ("q_proj", "v_proj", "gate_proj", "down_proj")
    for name, weight in load_file(MODEL / "model.safetensors").items():
        if name.endswith(tuple(f"{target}.weight" for target in targets)):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            adapter[f"{layer}.lora_A.weight"] = 0.3 * torch.randn(4, weight.shape[1])
            adapter[f"{layer}.lora_B.weight"] = 0.3 * torch.randn(weight.shape[0], 4)
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={folder}"


def int8_flags(folder: Path) -> Sequence[str]:
    """Write a checkpoint with weights of 8 bits for each output channel, and activations of 8 bits for each token."""
    for file in MODEL.glob("*.json"):
        shutil.copy(file, folder)
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
    }
    config = json.loads((MODEL / "config.json").read_text())
    config["quantization_config"] = quantization | {"ignore": ["lm_head"], "config_groups": {"group_0": scheme}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, weight in load_file(MODEL / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = weight.float().abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight.float() / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors")
    return "--model", str(folder)


def speculation_flags(**fields: Any) -> Callable[[Path], Sequence[str]]:
    return lambda folder: ("--speculative-config", json.dumps(fields))


def connector_flags(kind: str, module: str = "", **extra: Any) -> Callable[[Path], Sequence[str]]:
    """Return flags of a server with a KV connector, which is in `module` if it is none of vLLM's."""
    fields: dict[str, Any] = {"kv_connector": kind, "kv_role": "kv_both"}
    if module:
        fields["kv_connector_module_path"] = module

    def flags(folder: Path) -> Sequence[str]:
        extra_here = {"shared_storage_path": str(folder)} | extra
        return *NO_PREFIXES, "--kv-transfer-config", json.dumps(fields | {"kv_connector_extra_config": extra_here})

    return flags


def embeddings(tokens: Sequence[int]) -> str:
    """Return the embeddings of tokens as a completion request has them."""
    table = load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"].float()
    buffer = io.BytesIO()
    torch.save(table[list(tokens)].clone(), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


EMBEDDED = [3 + (11 * place) % (VOCABULARY - 3) for place in range(70)]

KINDS = {
    "LoRA": ServingKind(lora_flags, ({"model": "adapter"}, {"model": "adapter"} | SEEDED, {})),
    "speculation by n-grams": ServingKind(
        speculation_flags(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1),
        GREEDY,
    ),
    "speculation by a draft model": ServingKind(
        speculation_flags(method="draft_model", model=str(MODEL), num_speculative_tokens=3),
        GREEDY,
    ),
    "weights of 8 bits": ServingKind(int8_flags),
    "a connector that loads within a step": ServingKind(connector_flags("ExampleConnector")),
    "a connector that offloads": ServingKind(
        connector_flags(
            "OffloadingConnector", spec_name="FakeCopySpec", spec_module_path=TRANSFERS, cpu_bytes_to_use=16 << 20
        )
    ),
    "prefill and decode apart": ServingKind(
        connector_flags("FakeRemoteConnector", TRANSFERS),
        ({"kv_transfer_params": {"send": True}}, {"kv_transfer_params": {"receive": True}} | SEEDED),
    ),
    "structured outputs": ServingKind(
        lambda folder: (), ({"structured_outputs": {"regex": "[0-4]+"}, "ignore_eos": False}, {})
    ),
    "prompts of embeddings": ServingKind(
        lambda folder: ("--enable-prompt-embeds",),
        ({"prompt": None, "prompt_embeds": embeddings(EMBEDDED)}, SEEDED),
    ),
    "two API servers": ServingKind(lambda folder: ("--api-server-count", "2"), module="tests.support.vllm_serve"),
}
"""The kinds by name."""
