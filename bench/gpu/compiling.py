"""Measure the compilation of Triton kernels: whether it needs a C compiler, and its time."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.gpu.card import card_of
from bench.gpu.report import Report, require


def triton_compile(report: Report) -> None:
    """J: decides whether an engine's image needs a C compiler, and how long a new kernel of the guest delays serving.

    Five kernels like those of a sampler run for the first time in a new process: with and without a compiler on PATH,
    with an empty cache, and with the cache of an earlier process.
    """
    card = card_of(report)
    triton = require("triton")
    report.row(triton=triton.__version__, compiler=shutil.which("gcc") or shutil.which("cc") or "none")
    with tempfile.TemporaryDirectory() as scratch:
        bare = Path(scratch) / "bin"
        bare.mkdir()
        given = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
        without_compiler = given | {"PATH": str(bare)}
        for name, environment, cache in (
            ("no compiler, empty cache", without_compiler, "bare"),
            ("compiler, empty cache", given, "full"),
            ("compiler, its cache", given, "full"),
            ("no compiler, cache of the compiler", without_compiler, "full"),
        ):
            ran = subprocess.run(
                [sys.executable, "-m", "bench.gpu.sampler_kernels", card.device],
                env=environment | {"TRITON_CACHE_DIR": str(Path(scratch) / cache)},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            report.row(case=name, **_answer(ran))


def _answer(ran: "subprocess.CompletedProcess[str]") -> dict[str, object]:
    if ran.returncode:
        return {"exit_status": ran.returncode, "said": (ran.stderr.strip().splitlines() or [""])[-1][:200]}
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found
