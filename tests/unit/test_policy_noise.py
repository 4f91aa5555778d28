"""A policy with dropout in its configuration: the trainer computes as the engines sampled."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rose.workers.trainer.algorithms import TrainingSample, make_algorithm
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.logprobs import token_logprobs
from rose.workers.trainer.optimizer import make_optimizer
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.step import train_step

pytestmark = pytest.mark.slow

CONFIG = TrainerConfig(model_folder=Path(), run_folder=Path(), minibatches=1)
ALGORITHM = make_algorithm(CONFIG)

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GATED = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 1, "attention_dropout": 0.5}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention, residuals and embeddings": (
        "gpt2",
        GPT2 | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5),
    ),
    "layers": ("opt", SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.5, "layerdrop": 0.5}),
    "attention and hidden": (
        "gpt_neox",
        SIZES | {"intermediate_size": 64, "attention_dropout": 0.5, "hidden_dropout": 0.5},
    ),
    "hidden": ("bloom", {**GPT2, "hidden_size": 32, "hidden_dropout": 0.5, "attention_dropout": 0.5}),
    "attention": ("qwen3", GATED | {"head_dim": 16}),
    "router": ("mixtral", GATED | {"num_local_experts": 4, "router_jitter_noise": 0.5}),
    "router and its input": (
        "phimoe",
        GATED | {"num_local_experts": 4, "router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "hidden_dropout": 0.5},
    ),
    "what an embedding adds": ("phi", SIZES | {"intermediate_size": 64, "embd_pdrop": 0.5, "resid_pdrop": 0.5}),
}
"""A model type and its configuration, by the location of the dropout."""


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = request.param
    torch.manual_seed(3)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields, **tokens)).save_pretrained(tmp_path)
    return tmp_path


def groups_of(folder: Path) -> list[list[TrainingSample]]:
    """Return the groups that a sampler, which computes without dropout, would have recorded."""
    from transformers import AutoModelForCausalLM

    sampler = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(2, 64, (4, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        recorded = token_logprobs(sampler, tokens).tolist()
    rows = zip(tokens.tolist(), recorded, strict=True)
    samples = [
        TrainingSample(
            tokens=row,
            loss_mask=[0] * 4 + [1] * 20,
            behaviour_logprobs=logprobs,
            temperatures=[1.0] * 24,
            reward=float(index % 2),
        )
        for index, (row, logprobs) in enumerate(rows)
    ]
    return [samples]


def test_policy_with_dropout_has_on_policy_ratio_1_and_a_seed_independent_step(folder: Path) -> None:
    groups, stepped = groups_of(folder), []
    for seed, in_training in ((1, False), (2, False), (3, True)):
        torch.manual_seed(seed)
        model = load_policy(folder).train(in_training)  # the caller of a step may have trained by other means before
        done = train_step(model, make_optimizer(model, learning_rate=1e-3), groups, algorithm=ALGORITHM, config=CONFIG)
        assert done.importance_mean == pytest.approx(1, abs=1e-5) and done.kl_behaviour < 1e-9
        assert (done.clipped_share, done.tokens) == (0, 80)
        stepped.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert all(torch.equal(stepped[0], other) for other in stepped[1:])


def test_loaded_policy_computes_without_dropout(folder: Path) -> None:
    model, tokens = load_policy(folder), torch.arange(2, 50)[None]
    torch.manual_seed(1)
    first = token_logprobs(model, tokens)
    torch.manual_seed(2)
    assert torch.equal(first, token_logprobs(model, tokens))
