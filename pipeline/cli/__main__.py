"""The console script `rose`: Ctrl-C ends the command without a traceback, also while its modules are imported."""

import signal
import sys


def main() -> None:
    """Run the command."""
    try:
        from rose.pipeline.cli.main import main as run  # its imports take a good part of a second

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # as in shells


if __name__ == "__main__":
    main()
