"""The process of one check: `python -m bench.gpu.child MODULE:FUNCTION FILE [--dry-run]`."""

import importlib
import sys
import traceback
from pathlib import Path

from bench.gpu.report import Report, Unavailable


def main() -> int:
    """Run the check, which writes its rows, figures and error to FILE. Return the exit status."""
    module, _, function = sys.argv[1].partition(":")
    report = Report(Path(sys.argv[2]), dry="--dry-run" in sys.argv)
    try:
        getattr(importlib.import_module(module), function)(report)
    except Unavailable as lack:
        report.write(unavailable=str(lack))
    except Exception as error:  # noqa: BLE001 - a check may raise any exception, and the exception is its result
        traceback.print_exc()
        report.write(error=f"{type(error).__name__}: {error}"[:600])
        return 1
    else:
        report.write(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
