"""Replacements for layers that transformers computes differently from vLLM for the same configuration.

The trainer and the weights proof use them, so that they compute what the engine samples from.

Keeps true: parameters and buffers keep their names; weights in memory and in a folder do not change.
"""

from math import inf
from typing import Any

import torch
from torch import Tensor

LIMIT = "time_step_limit"
"""Attribute of Mamba layers: smallest and largest time step."""


class BfloatXIELU(torch.nn.Module):
    """The activation of an apertus model with both parameters rounded to bfloat16, as in vLLM for every dtype.

    The parameters themselves stay in float32 and are rounded at each use, so training goes on in float32.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = layer.alpha_p, layer.alpha_n
        self.beta, self.eps = torch.nn.Buffer(layer.beta), torch.nn.Buffer(layer.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation, element by element."""
        above, below = (torch.nn.functional.softplus(alpha.bfloat16()) for alpha in (self.alpha_p, self.alpha_n))
        below = self.beta.bfloat16() + below
        curved = torch.where(x > 0, above * x * x, below * (torch.expm1(torch.minimum(x, self.eps)) - x))
        return curved + self.beta * x


def replace_unlike_layers(model: Any) -> None:
    """Replace, in place, the layers of a transformers model that vLLM computes differently."""
    kind = model.config.model_type
    for module in model.modules():
        if hasattr(module, LIMIT):  # transformers applies the limit of config.json, vLLM none
            setattr(module, LIMIT, (0.0, inf))
    if kind == "apertus":
        for layer in model.model.layers:
            layer.mlp.act_fn = BfloatXIELU(layer.mlp.act_fn)
    elif kind == "bloom":  # vLLM computes the exact GELU, transformers a tanh approximation
        for layer in model.transformer.h:
            layer.mlp.gelu_impl = torch.nn.GELU()
    elif kind == "minicpm3":  # vLLM's norms of latent vectors use rms_norm_eps, transformers' use 1e-6
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
                if norm is not None:
                    norm.variance_epsilon = model.config.rms_norm_eps
