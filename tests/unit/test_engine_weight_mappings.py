"""A weight buffer is mapped and registered with CUDA once, and not registered after it is unmapped. CUDA is a fake."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rose.workers.executor.ipc.engine_client import StagedTensors, write_tensors
from rose.workers.executor.ipc.weight_mappings import WeightMappings


class FakeCuda:
    """Fake of CUDA's runtime: notes what is registered, by address, and what was."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.copying = True
        """Whether a copy to the device may be under way."""
        self.status = 0

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:
        self.calls += 1
        if not self.status:
            self.registered[address] = size
        return self.status

    def synchronize(self) -> None:
        self.copying = False

    def cudaHostUnregister(self, address: int) -> int:
        assert not self.copying
        self.copying = True
        del self.registered[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(
        torch, "cuda", SimpleNamespace(is_available=lambda: True, cudart=lambda: fake, synchronize=fake.synchronize)
    )
    return fake


@pytest.fixture
def buffers() -> Iterator[list[int]]:
    made = [os.memfd_create(f"test-{number}") for number in range(3)]
    yield made
    for buffer in made:
        os.close(buffer)


def staged(buffer: int, value: float, elements: int = 1000) -> StagedTensors:
    return StagedTensors(buffer, write_tensors(buffer, {"w": torch.full((elements,), float(value))}))


def test_buffer_is_registered_once_and_anew_when_it_has_grown(cuda: FakeCuda, buffers: list[int]) -> None:
    mappings = WeightMappings()
    for version in range(6):
        buffer = buffers[version % 2]
        descriptor = os.dup(buffer)  # ranks open a buffer anew for each version
        tensors = dict(mappings.tensors(StagedTensors(descriptor, staged(buffer, version).layout)))
        os.close(descriptor)
        assert torch.equal(tensors["w"], torch.full((1000,), float(version)))
    assert cuda.calls == len(cuda.registered) == 2
    dict(mappings.tensors(staged(buffers[0], 1.0, elements=5000)))
    assert cuda.calls == 3 and sorted(cuda.registered.values()) == [4032, 20032]


def test_registration_ends_with_its_buffer_or_its_owner_and_not_before_the_mapping(
    cuda: FakeCuda, buffers: list[int]
) -> None:
    mappings = WeightMappings()
    kept = [dict(mappings.tensors(staged(buffer, 1.0))) for buffer in buffers]
    assert kept[0]["w"].data_ptr() not in cuda.registered, "a buffer of an earlier channel"
    assert cuda.registered.keys() == {tensors["w"].data_ptr() for tensors in kept[1:]}
    del mappings
    gc.collect()
    assert not cuda.registered
    assert all(bool((tensors["w"] == 1).all()) for tensors in kept)


def test_buffer_that_cuda_does_not_register_is_read_all_the_same(
    cuda: FakeCuda, buffers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reported_again(*_: object, **__: object) -> None:
        raise RuntimeError("the error that CUDA keeps for the next launch")

    cuda.status = 1
    mappings, version = WeightMappings(), staged(buffers[0], 2.0)
    monkeypatch.setattr(torch, "zeros", reported_again)
    for _ in range(2):
        assert bool((dict(mappings.tensors(version))["w"] == 2).all())
    assert cuda.calls == 1 and not cuda.registered


def test_without_a_gpu_nothing_is_kept_mapped(buffers: list[int]) -> None:
    mappings, version = WeightMappings(), staged(buffers[0], 3.0)
    tensors = dict(mappings.tensors(version))
    assert mapped_bytes() == 4096 and bool((tensors["w"] == 3).all())
    del tensors
    gc.collect()
    assert mapped_bytes() == 0


def mapped_bytes() -> int:
    """Return how many bytes of the test's buffers this process has mapped, in pages of 4096 bytes."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:test-" in line]
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return sum(end - begin for begin, end in spans)


def test_buffer_is_not_registered_where_that_would_hold_up_serving(cuda: FakeCuda, buffers: list[int]) -> None:
    mappings = WeightMappings(registers=False)
    assert dict(mappings.tensors(staged(buffers[0], 4.0)))["w"].eq(4.0).all()
    assert cuda.calls == 0
