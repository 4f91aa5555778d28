"""Layers of transformers that compute something else than those of vLLM, whatever a configuration says, and what takes
their place where a policy is trained or a version is proven: the policy is what samples.

Keeps true: parameters and buffers keep their names, and weights in memory and in a folder are not changed.
"""

from typing import Any

import torch
from torch import Tensor


class BfloatXIELU(torch.nn.Module):
    """An apertus' activation. vLLM holds its two parameters in bfloat16, whatever the engine computes in.

    They are rounded as they are used: training goes on in float32.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = layer.alpha_p, layer.alpha_n
        self.beta, self.eps = torch.nn.Buffer(layer.beta), torch.nn.Buffer(layer.eps)

    def forward(self, x: Tensor) -> Tensor:
        above, below = (torch.nn.functional.softplus(alpha.bfloat16()) for alpha in (self.alpha_p, self.alpha_n))
        below = self.beta.bfloat16() + below
        curved = torch.where(x > 0, above * x * x, below * (torch.expm1(torch.minimum(x, self.eps)) - x))
        return curved + self.beta * x


def replace_unlike_layers(model: Any) -> None:
    """Replace what a model of transformers has of such layers."""
    kind = model.config.model_type
    if kind == "apertus":
        for layer in model.model.layers:
            layer.mlp.act_fn = BfloatXIELU(layer.mlp.act_fn)
    elif kind == "bloom":  # vLLM computes the exact GELU, transformers an approximation by tanh
        for layer in model.transformer.h:
            layer.mlp.gelu_impl = torch.nn.GELU()
    elif kind == "minicpm3":  # vLLM's norms of latent vectors add rms_norm_eps, those of transformers 1e-6
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
                if norm is not None:
                    norm.variance_epsilon = model.config.rms_norm_eps
