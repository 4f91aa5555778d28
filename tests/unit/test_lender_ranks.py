"""How the loop drives a guest's ranks: one thread speaks to them, all of them answer, two phases serve a version."""

import gc
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.executor.slabs import Lying, lay
from workers.executor.vllm.types import EngineBroken, SwapRefused
from workers.lender.identity import this_process
from workers.lender.vllm.pieces import Pieces, rest
from workers.lender.vllm.rank import call
from workers.lender.vllm.ranks import RankFailed, Ranks, RankWeights

SIZE = 3
SHAPES = {"model.norm.weight": (4,)}


class Workers:
    """Serving's executor over ranks that `answer` stands for: by rank and what it is asked for. It notes who asked."""

    def __init__(self, answer: Callable[[int, str, Any], Any]) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.threads: set[int] = set()

    def collective_rpc(self, _: object, *, args: tuple[Any, ...]) -> list[tuple[bool, Any]]:
        name, *arguments = args
        self.asked.append(name)
        self.threads.add(threading.get_ident())
        return [self._answered(rank, name, arguments) for rank in range(SIZE)]

    def _answered(self, rank: int, name: str, arguments: Any) -> tuple[bool, Any]:
        try:
            return True, self.answer(rank, name, arguments)
        except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
            return False, str(error)


def ranks_of(workers: Workers) -> Ranks:
    executor: Any = workers
    return Ranks(executor, SIZE)


def test_what_fails_on_one_rank_has_failed_and_is_told_with_its_number() -> None:
    def fails_on_one(rank: int, name: str, _: Any) -> str:
        if rank == 1:
            raise ValueError("no room")
        return name

    workers = Workers(fails_on_one)
    with pytest.raises(RankFailed, match=r"^rank 1: no room$"):
        ranks_of(workers).ask("load")
    workers.answer = lambda rank, name, _: (rank, name)
    assert ranks_of(workers).ask("load") == [(0, "load"), (1, "load"), (2, "load")]


def test_what_a_thread_beside_asks_is_asked_by_the_loop_until_the_last_rank_has_done_it() -> None:
    went = dict.fromkeys(range(SIZE), 0)

    def takes_as_many_pieces_as_its_number(rank: int, name: str, _: Any) -> Any:
        if name == "begin":
            return None
        went[rank] += 1
        return went[rank] > rank, "", f"of {rank}"

    workers = Workers(takes_as_many_pieces_as_its_number)
    ranks = ranks_of(workers)
    building = Pieces(lambda: ranks.ask("load"), "building")
    while not building.go_on(10.0):
        while ranks.asked:
            ranks.go_on(0.001)
    assert building.result() == ["of 0", "of 1", "of 2"]
    assert workers.asked == ["begin", *["go_on"] * SIZE] and workers.threads == {threading.get_ident()}
    assert ranks.told()[0] == SIZE and ranks.told() == (0, 0.0)


def test_what_fails_for_a_thread_beside_is_raised_there() -> None:
    def fails(rank: int, name: str, _: Any) -> Any:
        if name == "go_on":
            left[rank] -= 1
            return left[rank] <= 0, "MemoryError: no room" if rank == 1 else "", None

    left = dict(enumerate((3, 1, 2)))
    ranks = ranks_of(Workers(fails))
    building = Pieces(lambda: ranks.ask("load"), "building")
    while not building.go_on(10.0):
        ranks.go_on(0.001)
    with pytest.raises(RankFailed, match=r"^rank 1: MemoryError: no room$"):
        building.result()
    assert max(left.values()) == 0, "it is over when the last rank is done, whatever became of the first"


def test_a_function_that_rests_is_gone_on_with_as_often() -> None:
    def rests() -> int:
        for _ in range(3):
            rest()
        return 3

    resting, times = Pieces(rests, "resting"), 1
    while not resting.go_on(10.0):
        times += 1
    assert times == 4 and resting.result() == 3


def checked(weights: RankWeights, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pieces = weights.checking(tensors)
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            return dict(done.value)


@pytest.fixture
def lies() -> Any:
    slab = os.memfd_create("test")
    yield Lying(slab, lay(slab, {name: torch.ones(shape) for name, shape in SHAPES.items()}))
    os.close(slab)


def test_a_version_is_prepared_on_the_last_rank_before_any_is_told_to_serve_it(lies: Lying) -> None:
    left = dict.fromkeys(range(SIZE), 0)

    def prepares(rank: int, name: str, arguments: Any) -> Any:
        if name == "prepare":
            slab, layout, names = arguments
            with Path(slab).open("r+b") as file:
                there = dict(Lying(file.fileno(), layout))
            assert list(there) == names == list(SHAPES) and all(bool(tensor.all()) for tensor in there.values())
            left[rank] = rank + 1
        if name == "prepare_on":
            left[rank] -= 1
            return left[rank] <= 0
        return None

    workers = Workers(prepares)
    weights = RankWeights(ranks_of(workers), SHAPES, torch.float32)
    version = checked(weights, lies)
    pieces = sum(1 for _ in weights.preparing(version))
    assert pieces == SIZE and all(value <= 0 for value in left.values())
    assert "apply" not in workers.asked
    weights.apply(version)
    assert workers.asked[-1] == "apply"


def test_a_rank_that_cannot_prepare_refuses_the_version_and_one_that_cannot_serve_it_breaks_the_engine(
    lies: Lying,
) -> None:
    def fails_at(what: str) -> Callable[[int, str, Any], Any]:
        def answer(rank: int, name: str, _: Any) -> bool:
            if name == what and rank == 2:
                raise ValueError("no")
            return True

        return answer

    weights = RankWeights(ranks_of(Workers(fails_at("prepare_on"))), SHAPES, torch.float32)
    with pytest.raises(SwapRefused, match="rank 2: no"):
        list(weights.preparing(checked(weights, lies)))
    weights = RankWeights(ranks_of(Workers(fails_at("apply"))), SHAPES, torch.float32)
    version = checked(weights, lies)
    list(weights.preparing(version))
    with pytest.raises(EngineBroken, match="rank 2: no"):
        weights.apply(version)
    with pytest.raises(SwapRefused, match="shared memory"):
        checked(weights, iter([("model.norm.weight", torch.ones(4))]))


def test_what_a_worker_holds_before_serving_begins_is_not_looked_through_again() -> None:
    """vLLM has a heap looked through twice for each model that is loaded, in one piece."""
    host: Any = SimpleNamespace()
    try:
        assert call(host, "process", False) == (True, this_process())
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
    finally:
        gc.unfreeze()
