"""Spare weights are written without a change of the model, and swapped with it as a whole."""

import torch
from torch import nn

from rose.workers.executor.vllm.spare_weights import exchange_parameters, make_spare


class Tied(nn.Module):
    """A model with a tied head, and a layer with a packed copy like vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.inner = nn.Linear(3, 3)
        self.inner.weight.loader = "kept"  # type: ignore[attr-defined]
        self.pack()

    def pack(self) -> None:
        packed = self.inner.weight.detach().clone()
        self.inner.cpu_linear = lambda x: x @ packed.T  # type: ignore[assignment]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner.cpu_linear(self.embedding(tokens))  # type: ignore[operator]
        return self.head(hidden)  # type: ignore[no-any-return]


def write(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    assert isinstance(model, Tied)
    model.pack()


def test_spare_weights_are_served_after_the_swap_and_returned_by_the_next() -> None:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(5)
    before = model(tokens)
    spare = make_spare(model)
    write(spare, 2.0)
    assert torch.equal(model(tokens), before)
    exchange_parameters(model, spare)
    assert torch.equal(model(tokens), torch.full((5, 5), 2.0 * 3 * (2.0 * 3 * 2.0)))
    write(spare, 7.0)
    assert float(model.inner.weight.detach().max()) == 2.0
    spare = make_spare(model)
    exchange_parameters(model, spare)
    assert torch.equal(model(tokens), torch.full((5, 5), 72.0)), "a fresh spare holds what the model does"


def test_tied_tensor_is_tied_in_the_spare_weights() -> None:
    model = Tied()
    spare = make_spare(model)
    assert isinstance(spare, Tied)
    assert spare.head.weight is spare.embedding.weight
    assert spare.head.weight is not model.head.weight
    assert spare.inner.weight.loader == "kept"  # type: ignore[attr-defined]
    exchange_parameters(model, spare)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
