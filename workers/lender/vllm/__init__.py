"""The plugin (entry point `vllm.general_plugins`) that makes a vLLM server a lender.

Keeps true: without `ROSE_LEND` the plugin imports nothing and changes nothing, in any process that loads it.
"""

import os

SETTING = "ROSE_LEND"
"""The environment variable that names the configuration file (`rose.workers.lender.config.LendConfig`)."""


def register() -> None:
    """Register the lender if `ROSE_LEND` is set. vLLM calls this in its API server, engine core and workers."""
    configuration = os.environ.get(SETTING)
    if configuration:
        from rose.workers.lender.vllm.attach import register_lender

        register_lender(configuration)
