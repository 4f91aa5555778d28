"""vLLM's API server with async scheduling on a CPU, where vLLM turns async scheduling off because it gains nothing.

The scheduler and the engine core are those of a server on a GPU. The batch itself computes before the call that starts
it returns.
"""

import runpy
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform

update_config = CpuPlatform.check_and_update_config.__func__


def update_with_async_scheduling(cls: Any, config: VllmConfig) -> None:
    """Update the configuration as vLLM does, but leave async scheduling on."""
    update_config(cls, config)
    config.scheduler_config.async_scheduling = True


if __name__ == "__main__":
    CpuPlatform.check_and_update_config = classmethod(update_with_async_scheduling)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
