"""An engine that has its process to itself: import this before vLLM and torch, and never in a process of another's.

Keeps true: what vLLM and torch read from the environment when they are imported is set; a variable that is already set
wins.
"""

import logging
import os
import sys
import warnings

ENVIRONMENT = {
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
if "torch" in sys.modules:  # which read the variable when it was imported
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # says that Triton is missing, at every import
logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)  # 50 KB of turns for a failed step
warnings.simplefilter("ignore", FutureWarning)  # of vLLM about torch, while it starts
