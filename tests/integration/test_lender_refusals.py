"""Untested server configurations, and a vLLM with a changed internal, are refused in one sentence."""

import os
from dataclasses import replace
from multiprocessing import current_process
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

from rose.workers.lender.vllm import attach, compatibility
from rose.workers.lender.vllm.attach import register_lender
from rose.workers.lender.vllm.compatibility import LONE_CORE_NAME, guest_error

pytestmark = [pytest.mark.long, pytest.mark.slow]


@pytest.fixture(autouse=True)
def in_the_process_of_an_engine_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_process(), "name", LONE_CORE_NAME)


def tried_core() -> Any:
    """Return an engine core beside which a guest was tried."""
    parallel = SimpleNamespace(
        world_size=1,
        tensor_parallel_size=1,
        decode_context_parallel_size=1,
        nnodes=1,
        enable_expert_parallel=False,
        distributed_executor_backend="uni",
        enable_fault_tolerance=False,
        enable_elastic_ep=False,
    )
    model = SimpleNamespace(
        enable_sleep_mode=False,
        runner_type="generate",
        is_multimodal_model=False,
        enable_prompt_embeds=False,
        is_diffusion=False,
    )
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        use_v2_model_runner=False,
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        weight_transfer_config=None,
        lora_config=None,
    )
    core: Any = object.__new__(EngineCoreProc)
    core.vllm_config = config
    core.scheduler = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=["one"]))
    return core


def test_untested_server_configurations_are_refused_in_one_sentence() -> None:
    core = tried_core()
    config = core.vllm_config
    parallel, model = config.parallel_config, config.model_config
    assert guest_error(core, strict=False) is None
    for place, name, value, message in [
        (current_process(), "name", "EngineCore_DP0", "data parallelism"),
        (current_process(), "name", "another of vLLM's names", "data parallelism"),
        (config, "use_v2_model_runner", True, "second model runner"),
        (config, "speculative_config", object(), "speculative decoding"),
        (config, "kv_transfer_config", object(), "prefill and decode apart"),
        (config.scheduler_config, "async_scheduling", True, "--no-async-scheduling"),
        (parallel, "world_size", 2, "pipeline"),
        (parallel, "decode_context_parallel_size", 2, "context"),
        (parallel, "nnodes", 2, "hosts"),
        (parallel, "distributed_executor_backend", "ray", "ray"),
        (model, "enable_sleep_mode", True, "sleep mode"),
        (model, "enable_prompt_embeds", True, "embeddings"),
    ]:
        usual = getattr(place, name)
        setattr(place, name, value)
        assert message in str(guest_error(core, strict=False))
        assert (name == "async_scheduling") is (guest_error(core, strict=True) is None)
        setattr(place, name, usual)
    several: Any = object.__new__(DPEngineCoreProc)
    several.__dict__ |= vars(core)
    assert "data parallelism" in str(guest_error(several, strict=True))


@pytest.mark.parametrize("kind", [EngineCoreProc, DPEngineCoreProc])
def test_every_engine_core_checks_for_its_server_at_start(
    kind: type[EngineCoreProc], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: dict[type[EngineCoreProc], list[EngineCoreProc]] = {EngineCoreProc: [], DPEngineCoreProc: []}
    for each, by_its_loop in begun.items():
        monkeypatch.setattr(each, "run_busy_loop", by_its_loop.append)
    register_lender("/nowhere")
    core = object.__new__(kind)
    server = SimpleNamespace(pid=os.getppid())
    monkeypatch.setattr(attach, "parent_process", lambda: server)
    core.run_busy_loop()
    assert begun.pop(kind) == [core] and "lending_refused" in caplog.text
    server.pid += 1
    with pytest.raises(SystemExit):
        core.run_busy_loop()
    assert [*begun.values()] == [[]]


def test_all_vllm_internals_used_by_the_lender_exist() -> None:
    """This test fails with another vLLM: check the new internals, adapt the lender, then the table."""
    assert compatibility.version_error() is compatibility.internals_error() is None


@pytest.mark.parametrize("part", compatibility.REQUIRED_INTERNALS, ids=lambda part: f"{part.module}.{part.name}")
def test_missing_vllm_internal_is_named(part: compatibility.RequiredInternal, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(part, name=part.name + "_gone")
    monkeypatch.setattr(compatibility, "REQUIRED_INTERNALS", (gone,))
    assert part.name in str(compatibility.internals_error())
    if part.digest:
        monkeypatch.setattr(compatibility, "REQUIRED_INTERNALS", (replace(part, digest="another"),))
        assert "has another" in str(compatibility.internals_error())


def test_unsupported_minor_version_of_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "__version_tuple__", (0, 33, 0))
    assert "0.33" in str(compatibility.version_error())


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_guest_beside_a_server_on_a_gpu_needs_the_setting_for_untried_devices(
    monkeypatch: pytest.MonkeyPatch, executor: str, *, allowed: bool
) -> None:
    core = tried_core()
    core.vllm_config.use_v2_model_runner = True
    core.vllm_config.parallel_config.distributed_executor_backend = executor
    monkeypatch.setattr(compatibility, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True))
    error = guest_error(core, strict=True, untried_devices=allowed)
    if allowed and executor == "uni":
        assert error is None
    else:
        assert ("in another process" if allowed else "a device that is not a CPU") in str(error)
    monkeypatch.setattr(compatibility, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False))
    assert "a device that is not a CPU" in str(guest_error(core, strict=True, untried_devices=allowed))
