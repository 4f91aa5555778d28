"""The plugin (entry point `vllm.general_plugins`) that makes a vLLM server a lender.

Keeps true: without `ROSE_LEND` nothing is imported and nothing is changed, in any process that loads it.
"""

import os

SETTING = "ROSE_LEND"
"""The environment variable that names the configuration file (`rose.workers.lender.config.LendConfig`)."""


def register() -> None:
    """Called by vLLM in each of its processes: API server, engine core, workers."""
    configuration = os.environ.get(SETTING)
    if configuration:
        from rose.workers.lender.vllm.attach import register_lender

        register_lender(configuration)
