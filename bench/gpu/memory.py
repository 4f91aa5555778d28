"""Whether the guest's memory goes back to the GPU, and what that costs serving."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.card import WARM_UPS, Card, card_of, percentile
from bench.gpu.decoder import SMALL, TINY, Decoder
from bench.gpu.driver import Driver
from bench.gpu.report import Report, Unavailable

GIB = 1 << 30


def guest_pool(report: Report) -> None:
    """H: decides how a parked guest gives its memory back, and what `empty_cache` amid serving costs.

    Rows: the bytes that the driver has back after the guest's tensors are gone, from torch's default allocator and from
    a `MemPool`; then serving's longest step, in which the allocator asks the driver anew after `empty_cache`.
    """
    card = card_of(report)
    block, blocks = card.size((8 << 20, 256), (1 << 10, 4))
    if not card.dry:
        report.row(allocator="default", **_freed(card, lambda: _blocks(card, block, blocks), torch.cuda.empty_cache))
        report.row(allocator="MemPool", **_pool_freed(card, block, blocks))
    model = Decoder(card.size(SMALL, TINY), device=card.device, dtype=card.dtype)
    prompt = model.tokens(1, card.size(1024, 8))
    actions: dict[str, Callable[[], None]] = {"nothing": lambda: None}
    if not card.dry:
        actions["empty_cache"] = torch.cuda.empty_cache
        actions["guest of 2 GiB is freed with empty_cache"] = lambda: _come_and_go(card, block, blocks)
    for name, action in actions.items():
        report.row(between_steps=name, **_steps(card, lambda: model(prompt), action))
    if not card.dry:
        torch.cuda.memory._set_allocator_settings("max_split_size_mb:20")
        found = _steps(card, lambda: model(prompt), torch.cuda.empty_cache)
        report.row(between_steps="empty_cache, max_split_size_mb:20", **found)


def _blocks(card: Card, block: int, blocks: int) -> list[torch.Tensor]:
    return [torch.empty(block, dtype=torch.uint8, device=card.device) for _ in range(blocks)]


def _come_and_go(card: Card, block: int, blocks: int) -> None:
    held = _blocks(card, block, blocks)
    del held
    torch.cuda.empty_cache()


def _freed(card: Card, take: Callable[[], Any], release: Callable[[], None]) -> dict[str, float]:
    """GiB that the driver has given, has back after the tensors are gone, and after `release`."""
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


def _pool_freed(card: Card, block: int, blocks: int) -> dict[str, float]:
    pools = [torch.cuda.MemPool()]

    def take() -> list[torch.Tensor]:
        with torch.cuda.use_mem_pool(pools[0]):
            return _blocks(card, block, blocks)

    return _freed(card, take, pools.clear)  # the pool frees its memory when it goes


def _steps(card: Card, step: Callable[[], Any], action: Callable[[], None]) -> dict[str, float]:
    """Serving's steps, with an action before every fourth."""
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
        "usual_ms": 1000 * percentile(usual, 0.5),
        "longest_usual_ms": 1000 * max(usual),
        "after_ms": 1000 * percentile(after, 0.5),
        "longest_after_ms": 1000 * max(after),
        "action_ms": 1000 * max(actions),
    }


def virtual_memory(report: Report) -> None:
    """I: decides whether bytes of the KV cache can move between serving and guest between two steps.

    Rows: microseconds in which the driver's virtual memory management maps granules of GPU memory, gives access to them
    and unmaps them, on an idle GPU and while a kernel runs.
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
            report.row(call=name, kernel_runs=kernel_runs, median_us=percentile(micros, 0.5), longest_us=max(micros))
        report.row(kernel_runs=kernel_runs, kernel_had_ended=idle, loop_ms=1000 * loop_seconds)
    calls.cuMemAddressFree(base, count * granule)
