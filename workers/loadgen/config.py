"""Settings of the users of a server that lends."""

from dataclasses import dataclass
from pathlib import Path

from rose.schemas.setting_bounds import MAX_COUNT, check_bounds

LEAST_PACE, MOST_PACE = 1e-6, 1e6

TRACE_FILE = Path(__file__).parent / "azure_code.csv"
"""Six and a half minutes of real users; README.md in the same folder describes the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadgenConfig:
    """The load on the lending servers of a run on this machine."""

    model_folder: Path
    """Hugging Face folder of the model that the server serves; its vocabulary is used."""
    run_folder: Path
    """Folder of the run, in which the request log is written."""
    trace: Path = TRACE_FILE
    """Trace file, Azure CSV or Mooncake JSONL, which is replayed in a loop; the default ships with ROSE."""
    pace: float = 1.0
    """Seconds of the trace that are replayed in one second."""
    prompt_divisor: int = 16
    """Divisor of the trace's prompt lengths."""
    output_divisor: int = 2
    """Divisor of the trace's output lengths."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            {"pace": (LEAST_PACE, MOST_PACE), "prompt_divisor": (1, MAX_COUNT), "output_divisor": (1, MAX_COUNT)},
        )
