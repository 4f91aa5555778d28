"""Errors that ended ranks of an engine, as files in the temporary folder of the engine's process.

A rank that fails in a step cannot answer: vLLM reads the answer of rank 0 only. So the rank writes its error and ends,
which ends the engine's process, and the executor reads the error.
"""

import tempfile
from pathlib import Path


def record_failure(engine: int, rank: int, reason: str) -> None:
    """Write why a rank has ended, unless that is written. `engine`: process id. Only in engine and ranks."""
    file = _file(Path(tempfile.gettempdir()), engine, rank)
    if not file.exists():
        file.write_text(reason, encoding="utf-8")


def recorded_failures(folder: Path, engine: int) -> str:
    """Return why ranks have ended, in one sentence; empty if none is recorded.

    `folder`: the temporary folder of the engine's process. `engine`: id of this process.
    """
    files = sorted(folder.glob(_file(Path(), engine, "*").name))
    return "; ".join(f"rank {file.stem.rpartition('-')[2]}: {file.read_text(encoding='utf-8')}" for file in files)


def _file(folder: Path, engine: int, rank: int | str) -> Path:
    return folder / f"rose-engine-{engine}-rank-{rank}.txt"
