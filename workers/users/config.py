"""Settings of the users of a server that lends."""

from dataclasses import dataclass
from pathlib import Path

from schemas.errors import UsageError

SLICE = Path(__file__).parent / "azure_code.csv"
"""Six and a half minutes of real users: see README.md beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsersConfig:
    """Who asks the servers that lend, of a run on this machine. Raises UsageError."""

    model_folder: Path
    """Hugging Face folder of what the server serves: its vocabulary."""
    run_folder: Path
    """Where what they waited is written."""
    trace: Path = SLICE
    """Azure CSV or Mooncake JSONL, played again and again; the default ships with ROSE."""
    pace: float = 1.0
    """Seconds of the trace in each second."""
    prompt_divisor: int = 16
    """The trace's prompts are divided by this."""
    output_divisor: int = 2
    """The trace's answers are divided by this."""

    def __post_init__(self) -> None:
        if not (0 < self.pace < float("inf") and self.prompt_divisor > 0 and self.output_divisor > 0):
            raise UsageError("pace, prompt_divisor and output_divisor are numbers above 0")
