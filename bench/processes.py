"""What a process has used, as Linux counts it."""

import os
from pathlib import Path


def processor_seconds(pid: int) -> float:
    """Of all its threads, in its own code and the kernel's."""
    values = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
