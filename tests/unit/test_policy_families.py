"""Policies with unusual attention, rotary angles or outputs: computed as in an engine, or refused."""

import json
import os
import pty
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.schemas.errors import UsageError
from rose.workers.lender.endpoint.server_interface import ProbeAnswer
from rose.workers.lender.endpoint.versions import ReferenceModel
from rose.workers.model_config import ConfigRefused, max_context_tokens
from rose.workers.trainer.logprobs import token_logprobs
from rose.workers.trainer.policy import load_policy
from rose.workers.weights.model_folder import FolderError
from tests.support.model_families import CONTEXT, tiny_policy

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
}
CAPPED = {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0, "initializer_range": 0.5}
ANGLES = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def made(folder: Path, kind: str, **fields: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | fields)).save_pretrained(folder)
    return folder


def rewrite(folder: Path, **settings: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def logprobs_of(model: Any, *rows: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, torch.tensor(rows))


def test_pad_token_outside_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="has a pad_token_id outside of its vocabulary: set it to a token, or take"):
        load_policy(rewrite(made(tmp_path, "llama"), pad_token_id=SIZES["vocab_size"]))


def test_weights_under_other_names_are_refused_with_a_missing_and_a_held_name(tmp_path: Path) -> None:
    file = made(tmp_path, "llama") / "model.safetensors"
    save_file({f"_orig_mod.{name}": tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(FolderError, match=r"beginning with lm_head\.weight.*; the files hold _orig_mod\."):
        load_policy(tmp_path)


@pytest.mark.parametrize("kind", ["gemma2", "vaultgemma"])
def test_attention_logit_cap_is_applied(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, row = made(tmp_path, kind, **CAPPED), [*range(2, 40)]
    own, without = (AutoModelForCausalLM.from_pretrained(folder, attn_implementation=one) for one in ("eager", "sdpa"))
    found = logprobs_of(load_policy(folder), row)
    torch.testing.assert_close(found, logprobs_of(own.eval(), row), atol=1e-6, rtol=0)
    assert (found - logprobs_of(without.eval(), row)).abs().max() > 1e-2, "the cap changes nothing here"


def test_reference_model_applies_the_attention_logit_cap(tmp_path: Path) -> None:
    folder, row = made(tmp_path, "gemma2", **CAPPED), [*range(2, 40)]
    model = load_policy(folder)
    probed = ProbeAnswer(row[:1], row[1:], [{token: 0.0} for token in row[1:]])
    proven = ReferenceModel(folder).logprobs(dict(model.state_dict()), probed)
    assert proven == pytest.approx(logprobs_of(model, row)[0, 1:].numpy(), abs=1e-5)


@pytest.mark.parametrize("kind", ["apertus", "bloom", "minicpm3"])
def test_layers_that_vllm_fuses_are_trained_and_proven_like_vllm(kind: str, tmp_path: Path) -> None:
    """xIELU has parameters in bfloat16, GELU is exact, and a norm adds only rms_norm_eps."""
    from transformers import AutoModelForCausalLM

    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16}
    folder, row = made(tmp_path, kind, rms_norm_eps=0.1, initializer_range=0.5, **ranks), [*range(2, 40)]
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    unlike = logprobs_of(theirs, row)
    for module in theirs.modules():
        if hasattr(module, "gelu_impl"):
            module.gelu_impl = torch.nn.GELU()
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.1
        if hasattr(module, "alpha_p"):
            module.bfloat16()
    model = load_policy(folder)
    found = logprobs_of(model, row)
    assert (found - unlike).abs().max() > 1e-4, "the layers are not what decides here"
    torch.testing.assert_close(found, logprobs_of(theirs, row), atol=1e-6, rtol=0)
    token_logprobs(model, torch.tensor([row])).sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad.any() for parameter in model.parameters())
    weights = model.state_dict()
    assert weights.keys() == theirs.state_dict().keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    probed = ProbeAnswer(row[:1], row[1:], [{token: 0.0} for token in row[1:]])
    assert ReferenceModel(folder).logprobs(dict(weights), probed) == pytest.approx(found[0, 1:].numpy(), abs=1e-5)


def test_attention_implementation_named_by_the_folder_is_ignored(tmp_path: Path) -> None:
    folder = made(tmp_path, "gpt_oss", head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    for named in ("sdpa", "flash_attention_2", "flex_attention"):
        model = load_policy(rewrite(folder, attn_implementation=named))
        assert model.config._attn_implementation == "eager", "no other has sinks"


@pytest.mark.parametrize(
    "settings",
    [{"return_dict": False}, {"torchscript": True}, {"output_attentions": True, "output_hidden_states": True}],
)
def test_output_settings_of_a_folder_are_ignored(settings: dict[str, bool], tmp_path: Path) -> None:
    folder, row = made(tmp_path, "llama"), [*range(2, 20)]
    expected = logprobs_of(load_policy(folder), row)
    assert torch.equal(logprobs_of(load_policy(rewrite(folder, **settings)), row), expected)


def test_bloom_setting_that_leaves_out_biases_is_ignored(tmp_path: Path) -> None:
    folder, row = made(tmp_path, "bloom"), [*range(2, 20)]
    biased = {name: tensor + 0.1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(biased, folder / "model.safetensors", metadata={"format": "pt"})
    expected = logprobs_of(load_policy(folder), row)
    assert torch.equal(logprobs_of(load_policy(rewrite(folder, slow_but_exact=True, pretraining_tp=2)), row), expected)


def test_time_step_limit_is_ignored_like_in_engines(tmp_path: Path) -> None:
    sizes = {"num_heads": 4, "state_size": 16, "n_groups": 1, "head_dim": 16}
    folder, row = made(tmp_path, "mamba2", **sizes), [*range(2, 20)]
    expected = logprobs_of(load_policy(folder), row)
    assert torch.equal(logprobs_of(load_policy(rewrite(folder, time_step_limit=[0.0, 1e-4])), row), expected)


@pytest.mark.parametrize("kind", ["mistral", "phi3"])
def test_sliding_window_of_0_means_no_window_like_in_engines(kind: str, tmp_path: Path) -> None:
    folder, row = made(tmp_path, kind, sliding_window=None), [*range(2, 40)]
    without = logprobs_of(load_policy(folder), row)
    assert torch.equal(logprobs_of(load_policy(rewrite(folder, sliding_window=0)), row), without)


def test_sliding_window_of_0_is_accepted_if_unused_and_refused_for_sliding_layers(tmp_path: Path) -> None:
    mixture = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4}
    load_policy(made(tmp_path / "mixture", "qwen2_moe", num_experts_per_tok=2, **mixture))
    sliding = rewrite(made(tmp_path / "sliding", "gemma2", head_dim=16), sliding_window=0)
    with pytest.raises(ConfigRefused, match="layers of sliding attention"):
        load_policy(sliding)


def test_long_context_rope_angles_do_not_depend_on_other_rows_of_a_batch(tmp_path: Path) -> None:
    folder = made(tmp_path, "phi3", original_max_position_embeddings=16, rope_parameters=ANGLES)
    model = load_policy(folder)
    assert max_context_tokens(model.config.to_dict()) == 16
    short, long = [*range(2, 18)], [*range(2, 50)]
    alone, beside = logprobs_of(model, short)[0], logprobs_of(model, short + [0] * 32, long)[0, :16]
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs_of(model, short)[0], alone, atol=0, rtol=0)


def test_partial_rotary_factor_ignored_by_transformers_is_refused(tmp_path: Path) -> None:
    angles = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    load_policy(made(tmp_path / "stablelm", "stablelm", rope_parameters=angles))
    with pytest.raises(FolderError, match="has a partial_rotary_factor"):
        load_policy(made(tmp_path / "llama", "llama", rope_parameters=angles))


def test_finite_weights_with_non_finite_logprobs_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = made(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FolderError, match="computes logprobs that are not finite"):
        load_policy(folder)


def test_model_that_raises_in_its_forward_pass_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, "dbrx", d_model=32, n_heads=2, n_layers=1, attn_config={"kv_n_heads": 2, "rope_theta": 1e4})
    with pytest.raises(FolderError, match="loads, and transformers cannot compute it: ") as caught:
        load_policy(folder)
    assert "\n" not in str(caught.value)


def test_remote_code_of_a_folder_is_neither_run_nor_prompted_for(tmp_path: Path) -> None:
    folder, ran = made(tmp_path / "model", "llama"), tmp_path / "ran"
    (folder / "modeling_own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_policy'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    rewrite(folder, model_type="own_policy", auto_map=names)
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            load_policy(folder)
        except UsageError:
            os._exit(0)
        finally:
            sys.stderr.flush()
            os._exit(1)
    os.write(terminal, b"y\n")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0 and not ran.exists()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": True}),
        ("phi3", {"tie_word_embeddings": False}),
        ("gemma4_text", {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 128}),
    ],
)
def test_padding_token_in_a_context_is_trained_as_any_other(
    tmp_path: Path, kind: str, settings: dict[str, object]
) -> None:
    gradients = []
    for pad in (None, CONTEXT[0]):
        tiny_policy(kind, tmp_path, **settings)
        config = json.loads((tmp_path / "config.json").read_text()) | {"pad_token_id": pad}
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = load_policy(tmp_path)
        token_logprobs(model, torch.tensor([CONTEXT]))[0, len(CONTEXT) // 2 :].sum().backward()  # type: ignore[no-untyped-call]
        found = [each.weight.grad for each in model.modules() if isinstance(each, torch.nn.Embedding)]
        gradients.append([each for each in found if each is not None])
    for without, with_padding in zip(*gradients, strict=True):
        assert torch.equal(without, with_padding) and without[CONTEXT[0]].any()
