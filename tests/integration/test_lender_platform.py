"""A server on a GPU that lends or is observed keeps each name of torch and vLLM.

vLLM's modules for CPUs replace `torch.cuda.Event` and other names when they are imported. So the lender's attach path
runs here in a fresh process whose platform claims to be CUDA, and every name is compared before and after.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODES: dict[str, dict[str, object]] = {
    "strict": {},
    "slo": {"promise": {"dial": 1.0}},
    "observe": {"observe": True},
}

ATTACH = """
import functools, json, logging, multiprocessing, os, queue, random, sys, types

import numpy, torch
import vllm.platforms
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.v1.engine.core import EngineCoreProc
import vllm.v1.core.sched.scheduler
import vllm.v1.worker.gpu.buffer_utils  # the modules whose names vLLM's modules for CPUs replace
import vllm.v1.worker.gpu_worker


class Cuda(Platform):
    _enum = PlatformEnum.CUDA
    device_name = device_type = "cuda"


vllm.platforms._current_platform = Cuda()  # only now: a build for CPUs cannot import vLLM's worker for GPUs otherwise

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
)
pool = types.SimpleNamespace(get_num_free_blocks=lambda: 1)
core.scheduler = types.SimpleNamespace(
    kv_cache_config=types.SimpleNamespace(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=["one"]),
    kv_cache_manager=types.SimpleNamespace(block_pool=pool), has_requests=lambda: False,
    get_request_counts=lambda: (0, 0),
)
core.input_queue = queue.Queue()
core._process_input_queue = lambda: None
core._process_engine_step = lambda: False
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(logging.Formatter().format(record))
logging.getLogger("vllm.rose").addHandler(handler)
logging.getLogger("vllm.rose").setLevel(logging.INFO)

COMPARED = ("torch", "vllm", "numpy", "triton", "random", "os", "signal")


def names():
    modules = {name: each for name, each in sys.modules.items() if name.partition(".")[0] in COMPARED}
    places = {**modules, "torch.Tensor": torch.Tensor, "EngineCoreProc": EngineCoreProc}
    return {
        (place, name): value
        for place, owner in places.items() if owner is not None
        for name, value in vars(owner).items() if not isinstance(value, types.ModuleType)
    }


def states():
    return {
        "environment": dict(os.environ), "torch": torch.get_rng_state().tolist(), "random": random.getstate(),
        "numpy": [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()],
        "threads": torch.get_num_threads(), "dtype": str(torch.get_default_dtype()),
    }


from rose.workers.lender.vllm.attach import register_lender

register_lender(configuration)
before, state, loaded = names(), states(), set(sys.modules)
core.run_busy_loop()
if core._process_input_queue.__name__ == "take_input":  # it is observed
    core._process_input_queue()
    core._process_engine_step()
after = names()
print(json.dumps({
    "changed": sorted(".".join(key) for key, value in before.items() if after.get(key, None) is not value),
    "states": [name for name, value in states().items() if value != state[name]],
    "imported": sorted(name for name in set(sys.modules) - loaded if name.startswith(("torch", "vllm", "triton"))),
    "served": served == [core], "heard": heard,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_cuda_server_keeps_every_module_attribute(mode: str, tmp_path: Path) -> None:
    configuration = tmp_path / "lend.json"
    settings: dict[str, object] = {"model_folder": "/nowhere", "socket": str(tmp_path / "socket"), **MODES[mode]}
    configuration.write_text(json.dumps(settings))
    ran = subprocess.run(
        [sys.executable, "-c", ATTACH, str(configuration)], capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["changed"] == report["states"] == report["imported"] == []
    assert report["served"]
    [sentence] = report["heard"]
    expected = "observation_enabled" if mode == "observe" else "beside a device that is not a CPU"
    assert expected in sentence
