"""A guest in a server with a worker process, the default of vLLM on a CPU.

The engine-core process then has no part of the serving model, and the first guest creates the state that vLLM needs
there.
"""

from pathlib import Path

import pytest

from tests.support.guest_runs import PROMPTS, wake_and_park
from tests.support.lender_server_fixtures import ScriptedSidecar, lending_server

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]


def test_parked_guest_wakes_on_every_command(tmp_path: Path) -> None:
    with lending_server(tmp_path, "--distributed-executor-backend", "mp") as server:
        answer = server.complete(PROMPTS[0]).text
        sidecar = ScriptedSidecar(server.config)
        sidecar.awake()
        wake_and_park(sidecar)
        threads, descriptors = server.core.num_threads(), server.core.num_fds()
        for _ in range(3):
            wake_and_park(sidecar)
        assert server.core.num_threads() <= threads and server.core.num_fds() <= descriptors
        assert server.complete(PROMPTS[0]).text == answer
        assert not server.has_logged("guest_dropped")
