"""A second set of weights for a model, to be written while the first one computes.

Keeps true
- The spare shares everything with the model but its parameters and what a CPU packed from them; what one tensor is in
  the model (tied embeddings) is one tensor in the spare.
- To exchange the two moves no bytes, and cannot fail half-way.
"""

import copy

import torch
from torch import nn

PACKED = "cpu_linear"
"""vLLM's function over a packed copy of a layer's weight."""


def spare_of(model: nn.Module) -> nn.Module:
    """A module tree of the same classes with parameters of its own. What they hold is that of the model."""
    return _copy(model, {}, {})


def exchange(model: nn.Module, spare: nn.Module) -> None:
    """Give each the weights of the other."""
    exchanged: set[int] = set()
    for mine, other in zip(model.modules(), spare.modules(), strict=True):
        for name, parameter in mine._parameters.items():
            theirs = other._parameters[name]
            if parameter is None or theirs is None or id(parameter) in exchanged:
                continue
            exchanged.add(id(parameter))
            parameter.data, theirs.data = theirs.data, parameter.data
        if PACKED in mine.__dict__:
            mine.__dict__[PACKED], other.__dict__[PACKED] = other.__dict__[PACKED], mine.__dict__[PACKED]


def _copy(module: nn.Module, modules: dict[int, nn.Module], tensors: dict[int, nn.Parameter]) -> nn.Module:
    known = modules.get(id(module))
    if known is not None:
        return known
    copied = copy.copy(module)
    modules[id(module)] = copied
    copied.__dict__["_parameters"] = {
        name: None if parameter is None else _copy_parameter(parameter, tensors)
        for name, parameter in module._parameters.items()
    }
    copied.__dict__["_modules"] = {
        name: None if child is None else _copy(child, modules, tensors) for name, child in module._modules.items()
    }
    return copied


def _copy_parameter(parameter: nn.Parameter, tensors: dict[int, nn.Parameter]) -> nn.Parameter:
    if id(parameter) not in tensors:
        copied = torch.Tensor._make_subclass(type(parameter), parameter.data.clone(), False)
        copied.__dict__.update(parameter.__dict__)  # its loader, and what vLLM knows of it
        tensors[id(parameter)] = copied
    return tensors[id(parameter)]
