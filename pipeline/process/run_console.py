"""The console of a command that has work to finish, whoever reads what it says."""

import os

from rich.console import Console


class RunConsole(Console):
    """Says nothing more once nobody reads it, as `tee` that Ctrl-C has ended: the run goes on, and has its report."""

    def on_broken_pipe(self) -> None:
        """Say nothing from now on."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # what is written and not flushed goes there
        os.close(nowhere)
