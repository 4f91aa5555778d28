"""The guest's part of a CUDA device, over fakes of torch's streams, events and pools."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.utils import torch_utils

from rose.workers.lender.vllm.guest_device import CudaDevice
from rose.workers.lender.vllm.host_process import TimeSlicedCall
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as cuda:
        yield cuda


@pytest.fixture
def device(cuda: FakeCuda) -> CudaDevice:
    return CudaDevice()


def recorded() -> Any:
    """The stream of this thread by vLLM's record."""
    return getattr(torch_utils._current_stream_tls, "value", None)


@pytest.mark.parametrize("known", [False, True])
def test_serving_thread_has_its_stream_again_after_a_guest_step(
    cuda: FakeCuda, device: CudaDevice, *, known: bool
) -> None:
    if known:
        torch_utils._patched_set_stream(cuda.stream())
    before = cuda.current_stream(), recorded()
    with device.running():
        guest = cuda.current_stream()
        assert guest is recorded() is torch_utils.current_stream() is not before[0]
        with device.paused():
            assert (cuda.current_stream(), recorded()) == before
        assert cuda.current_stream() is recorded() is guest
    assert (cuda.current_stream(), recorded()) == before


def test_guest_stream_is_not_the_stream_of_serving_if_torch_hands_that_out_again() -> None:
    with fake_cuda(streams=2) as cuda:
        cuda.set_stream(cuda.streams[1])
        with CudaDevice().running():
            assert cuda.current_stream() is cuda.streams[0]


def test_thread_goes_back_to_serving_with_no_kernel_of_the_guest_in_the_queue(
    cuda: FakeCuda, device: CudaDevice
) -> None:
    with device.running():
        cuda.launch("writes block 7", "reads block 7")
        with device.paused():
            assert cuda.queued == []
            cuda.launch("serving writes block 7")
        cuda.launch("rest of the step")
    assert cuda.queued == []
    assert cuda.ran == ["writes block 7", "reads block 7", "serving writes block 7", "rest of the step"]


def test_kernels_of_a_guest_come_after_all_that_serving_has_launched(cuda: FakeCuda, device: CudaDevice) -> None:
    """Serving with async scheduling has a batch in flight; the batch may use a block that is lent by now."""
    cuda.launch("serving's batch")
    with device.running():
        cuda.launch("guest")
    assert cuda.ran == ["serving's batch", "guest"]


def test_one_layer_at_most_is_in_the_queue_when_the_next_is_launched(cuda: FakeCuda, device: CudaDevice) -> None:
    for _ in range(2):  # the second step begins with the event of the first
        with device.running():
            for layer in range(4):
                device.before_layer()
                assert len(cuda.queued) <= 2
                assert {kernel.split()[0] for kernel in cuda.queued} <= {f"{layer - 1}"}
                cuda.launch(f"{layer} attention", f"{layer} linear")
            assert cuda.queued[:2] == ["2 attention", "2 linear"], "the thread waits for no more than it must"


def test_failed_kernel_of_a_guest_is_raised_on_a_thread_that_is_serving_s(cuda: FakeCuda, device: CudaDevice) -> None:
    before = cuda.current_stream(), recorded()
    with pytest.raises(RuntimeError, match="illegal memory access"), device.running():
        cuda.streams[1].failure = RuntimeError("an illegal memory access")
    assert (cuda.current_stream(), recorded()) == before and not cuda.open


def test_error_of_serving_within_a_pause_is_raised_after_a_failed_kernel_too(
    cuda: FakeCuda, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("an illegal memory access")

    before = cuda.current_stream(), recorded()
    with pytest.raises(KeyError, match="of serving"), device.running(), device.paused():
        monkeypatch.setattr(type(cuda.stream()), "wait_stream", lambda *_: fails(None))
        raise KeyError("of serving")
    assert (cuda.current_stream(), recorded()) == before and not cuda.open


def test_guest_allocates_from_its_pool_and_serving_never_does(cuda: FakeCuda, device: CudaDevice) -> None:
    looks: list[int] = []

    def build() -> str:
        looks.extend(allocates() for _ in range(200))
        return "built"

    def allocates() -> int:
        return len(cuda.open)

    call = TimeSlicedCall(build, "building", device)

    def resumed() -> bool:
        done = call.resume(0.0005)
        until(lambda: not cuda.open)  # at the next call of the build, which may be late
        return done

    until(resumed)
    assert call.result() == "built" and set(looks) == {1}
    with device.running():
        [pool] = cuda.open.values()
        with device.paused():
            assert not cuda.open
        assert [*cuda.open.values()] == [pool]
    del pool
    assert cuda.given_back == [False] and not cuda.open
    device.release()
    assert cuda.given_back == [True]


def test_build_launches_on_the_stream_of_the_steps_and_serving_keeps_its_own(
    cuda: FakeCuda, device: CudaDevice
) -> None:
    """vLLM's second runner keeps the stream that it is made on."""
    streams: list[Any] = []
    call = TimeSlicedCall(lambda: streams.append(torch_utils.current_stream()), "building", device)
    until(lambda: call.resume(0.01))
    with device.running():
        assert streams == [cuda.current_stream()]
    assert cuda.current_stream() is cuda.streams[0]
