"""Untested server configurations, and a vLLM with a changed internal, are refused in one sentence."""

import os
from dataclasses import replace
from functools import reduce
from multiprocessing import current_process
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.offload import OffloadConfig
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from rose.workers.lender.vllm import attach, compatibility
from rose.workers.lender.vllm.attach import register_lender
from rose.workers.lender.vllm.compatibility import LONE_CORE_NAME, REFUSED, REFUSED_ABOVE_STRICT, guest_error

GUIDE = Path(__file__).parents[2] / "docs/guides/lend-a-server.md"

pytestmark = [pytest.mark.long, pytest.mark.slow]


def groups(*kinds: type[KVCacheSpec]) -> list[Any]:
    """Return groups of layers of these kinds."""
    return [SimpleNamespace(kv_cache_spec=object.__new__(kind)) for kind in kinds]


@pytest.fixture(autouse=True)
def in_the_process_of_an_engine_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_process(), "name", LONE_CORE_NAME)


def supported_core() -> Any:
    """Return an engine core whose configuration is accepted, with the fields that the check reads."""
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
    core: Any = object.__new__(EngineCoreProc)
    core.vllm_config = SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        offload_config=OffloadConfig(),
        use_v2_model_runner=False,
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        weight_transfer_config=None,
        lora_config=None,
    )
    core.scheduler = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups(FullAttentionSpec)))
    return core


CHANGES: dict[str, tuple[str, Any]] = {
    "data parallelism": ("name", "EngineCore_DP0"),
    "pipeline or context parallelism": ("parallel_config.world_size", 2),
    "expert parallelism": ("parallel_config.enable_expert_parallel", True),
    "ranks on several hosts": ("parallel_config.nnodes", 2),
    "an executor other than uni and mp": ("parallel_config.distributed_executor_backend", "ray"),
    "vLLM's second model runner": ("use_v2_model_runner", True),
    "async scheduling": ("scheduler_config.async_scheduling", True),
    "speculative decoding": ("speculative_config", object()),
    "LoRA": ("lora_config", object()),
    "a KV connector": ("kv_transfer_config", object()),
    "prompts of embeddings": ("model_config.enable_prompt_embeds", True),
    "an encoder connector": ("ec_transfer_config", object()),
    "offloaded weights": ("offload_config.prefetch.offload_group_size", 2),
    "sleep mode": ("model_config.enable_sleep_mode", True),
    "weight transfer": ("weight_transfer_config", object()),
    "fault tolerance": ("parallel_config.enable_fault_tolerance", True),
    "elastic expert parallelism": ("parallel_config.enable_elastic_ep", True),
    "a model that does not generate": ("model_config.runner_type", "pooling"),
    "a multimodal model": ("model_config.is_multimodal_model", True),
    "a diffusion model": ("model_config.is_diffusion", True),
}
"""A field of the configuration that makes a server one of a kind, and its value, by kind."""


@pytest.mark.parametrize("kind", CHANGES)
def test_server_of_a_refused_kind_is_refused_with_the_reason(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = supported_core()
    assert guest_error(core, strict=True) is guest_error(core, strict=False) is None
    field, value = CHANGES[kind]
    *places, name = field.split(".")
    place = current_process() if field == "name" else reduce(getattr, places, core.vllm_config)
    monkeypatch.setattr(place, name, value)
    if kind in REFUSED:
        expected: str | None = f"no guest runs beside {kind}: {REFUSED[kind]}"
        assert guest_error(core, strict=False) == expected
    else:
        expected = None
        above = f"no guest with a dial above 0 runs beside {kind}: {REFUSED_ABOVE_STRICT[kind]}"
        assert guest_error(core, strict=False) == above
    assert guest_error(core, strict=True) == expected


def test_every_refused_kind_is_checked() -> None:
    on_gpus = {"a device that is not a CPU", "a model on a GPU in another process"}
    assert CHANGES.keys() | CACHES.keys() | on_gpus == {*REFUSED, *REFUSED_ABOVE_STRICT}


CACHES: dict[str, tuple[tuple[type[KVCacheSpec], ...], int, bool]] = {
    "a KV cache of several kinds": ((FullAttentionSpec, SlidingWindowSpec), 1, True),
    "a KV cache of several kinds on several ranks": ((MambaSpec, FullAttentionSpec), 2, False),
    "other layers in a KV cache of several kinds": ((FullAttentionSpec, CrossAttentionSpec), 1, False),
    "a multimodal model on several ranks": ((FullAttentionSpec,), 2, False),
}
"""The layers and ranks of a server, and whether it lends in the strict policy, by kind."""


@pytest.mark.parametrize("kind", CACHES)
def test_kinds_of_layers_are_refused_on_ranks_and_above_strict(kind: str) -> None:
    layers, ranks, lends = CACHES[kind]
    core = supported_core()
    core.scheduler.kv_cache_config.kv_cache_groups = groups(*layers)
    parallel = core.vllm_config.parallel_config
    parallel.world_size = parallel.tensor_parallel_size = ranks
    core.vllm_config.model_config.is_multimodal_model = "multimodal" in kind
    assert kind in str(guest_error(core, strict=False))
    assert (guest_error(core, strict=True) is None) is lends
    if not lends:
        assert f"beside {kind}: {REFUSED[kind]}" in str(guest_error(core, strict=True))


def test_each_way_to_offload_weights_is_refused() -> None:
    for field, value in [
        ("offload_backend", "prefetch"),
        ("offload_backend", "uva"),
        ("prefetch.offload_group_size", 2),
        ("uva.cpu_offload_gb", 1.0),
    ]:
        core = supported_core()
        *places, name = field.split(".")
        setattr(reduce(getattr, places, core.vllm_config.offload_config), name, value)
        assert "offloaded weights" in str(guest_error(core, strict=True))


def test_engine_core_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    several: Any = object.__new__(DPEngineCoreProc)
    several.__dict__ |= vars(supported_core())
    assert "data parallelism" in str(guest_error(several, strict=True))
    monkeypatch.setattr(current_process(), "name", "another of vLLM's names")
    assert "data parallelism" in str(guest_error(supported_core(), strict=True))


def test_guide_has_each_refusal_with_its_reason() -> None:
    """The table has a row for each kind: what a dial of 0 allows, what a dial above 0 allows, and why not more."""
    rows = {}
    for line in GUIDE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1] in ("lends", "refused"):
            rows[cells[0].partition(" (")[0]] = (cells[1], cells[2], cells[4])
    for kind, reason in (REFUSED | REFUSED_ABOVE_STRICT).items():
        assert rows.pop(kind) == ("refused" if kind in REFUSED else "lends", "refused", reason)
    assert all(row == ("lends", "lends", "") for row in rows.values())


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
    core = supported_core()
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
