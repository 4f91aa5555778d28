"""What belongs to the process is the host's whenever the host computes."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import core

from workers.lender.vllm.apart import apart_for_building


def test_a_step_that_fails_is_written_into_servings_log_where_it_is_servings_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM dumps what a failed step was given, as errors: of a guest that is dropped they would read as serving's."""
    dumped: list[object] = []
    monkeypatch.setattr(core, "dump_engine_exception", lambda _, scheduled, __: dumped.append(scheduled))
    engine: Any = SimpleNamespace(vllm_config=None, scheduler=SimpleNamespace(make_stats=lambda: None))

    def fail(whose: Any) -> None:
        with pytest.raises(ValueError, match=whose), core.EngineCore.log_error_detail(engine, whose):
            raise ValueError(whose)

    with apart_for_building().stepping():
        fail("the guest's")
    fail("serving's")
    assert dumped == ["serving's"]
