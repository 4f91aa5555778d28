"""The loop drives a guest's ranks: one thread talks to them, all of them answer, and two phases activate a version."""

import gc
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose.workers.executor.ipc.engine_client import StagedTensors, write_tensors
from rose.workers.executor.vllm.ranks import Answer, RankFailed, RankWeights
from rose.workers.executor.vllm.types import EngineBroken, SwapRefused
from rose.workers.lender.status_page import current_process_id
from rose.workers.lender.vllm.host_process import TimeSlicedCall, yield_slice
from rose.workers.lender.vllm.tp_driver import TpDriver
from rose.workers.lender.vllm.tp_worker import call_worker

SIZE = 3
SHAPES = {"model.norm.weight": (4,)}


class Workers:
    """Serving's executor over ranks. `answer` gives the result by rank and function, and the calling threads
    are noted."""

    def __init__(self, answer: Callable[[int, str, Any], Any]) -> None:
        self.answer = answer
        self.calls: list[str] = []
        self.threads: set[int] = set()

    def collective_rpc(self, _: object, *, args: tuple[Any, ...]) -> list[Answer]:
        name, *arguments = args
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        return [self._answered(rank, name, arguments) for rank in range(SIZE)]

    def _answered(self, rank: int, name: str, arguments: Any) -> Answer:
        try:
            return Answer(True, self.answer(rank, name, arguments))
        except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
            return Answer(False, str(error), isinstance(error, SwapRefused))


def ranks_of(workers: Workers) -> TpDriver:
    executor: Any = workers
    return TpDriver(executor, SIZE)


def test_failure_on_one_rank_is_raised_with_the_rank_number() -> None:
    def fails_on_one(rank: int, name: str, _: Any) -> str:
        if rank == 1:
            raise ValueError("no room")
        return name

    workers = Workers(fails_on_one)
    with pytest.raises(RankFailed, match=r"^rank 1: no room$"):
        ranks_of(workers).call("load")
    workers.answer = lambda rank, name, _: (rank, name)
    assert ranks_of(workers).call("load") == [(0, "load"), (1, "load"), (2, "load")]


def test_request_of_another_thread_is_repeated_by_the_loop_until_all_ranks_are_done() -> None:
    went = dict.fromkeys(range(SIZE), 0)

    def takes_as_many_pieces_as_its_number(rank: int, name: str, _: Any) -> Any:
        if name == "begin":
            return None
        went[rank] += 1
        return went[rank] > rank, "", f"of {rank}"

    workers = Workers(takes_as_many_pieces_as_its_number)
    ranks = ranks_of(workers)
    building = TimeSlicedCall(lambda: ranks.call("load"), "building")
    while not building.resume(10.0):
        while ranks.has_pending_call:
            ranks.resume_pending(0.001)
    assert building.result() == ["of 0", "of 1", "of 2"]
    assert workers.calls == ["begin", *["resume"] * SIZE] and workers.threads == {threading.get_ident()}
    assert ranks.take_timings()[0] == SIZE and ranks.take_timings() == (0, 0.0)


def test_failure_for_another_thread_is_raised_in_that_thread() -> None:
    def fails(rank: int, name: str, _: Any) -> Any:
        if name == "resume":
            left[rank] -= 1
            return left[rank] <= 0, "MemoryError: no room" if rank == 1 else "", None

    left = dict(enumerate((3, 1, 2)))
    ranks = ranks_of(Workers(fails))
    building = TimeSlicedCall(lambda: ranks.call("load"), "building")
    while not building.resume(10.0):
        ranks.resume_pending(0.001)
    with pytest.raises(RankFailed, match=r"^rank 1: MemoryError: no room$"):
        building.result()
    assert max(left.values()) == 0, "it is over when the last rank is done, whatever became of the first"


def test_function_that_yields_three_times_is_resumed_four_times() -> None:
    def rests() -> int:
        for _ in range(3):
            yield_slice()
        return 3

    resting, times = TimeSlicedCall(rests, "resting"), 1
    while not resting.resume(10.0):
        times += 1
    assert times == 4 and resting.result() == 3


def checked(weights: RankWeights, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pieces = weights.check(tensors)
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            return dict(done.value)


@pytest.fixture
def staged_tensors() -> Any:
    buffer = os.memfd_create("test")
    yield StagedTensors(buffer, write_tensors(buffer, {name: torch.ones(shape) for name, shape in SHAPES.items()}))
    os.close(buffer)


def test_version_is_staged_on_all_ranks_before_activation_on_any(staged_tensors: StagedTensors) -> None:
    left = dict.fromkeys(range(SIZE), 0)

    def prepares(rank: int, name: str, arguments: Any) -> Any:
        if name == "stage":
            buffer, layout, names = arguments
            with Path(buffer).open("r+b") as file:
                there = dict(StagedTensors(file.fileno(), layout))
            assert list(there) == names == list(SHAPES) and all(bool(tensor.all()) for tensor in there.values())
            left[rank] = rank + 1
        if name == "continue_staging":
            left[rank] -= 1
            return left[rank] <= 0
        return None

    workers = Workers(prepares)
    weights = RankWeights(ranks_of(workers), Path(), SHAPES, torch.float32)
    version = checked(weights, staged_tensors)
    pieces = sum(1 for _ in weights.stage(version))
    assert pieces == SIZE and all(value <= 0 for value in left.values())
    assert "activate" not in workers.calls
    weights.activate(version)
    assert workers.calls[-1] == "activate"


def test_staging_failure_on_a_rank_rejects_the_version_and_activation_failure_ends_the_engine(
    staged_tensors: StagedTensors,
) -> None:
    def fails_at(what: str) -> Callable[[int, str, Any], Any]:
        def answer(rank: int, name: str, _: Any) -> bool:
            if name == what and rank == 2:
                raise ValueError("no")
            return True

        return answer

    weights = RankWeights(ranks_of(Workers(fails_at("continue_staging"))), Path(), SHAPES, torch.float32)
    with pytest.raises(SwapRefused, match="rank 2: no"):
        list(weights.stage(checked(weights, staged_tensors)))
    weights = RankWeights(ranks_of(Workers(fails_at("activate"))), Path(), SHAPES, torch.float32)
    version = checked(weights, staged_tensors)
    list(weights.stage(version))
    with pytest.raises(EngineBroken, match="rank 2: no"):
        weights.activate(version)
    with pytest.raises(SwapRefused, match="shared memory"):
        checked(weights, iter([("model.norm.weight", torch.ones(4))]))


@pytest.mark.parametrize("refusing", [range(SIZE), range(1)], ids=["every rank", "one rank"])
@pytest.mark.parametrize("restored", [True, False], ids=["undone", "not undone"])
def test_activation_that_a_rank_refuses_is_undone_on_every_rank_or_ends_the_engine(
    staged_tensors: StagedTensors, refusing: Sequence[int], restored: bool
) -> None:
    def undoes(rank: int, name: str, _: Any) -> bool:
        if name == "activate" and rank in refusing:
            raise SwapRefused("it could not be applied")
        if name == "restore" and not restored:
            raise EngineBroken("a device is lost")
        return True

    workers = Workers(undoes)
    weights = RankWeights(ranks_of(workers), Path(), SHAPES, torch.float32)
    version = checked(weights, staged_tensors)
    list(weights.stage(version))
    raised, what = (SwapRefused, "it could not be applied") if restored else (EngineBroken, "a device is lost")
    with pytest.raises(raised, match=what):
        weights.activate(version)
    assert workers.calls[-2:] == ["activate", "restore"]


def test_objects_of_a_worker_before_serving_are_frozen_for_the_garbage_collector() -> None:
    """vLLM scans a heap twice in one piece for each loaded model."""
    host: Any = SimpleNamespace()
    try:
        assert call_worker(host, "process_id", False) == Answer(True, current_process_id())
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
    finally:
        gc.unfreeze()
