"""Guest ranks in their own group, without a server: the effect of one failing rank on the others."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from rose.topics.local_broker import free_ports
from tests.support.lender_server_fixtures import SERVING
from tests.support.waiting import WAIT_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANKS = 2
FAILS = 0
"""The failing rank."""


def live(number: int, port: int, connection: Connection) -> None:
    """Program of a rank process: the guest's group, then a long call in which one rank fails and the others compute."""
    os.environ.update(SERVING)
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from rose.workers.lender.vllm.tp_worker import GuestWorker

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(RANKS, number, f"tcp://127.0.0.1:{port}", number, "gloo")
    host: Any = SimpleNamespace(rpc_rank=number, global_rank=number)
    rank = GuestWorker(host)

    def until_done(name: str, *arguments: Any) -> str:
        rank.begin(name, *arguments)
        while not (came := rank.resume(0.01))[0]:
            pass
        assert rank.resume(0.01) == came, "the loop asks the rank again until the last rank is done"
        return str(came[1])

    def compute(_: object) -> None:
        if number == FAILS:
            raise MemoryError("no room")
        assert rank._group is not None
        rank._group.all_reduce(torch.ones(1))

    assert until_done("join") == ""
    rank._guest = host
    connection.send(until_done("run", compute, (), {}))
    connection.recv()  # the exit of this process must not end the wait of the others


@pytest.mark.long
def test_no_rank_waits_in_a_collective_for_a_failed_rank() -> None:
    spawn, [port] = multiprocessing.get_context("spawn"), free_ports(1)
    pipes = [spawn.Pipe() for _ in range(RANKS)]
    ranks = [spawn.Process(target=live, args=(number, port, its)) for number, (_, its) in enumerate(pipes)]
    try:
        for rank in ranks:
            rank.start()
        assert pipes[FAILS][0].poll(WAIT_SECONDS) and pipes[FAILS][0].recv() == "MemoryError: no room"
        assert pipes[1 - FAILS][0].poll(WAIT_SECONDS), "it waits for a rank that has left"
        assert pipes[1 - FAILS][0].recv()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
