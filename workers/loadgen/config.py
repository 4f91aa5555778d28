"""Settings of the users of a server that lends."""

from dataclasses import dataclass
from pathlib import Path

from rose.schemas.setting_bounds import MAX_COUNT, check_bounds

SQUARE = "square:"
"""Beginning of the name of a square wave, which is no file."""

LEAST_PACE, MOST_PACE = 1e-6, 1e6

TRACE_FILE = Path(__file__).parent / "azure_code.csv"
"""Six and a half minutes of real users; README.md in the same folder describes the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadgenConfig:
    """Who asks the servers that lend, of a run on this machine."""

    model_folder: Path
    """Hugging Face folder of what the server serves: its vocabulary."""
    run_folder: Path
    """Where what they waited is written."""
    trace: Path = TRACE_FILE
    """Azure CSV or Mooncake JSONL, played again and again; the default ships with ROSE."""
    pace: float = 1.0
    """Seconds of the trace in each second."""
    prompt_divisor: int = 16
    """The trace's prompts are divided by this."""
    output_divisor: int = 2
    """The trace's answers are divided by this."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            {"pace": (LEAST_PACE, MOST_PACE), "prompt_divisor": (1, MAX_COUNT), "output_divisor": (1, MAX_COUNT)},
        )
        if str(self.trace).startswith(SQUARE):
            raise ValueError(f"trace ({self.trace}) must be a file: a square wave has no end, and is played for ever")
