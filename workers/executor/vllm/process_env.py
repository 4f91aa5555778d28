"""Environment variables of an engine with its own process.

Import this module before vLLM and torch, and never in the process of a serving engine.

Keeps true: the variables that vLLM and torch read at their import are set. A variable that is already set is not
changed.
"""

import logging
import os
import sys
import warnings

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # a start on a CPU prints ten warnings that need no action
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # two OpenMP threads that share cores with anything else make steps 10 to 50 times slower
    "HF_HUB_OFFLINE": "1",  # models are folders: nothing is ever fetched by name
    "TRANSFORMERS_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # the standard output is for results
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore:resource_tracker:UserWarning",  # for the processes of ranks
}
"""Variables that must be set before the import of vLLM and torch."""


def other_variables() -> list[str]:
    """Names of vLLM's variables that are set to other values than these."""
    return sorted(
        name for name, value in os.environ.items() if name.startswith("VLLM_") and ENVIRONMENT.get(name) != value
    )


for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
if "torch" in sys.modules:  # torch has read the variable at its import
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # logs a missing Triton at every import
logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)  # 50 KB of turns for a failed step
warnings.simplefilter("ignore", FutureWarning)  # vLLM's warnings about torch at its start
