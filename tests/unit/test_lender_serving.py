"""The view of serving for admission: tokens by their cost, times by one clock."""

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import NewRequestData

from rose.workers.executor.ipc.messages import NextWork, WorkKind
from rose.workers.lender.admission import Admission, HoldReason, Promise
from rose.workers.lender.vllm.interleaving import ServingView


class Server:
    """A scheduler that schedules what a test says."""

    def __init__(self, batch_queue: deque[Any] | None = None) -> None:
        """`batch_queue`: batches in flight; None without async scheduling."""
        self.running: list[Any] = []
        self.waiting: deque[Any] = deque()
        self.requests: dict[str, Any] = {}
        self.input_queue = SimpleNamespace(queue=deque())
        self.batch_queue = batch_queue
        self.scheduler = self
        self.next: dict[str, int] = {}
        self.new: list[Any] = []
        self.step_arguments: list[dict[str, Any]] = []
        self.admission = Admission(Promise(), serving_step_tokens=512)
        self.admission.on_serving_step = lambda **step_arguments: self.step_arguments.append(step_arguments)  # type: ignore[method-assign]
        self.view = ServingView(self, self.admission)

    def schedule(self) -> Any:
        return SimpleNamespace(
            scheduled_new_reqs=self.new,
            num_scheduled_tokens=self.next,
            total_num_scheduled_tokens=sum(self.next.values()),
        )

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def has_requests(self) -> bool:
        return bool(self.requests)

    def take(self, name: str, arrived: float) -> Any:
        request = SimpleNamespace(
            request_id=name, arrival_time=arrived, num_tokens=100, num_computed_tokens=0, num_output_tokens=0
        )
        self.requests[name] = request
        self.running.append(request)
        return request

    def step(self, **tokens: int) -> dict[str, Any]:
        self.next = tokens
        began = time.monotonic()
        self.scheduler.schedule()
        self.view.on_step(began, time.monotonic())
        return self.step_arguments[-1]


def test_chunks_count_as_prefill_until_the_first_token_and_after_preemption() -> None:
    server = Server()
    one, other = server.take("one", time.time()), server.take("other", time.time())
    other.num_output_tokens = 1
    step_arguments = server.step(one=60, other=100)
    assert (step_arguments["prompt_tokens"], step_arguments["decoding"], step_arguments["held"]) == (160, 0, 2)
    one.num_output_tokens = 1
    step_arguments = server.step(one=40, other=1)
    assert (step_arguments["prompt_tokens"], step_arguments["decoding"]) == (40, 1)
    step_arguments = server.step(one=1, other=1)
    assert (step_arguments["prompt_tokens"], step_arguments["decoding"]) == (0, 2)
    step_arguments = server.step(one=103, other=1)  # it was preempted, and computes all of its tokens again
    assert (step_arguments["prompt_tokens"], step_arguments["decoding"]) == (103, 1)


def test_arrival_time_is_never_in_the_future_at_any_host_clock() -> None:
    server = Server()
    server.take("early", time.time() - 0.5)
    server.take("set back", time.time() + 3600.0)
    (early, _), (late, _) = server.view.state().prefills
    now = time.monotonic()
    assert early == pytest.approx(now - 0.5, abs=0.1) and late <= now


def test_aborted_requests_are_forgotten_although_serving_is_never_idle() -> None:
    server = Server()
    server.take("stays", time.time()).num_output_tokens = 1
    for number in range(50):
        name = f"leaves {number}"
        server.take(name, time.time()).num_output_tokens = 1
        server.step(**{"stays": 1, name: 20})
        server.running.remove(server.requests.pop(name))
    server.step(stays=1)
    assert list(server.view._last) == ["stays"]


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_ended_request_whose_blocks_are_being_sent_holds_the_guest_back(scheduling: str) -> None:
    server = Server(deque() if scheduling == "async" else None)
    request = server.take("sent", time.time())
    server.running.remove(request)
    decision = server.admission.admit(server.view.state(), NextWork(WorkKind.STEP, 0.01), now=time.monotonic())
    assert decision.hold_reason is HoldReason.WAITING
    server.requests.clear()
    decision = server.admission.admit(server.view.state(), NextWork(WorkKind.STEP, 0.01), now=time.monotonic())
    assert decision.hold_reason is None


def test_prompt_of_embeddings_is_an_arrival_of_its_tokens() -> None:
    """vLLM gives no token ids for such a prompt."""
    server, arrivals = Server(), []
    server.admission.on_arrival = lambda prompt_tokens, now: arrivals.append(prompt_tokens)  # type: ignore[method-assign]
    request = object.__new__(NewRequestData)
    request.prompt_token_ids, request.prompt_embeds, request.num_computed_tokens = None, torch.zeros(100, 64), 32
    server.new = [request]
    server.step(embedded=68)
    assert arrivals == [68]
