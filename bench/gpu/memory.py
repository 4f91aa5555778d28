"""Measure whether the guest's memory goes back to the GPU, and the cost for serving."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.card import WARM_UPS, Card, card_of
from bench.gpu.decoder import SMALL, TINY, Decoder
from bench.gpu.driver import Driver
from bench.gpu.report import Report, Unavailable

GIB = 1 << 30

BLOCK_BYTES, BLOCKS = 8 << 20, 256
"""Size and number of the guest's tensors, 2 GiB together."""


def guest_pool(report: Report) -> None:
    """H: decides how a parked guest gives its memory back, and what `empty_cache` between steps costs serving.

    Rows: the memory that the driver has back after the guest's tensors are deleted, with torch's default allocator and
    with a `MemPool`; then the times of serving's steps. After `empty_cache` a step allocates from the driver again.
    """
    card = card_of(report)
    if not card.dry:
        report.row(allocator="default", **_freed(card, _take_blocks, torch.cuda.empty_cache))
        report.row(allocator="MemPool", **_pool_freed(card))
    model = Decoder(card.size(SMALL, TINY), device=card.device, dtype=card.dtype)
    prompt = model.tokens(1, card.size(1024, 8))

    def measure(name: str, action: Callable[[], Any]) -> None:
        report.row(between_steps=name, **_steps(card, lambda: model(prompt), action))

    measure("nothing", lambda: None)
    if card.dry:
        return
    measure("empty_cache", torch.cuda.empty_cache)
    measure("guest of 2 GiB is freed with empty_cache", _take_and_free)
    torch.cuda.memory._set_allocator_settings("max_split_size_mb:20")
    measure("empty_cache, max_split_size_mb:20", torch.cuda.empty_cache)


def _take_blocks() -> list[torch.Tensor]:
    return [torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(BLOCKS)]


def _take_and_free() -> None:
    _take_blocks()
    torch.cuda.empty_cache()


def _freed(card: Card, take: Callable[[], Any], release: Callable[[], None]) -> dict[str, float]:
    """Return the GiB that `take` allocates, and the GiB that the driver has back after `del` and after `release`."""
    card.wait()
    before = card.free_bytes()
    held = take()
    taken = before - card.free_bytes()
    del held
    gc.collect()
    after = card.free_bytes()
    began = time.perf_counter()
    release()
    seconds = time.perf_counter() - began
    return {
        "taken_gib": taken / GIB,
        "back_after_del_gib": (after - before + taken) / GIB,
        "back_after_release_gib": (card.free_bytes() - before + taken) / GIB,
        "release_ms": 1000 * seconds,
    }


def _pool_freed(card: Card) -> dict[str, float]:
    pools = [torch.cuda.MemPool()]

    def take() -> list[torch.Tensor]:
        with torch.cuda.use_mem_pool(pools[0]):
            return _take_blocks()

    return _freed(card, take, pools.clear)  # a pool frees its memory when it is deleted


def _steps(card: Card, step: Callable[[], Any], action: Callable[[], Any]) -> dict[str, float]:
    """Return the times of serving's steps, with an action before every fourth step."""
    for _ in range(WARM_UPS):
        step()
    usual: list[float] = []
    after: list[float] = []
    actions: list[float] = []
    for turn in range(card.size(60, 4)):
        if turn % 4 == 0:
            card.wait()
            began = time.perf_counter()
            action()
            actions.append(time.perf_counter() - began)
        began = time.perf_counter()
        step()
        card.wait()
        (after if turn % 4 == 0 else usual).append(time.perf_counter() - began)
    return {
        "usual_ms": 1000 * statistics.median(usual),
        "longest_usual_ms": 1000 * max(usual),
        "after_ms": 1000 * statistics.median(after),
        "longest_after_ms": 1000 * max(after),
        "action_ms": 1000 * max(actions),
    }


def virtual_memory(report: Report) -> None:
    """I: decides whether memory of the KV cache can move between serving and guest between two steps.

    Rows: microseconds of the driver's calls that map granules of GPU memory, give access to them and unmap them, on an
    idle GPU and while a kernel runs.
    """
    card, calls = card_of(report), Driver()
    if card.dry:
        raise Unavailable("a CPU has no virtual memory management of a GPU: only the names of the calls were checked")
    place = calls.types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    least = calls.types.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    wanted, access = calls.types.CUmemAllocationProp(), calls.types.CUmemAccessDesc()
    wanted.type = calls.types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type, wanted.location.id = place, 0
    access.location.type, access.location.id = place, 0
    access.flags = calls.types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    torch.zeros(1, device=card.device)  # makes the context that the driver's calls need
    granule = calls.cuMemGetAllocationGranularity(wanted, least)[0]
    count = 64
    base = int(calls.cuMemAddressReserve(count * granule, 0, 0, 0)[0])
    report.row(granule_bytes=granule)
    for kernel_runs in (False, True):
        calls.seconds.clear()
        handles = [calls.cuMemCreate(granule, wanted, 0)[0] for _ in range(count)]
        card.wait()
        if kernel_runs:
            card.busy(2000)
        began = time.perf_counter()
        for at, handle in enumerate(handles):
            calls.cuMemMap(base + at * granule, granule, 0, handle, 0)
            calls.cuMemSetAccess(base + at * granule, granule, [access], 1)
        for at in range(count):
            calls.cuMemUnmap(base + at * granule, granule)
        loop_seconds = time.perf_counter() - began
        idle = torch.cuda.current_stream().query()
        card.wait()
        for handle in handles:
            calls.cuMemRelease(handle)
        for name, seconds in calls.seconds.items():
            micros = [1e6 * each for each in seconds]
            report.row(call=name, kernel_runs=kernel_runs, median_us=statistics.median(micros), longest_us=max(micros))
        report.row(kernel_runs=kernel_runs, kernel_had_ended=idle, loop_ms=1000 * loop_seconds)
    calls.cuMemAddressFree(base, count * granule)
