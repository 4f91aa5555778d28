"""A server on a GPU that lends or is observed keeps each name of torch and vLLM.

vLLM's modules for CPUs replace `torch.cuda.Event` and other names when they are imported. So the lender's attach path
runs here in a fresh process whose platform is CUDA (`tests.support.fake_cuda`), and every name is compared before and
after. With `untried_devices` the process also builds a guest, until vLLM asks for a GPU.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lender_server_fixtures import MODEL

MODES: dict[str, dict[str, object]] = {
    "strict": {},
    "slo": {"promise": {"dial": 1.0}},
    "observe": {"observe": True},
    "untried": {"untried_devices": True, "max_model_len": 128},
}

HEARD = {"observe": "observation_enabled", "untried": "lending_enabled"}
"""Part of the log line by mode; the other modes are refused."""

ATTACH = """
import functools, json, logging, multiprocessing, queue, sys, types

import vllm.platforms
import vllm.plugins
from vllm.config.logging import LoggingConfig
from vllm.ir.op import IrOp
from vllm.logger import configure_logging
from vllm.v1.engine.core import EngineCoreProc
import vllm.v1.core.sched.scheduler
import vllm.v1.worker.gpu.buffer_utils  # the modules whose names vLLM's modules for CPUs replace
import vllm.v1.worker.gpu_worker

from tests.support.fake_cuda import cuda_platform, fake_cuda
from tests.support.process_names import changed_names, changed_states, library_names, process_states

vllm.platforms._current_platform = cuda_platform()  # only now: a build for CPUs cannot import vLLM's worker otherwise

vllm.plugins.load_general_plugins()  # what a server has done by then
configure_logging(LoggingConfig(log_level="DEBUG"))
IrOp.registry["rms_norm"].set_default(["native"])

configuration = sys.argv[1]
multiprocessing.current_process().name = "EngineCore"
served = []
serve = lambda core: served.append(core)  # instead of serving's loop, which needs a model
EngineCoreProc.run_busy_loop = functools.wraps(EngineCoreProc.run_busy_loop)(serve)
core = object.__new__(EngineCoreProc)
parallel = dict(
    world_size=1, tensor_parallel_size=1, decode_context_parallel_size=1, nnodes=1, enable_expert_parallel=False,
    distributed_executor_backend="uni", enable_fault_tolerance=False, enable_elastic_ep=False,
)
model = dict(
    enable_sleep_mode=False, runner_type="generate", is_multimodal_model=False, enable_prompt_embeds=False,
    is_diffusion=False,
)
core.vllm_config = types.SimpleNamespace(
    parallel_config=types.SimpleNamespace(**parallel), model_config=types.SimpleNamespace(**model),
    scheduler_config=types.SimpleNamespace(async_scheduling=True), speculative_config=None, kv_transfer_config=None,
    ec_transfer_config=None, weight_transfer_config=None, lora_config=None, use_v2_model_runner=True,
    offload_config=types.SimpleNamespace(
        offload_backend="auto", prefetch=types.SimpleNamespace(offload_group_size=0),
        uva=types.SimpleNamespace(cpu_offload_gb=0),
    ),
)
pool = types.SimpleNamespace(get_num_free_blocks=lambda: 1, num_gpu_blocks=2, cached_block_hash_to_block={})
pool.reset_prefix_cache = None
manager = types.SimpleNamespace(block_pool=pool, record_prefix_cache_stats=None)
cache = types.SimpleNamespace(num_blocks=2, kv_cache_tensors=[], kv_cache_layout=None)
cache.kv_cache_groups = [types.SimpleNamespace(kv_cache_spec=None)]
core.scheduler = types.SimpleNamespace(
    kv_cache_config=cache, kv_cache_manager=manager, has_requests=lambda: False, get_request_counts=lambda: (0, 0),
    max_num_scheduled_tokens=64, running=[], waiting=[], schedule=lambda: None,
)
core.input_queue = queue.Queue()
core.batch_queue, core.model_executor = queue.Queue(), None
core.is_running, core.has_work = lambda: True, lambda: False
core._process_input_queue = lambda: None
core._process_engine_step = lambda: False
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(logging.Formatter().format(record))
logging.getLogger("vllm.rose").addHandler(handler)
logging.getLogger("vllm.rose").setLevel(logging.INFO)

from rose.workers.lender.vllm.attach import register_lender


def build_guest():
    from pathlib import Path
    from rose.workers.executor.step_cost import INITIAL_COST, StepCost
    from rose.workers.lender.config import read_config
    from rose.workers.lender.vllm.guest_build import GuestBuild
    from rose.workers.lender.vllm.guest_device import guest_device
    from rose.workers.lender.vllm.kv_sharing import ServingMemory

    config = read_config(Path(configuration))
    cost, log = StepCost(**INITIAL_COST), logging.getLogger()
    build = GuestBuild(config, ServingMemory(core), cost, lambda: None, None, guest_device(), log)
    try:
        while build.resume(0.1) is None:
            assert not changed_states(state)
    except Exception as error:
        return str(error)


register_lender(configuration)
with fake_cuda() as cuda:
    before, state, loaded = library_names(), process_states(), set(sys.modules)
    wrapped = {name: value for name, value in vars(EngineCoreProc).items()}
    core.run_busy_loop()
    if core._process_input_queue.__name__ == "take_input":  # the lender is attached
        core._process_input_queue()
        core._process_engine_step()
    error = build_guest() if sys.argv[2] == "untried" else ""
    print(json.dumps({
        "changed": changed_names(before), "states": changed_states(state), "error": error,
        "wrapped": [name for name, value in vars(EngineCoreProc).items() if wrapped.get(name) is not value],
        "imported": sorted(name for name in set(sys.modules) - loaded if name.startswith(("torch", "vllm", "triton"))),
        "served": served == [core], "heard": heard, "given_back": cuda.given_back,
    }))
"""

ARGUMENTS = """
import json, sys
from pathlib import Path

import vllm.platforms
from vllm.engine.arg_utils import EngineArgs

from rose.workers.executor.vllm.engine_core import InProcessBackend, _arguments
from rose.workers.executor.vllm.types import EngineConfig
from tests.support.fake_cuda import cuda_platform, fake_cuda

vllm.platforms._current_platform = cuda_platform()

from rose.workers.lender.vllm.guest_device import guest_device

with fake_cuda():
    settings = EngineConfig(model_folder=Path(sys.argv[1]), vllm_arguments=guest_device().engine_arguments)
config = EngineArgs(**_arguments(settings, InProcessBackend())).create_engine_config()
print(json.dumps({
    "mode": config.compilation_config.mode.name, "graphs": config.compilation_config.cudagraph_mode.name,
    "warm-up": config.kernel_config.enable_jit_warmup, "tuner": config.kernel_config.enable_flashinfer_autotune,
    "share": config.cache_config.gpu_memory_utilization, "ahead": config.scheduler_config.async_scheduling,
    "worker": config.parallel_config.worker_cls,
}))
"""


@pytest.mark.slow
def test_guest_on_a_gpu_is_eager_warms_up_and_needs_no_free_share_of_the_gpu() -> None:
    ran = subprocess.run([sys.executable, "-c", ARGUMENTS, str(MODEL)], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "mode": "NONE",
        "graphs": "NONE",
        "warm-up": True,
        "tuner": False,
        "share": 0.001,
        "ahead": False,
        "worker": "vllm.v1.worker.gpu_worker.Worker",
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_cuda_server_keeps_every_module_attribute(mode: str, tmp_path: Path) -> None:
    configuration = tmp_path / "lend.json"
    settings: dict[str, object] = {"model_folder": str(MODEL), "socket": str(tmp_path / "socket"), **MODES[mode]}
    configuration.write_text(json.dumps(settings))
    ran = subprocess.run(
        [sys.executable, "-c", ATTACH, str(configuration), mode], capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["changed"] == report["states"] == report["wrapped"] == []
    if mode == "untried":
        assert not any("cpu_worker" in name or "worker.cpu" in name for name in report["imported"])
        assert "devices" in report["error"] and report["given_back"] == [True]
    else:
        assert report["imported"] == []
    assert report["served"]
    [sentence] = report["heard"]
    assert HEARD.get(mode, "beside a device that is not a CPU") in sentence
