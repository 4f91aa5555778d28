"""Every architecture that transformers and vLLM's CPU build share is supported completely, or refused at the start.

A run trains and publishes it, serves each version with the logprobs of transformers, exports it and restarts from the
export; or trainer or executor refuse it in one sentence before any training.
"""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rose.schemas.errors import UsageError
from rose.workers.trainer.export import export_policy
from rose.workers.trainer.logprobs import token_logprobs
from rose.workers.trainer.policy import load_policy
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.model_folder import WHOLE, check_folder
from tests.support.model_families import CONTEXT, Turn, run_turns, sent, tiny_policy, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
"""Largest difference of two logprobs that counts as equal."""

QUICK = ("gemma", "gpt2", "gpt_neox", "llama", "phi", "phi3", "qwen2", "qwen3")

LONG = (
    *("apertus", "arcee", "bloom", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "falcon", "gemma2"),
    *("gemma3_text", "gemma4_text", "glm", "glm4", "gpt-sw3", "gptj", "granite", "granite_swa"),
    *("hunyuan_v1_dense", "hyperclovax", "jais2", "minicpm3", "ministral3", "mistral", "nemotron", "olmo", "olmo2"),
    *("olmo3", "opt", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma"),
)

ON_TRANSFORMERS = ("biogpt", "ctrl", "gemma4_unified_text", "helium", "ministral", "nanochat", "persimmon")
"""Types without a class in vLLM."""

SERVED = (*QUICK, *LONG, *ON_TRANSFORMERS)

EXPERTS = "on a CPU a new policy version cannot be written into .*experts and latent attention"
LOADING = "vLLM does not start with"
STEPPING = "vLLM cannot run"
WRITING = "vLLM takes no new version of"

UNLIKE = "on a CPU samples: vLLM computes other logprobs than transformers"

MIXTURES = (
    *("cohere2_moe", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "gpt_oss"),
    *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "jamba", "laguna"),
    *("llama4_text", "mellum", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
)

REFUSED = {
    **dict.fromkeys(MIXTURES, EXPERTS),
    # The sentence depends on the instructions of the CPU.
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), f"{EXPERTS}|{LOADING} .*expect weight to be"),
    **dict.fromkeys(("gemma3n_text", "lfm2"), UNLIKE),
    "hrm_text": "vLLM lets tokens of a context see later ones",
    "dbrx": f"{LOADING} .*w13_weight",
    "lfm2_moe": f"{LOADING} .*No Lfm2MoeSparseMoeBlock",
    "longcat_flash": f"{LOADING} .*mla_scale_q_lora",
    "mimo_v2_flash": f"{LOADING} .*hybrid_layer_pattern",
    "qwen4_exp_text": f"{LOADING} .*failed to be inspected",
    **dict.fromkeys(("falcon_h1", "mamba2", "zamba2"), WRITING),
    **dict.fromkeys(("falcon_mamba", "gpt_bigcode", "mamba"), STEPPING),
    "doge": "vLLM does not know doge",
    "bitnet": "whose layers quantize their weights as they compute",
    "gpt_neo": rf"{LOADING} .*GPTNeoForCausalLM.* not supported",
    "afmoe": f"{LOADING} .*score_func",
    "axk1": f"{LOADING} .*not initialized from checkpoint",
    "deepseek_v32": f"{LOADING} .*Sparse Attention",
    "deepseek_v4": f"{LOADING} .*validate_layer_type",
    "glm4_moe_lite": f"{LOADING} .*first_k_dense_replace",
    "glm_moe_dsa": f"{LOADING} .*Sparse Attention",
    "hy_v3": f"{LOADING} .*first_k_dense_replace",
    "hy_v4": f"{LOADING} .*sparse attention",
    "inkling_text": f"{LOADING} .*padded_vocab_size",
    "kimi_linear": f"{LOADING} .*(mamba-block-size|No module named)",
    "minimax_m2": f"{LOADING} .*rotary_dim",
    "nemotron_h": f"{LOADING} .*is_act_and_mul",
    "olmo_hybrid": f"{LOADING} .*triton",
    "qwen3_5_text": f"{LOADING} .*failed to be inspected",
    "qwen3_5_moe_text": f"{LOADING} .*failed to be inspected",
}
"""Architectures unsupported on a CPU, with the reason: some need GPU kernels, others settings of published folders."""

SEVERAL_PARTS = ("gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp")


def of_long(kinds: Iterable[str], quick: Collection[str]) -> list[Any]:
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


def logprobs_of(model: Any, turn: Turn) -> Tensor:
    tokens, _ = turn
    with torch.no_grad():
        return token_logprobs(model, torch.tensor([[*CONTEXT, *tokens]]))[0, len(CONTEXT) :]


def off(model: Any, turn: Turn) -> float:
    _, logprobs = turn
    return float((logprobs_of(model, turn) - torch.tensor(logprobs)).abs().max())


@pytest.mark.parametrize("kind", of_long(SERVED, QUICK))
def test_family_is_trained_published_served_exported_and_restarted(kind: str, tmp_path: Path) -> None:
    folder, exported = tmp_path / "model", tmp_path / "exported"
    tiny_policy(kind, folder)
    before, after = (load_policy(folder) for _ in range(2))
    first, later = (FolderTensors(model, folder) for model in (before, after))
    first.check_values()
    train(after)
    old, new = run_turns(folder, sent(folder, [first, later]))
    assert off(before, old) < TOLERANCE
    assert off(after, new) < TOLERANCE
    assert off(before, new) > 100 * TOLERANCE, "the two policies are not alike"
    assert torch.equal(logprobs_of(after, new), logprobs_of(after, new)), "on policy the ratio is 1"
    export_policy(later, exported)
    again = load_policy(exported)
    assert torch.equal(logprobs_of(again, new), logprobs_of(after, new))
    FolderTensors(again, exported).check_values()
    check_folder(exported)


def test_files_of_another_configuration_format_are_not_read_by_the_engine(tmp_path: Path) -> None:
    """vLLM prefers Mistral's params.json where both lie in a folder; the trainer reads config.json."""
    tiny_policy("mistral", tmp_path)
    (tmp_path / "params.json").write_text(json.dumps({"dim": 64, "n_layers": 2, "norm_eps": 0.5, "vocab_size": 128}))
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(tmp_path / WHOLE), WHOLE)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors")
    turn, _ = run_turns(tmp_path, load_file(tmp_path / WHOLE))
    assert off(load_policy(tmp_path), turn) < TOLERANCE


@pytest.mark.parametrize("kind", of_long(REFUSED, ("bitnet", "doge", "gpt_neo")))
def test_unservable_family_is_refused_in_one_sentence_at_the_start(kind: str, tmp_path: Path) -> None:
    tiny_policy(kind, tmp_path)
    with pytest.raises(UsageError, match=REFUSED[kind]) as caught:
        tensors = FolderTensors(load_policy(tmp_path), tmp_path)
        tensors.check_values()
        run_turns(tmp_path, dict(tensors))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def refused(folder: Path) -> str:
    """Assert that an engine refuses the folder in one sentence."""
    with pytest.raises(UsageError) as caught:
        run_turns(folder, load_file(folder / WHOLE))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


def test_folder_with_a_tensor_that_the_engine_ignores_is_refused(tmp_path: Path) -> None:
    tiny_policy("qwen2", tmp_path)
    more = {"model.layers.1.self_attn.o_proj.bias": torch.ones(64)}
    save_file(load_file(tmp_path / WHOLE) | more, tmp_path / WHOLE, metadata={"format": "pt"})
    assert "holds model.layers.1.self_attn.o_proj.bias, which a trainer changes" in refused(tmp_path)


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_folder_with_a_missing_or_partial_tensor_is_refused(lost: str, tmp_path: Path) -> None:
    tiny_policy("qwen3", tmp_path)
    held = {name: tensor for name, tensor in load_file(tmp_path / WHOLE).items() if name != lost}
    save_file(held, tmp_path / WHOLE, metadata={"format": "pt"})
    assert "do its files lack a tensor that its config.json asks for?" in refused(tmp_path)


@pytest.mark.parametrize(("kind", "named", "same"), [("qwen2", "Llama", False), ("llama", "Mistral", True)])
def test_engine_loads_a_folder_by_its_model_type(kind: str, named: str, same: bool, tmp_path: Path) -> None:
    tiny_policy(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [f"{named}ForCausalLM"]}))
    if same:
        turn, _ = run_turns(tmp_path, load_file(tmp_path / WHOLE))
        assert off(load_policy(tmp_path), turn) < TOLERANCE
    else:
        assert "names the class LlamaForCausalLM and the type qwen2" in refused(tmp_path)


@pytest.mark.parametrize(("kind", "named"), [("doge", "TransformersForCausalLM"), ("helium", "LlamaForCausalLM")])
def test_unknown_type_is_refused_under_the_name_of_a_known_class(kind: str, named: str, tmp_path: Path) -> None:
    tiny_policy(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    assert f"vLLM does not know {kind}" in refused(tmp_path)


def test_setting_refused_by_vllm_without_a_message_is_named(tmp_path: Path) -> None:
    tiny_policy("gpt2", tmp_path, scale_attn_by_inverse_layer_idx=True)
    assert "scale_attn_by_inverse_layer_idx" in refused(tmp_path)


@pytest.mark.parametrize("kind", SEVERAL_PARTS)
def test_composite_model_is_refused_by_its_configuration(kind: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING[kind](architectures=["Some"]).save_pretrained(tmp_path)
    for start in (check_folder, load_policy):
        with pytest.raises(UsageError, match="is a model of several parts"):
            start(tmp_path)


def test_every_architecture_known_to_both_libraries_is_in_a_table() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models import ModelRegistry

    known = set(ModelRegistry.get_supported_archs())
    both = {kind for kind, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if architecture in known}
    tables = [*SERVED, *REFUSED, *SEVERAL_PARTS]
    assert len(tables) == len(set(tables))
    assert both <= set(tables), sorted(both - set(tables))
