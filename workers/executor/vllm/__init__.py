"""The rollout engine: the only package that imports vLLM.

Keeps true: importing this package costs nothing and sets what vLLM and torch read from the environment when they are
imported. A variable that is already set wins.
"""

import logging
import os

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # a start on a CPU prints ten warnings that nobody can act on
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # two OpenMP threads that share cores with anything else make steps 10 to 50 times slower
    "HF_HUB_OFFLINE": "1",  # models are folders: nothing is ever fetched by name
    "TRANSFORMERS_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What must be set before vLLM and torch are imported."""

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # says that Triton is missing, at every import
logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)  # 50 KB of turns for a failed step
