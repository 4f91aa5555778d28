"""What Triton needs to compile, and how long that takes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.gpu.card import card_of
from bench.gpu.report import Report, Unavailable


def triton_compile(report: Report) -> None:
    """J: decides whether an engine's image needs a C compiler, and how long a kernel that serving lacks holds it up.

    Five kernels as a sampler has run for the first time in processes of their own: with and without a compiler on PATH,
    with an empty cache and with the cache of the process before.
    """
    card = card_of(report)
    try:
        import triton
    except ImportError as error:
        raise Unavailable(f"Triton is not installed ({error})") from error
    report.row(triton=triton.__version__, compiler=shutil.which("gcc") or shutil.which("cc") or "none")
    with tempfile.TemporaryDirectory() as scratch:
        bare = Path(scratch) / "bin"
        bare.mkdir()
        cases: tuple[tuple[str, dict[str, str], str], ...] = (
            ("no compiler, empty cache", {"PATH": str(bare)}, "bare"),
            ("compiler, empty cache", {}, "full"),
            ("compiler, its cache", {}, "full"),
            ("no compiler, cache of the compiler", {"PATH": str(bare)}, "full"),
        )
        for name, variables, cache in cases:
            kept = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
            ran = subprocess.run(
                [sys.executable, "-m", "bench.gpu.sampler_kernels", card.device],
                env=kept | {"TRITON_CACHE_DIR": str(Path(scratch) / cache)} | variables,
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
