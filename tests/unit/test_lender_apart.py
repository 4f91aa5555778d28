"""What is the process's, while a guest steps and after."""

from typing import Any

import pytest
import torch

from workers.lender.vllm.apart import Apart, apart_for_building

pytestmark = pytest.mark.slow


@pytest.fixture
def apart() -> Apart:
    return apart_for_building()


@pytest.mark.parametrize("phase", ["building", "stepping"])
def test_nothing_is_compiled_for_a_guest_and_its_host_compiles_as_ever(apart: Apart, phase: str) -> None:
    """Serving would stand still for as long as that takes."""
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def twice(numbers: torch.Tensor) -> torch.Tensor:
        return numbers * 2

    with getattr(apart, phase)():
        assert twice(torch.ones(3)).tolist() == [2.0, 2.0, 2.0] and not compiled
    assert twice(torch.ones(3)).tolist() == [2.0, 2.0, 2.0] and len(compiled) == 1
    with getattr(apart, phase)():
        assert twice(torch.ones(4)).tolist() == [2.0, 2.0, 2.0, 2.0] and len(compiled) == 1
