"""The live view on a terminal, and the same in plain lines where there is none."""

from collections.abc import Callable
from time import monotonic, time

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.command.view import View
from topics.catalog import COMPLETED, HEARTBEATS, MANIFESTS, OUTCOMES, SAMPLES
from topics.reader import Reader
from topics.records import Envelope
from topics.settings import BusSettings

READ_SECONDS = 0.25
"""Longest wait for new records between two looks at the screen and the processes."""

DRAW_SECONDS = 0.5
"""Time between two drawings."""

PLAIN_SECONDS = 10.0
"""Time between two plain lines when no step ends."""

BARS = "▁▂▃▄▅▆▇█"
SHOWN_VERSIONS = 60
"""Policy versions of the curve on the screen."""


class Watcher:
    """Reads a run's log as it grows and shows it."""

    def __init__(self, settings: BusSettings, console: Console, *, title: str, total: int = 0) -> None:
        """`total`: trajectories asked for, when known; then the run is read from its beginning."""
        self.view = View()
        self._console = console
        self._title = title
        self._total = total
        self._began = monotonic()
        self._reader = Reader(settings, "rose-watch", group="watch", bury=False)
        begin = OFFSET_BEGINNING if total else OFFSET_END
        begins = {
            (topic, partition): OFFSET_BEGINNING if topic is MANIFESTS else begin
            for topic in (COMPLETED, HEARTBEATS, MANIFESTS, OUTCOMES, SAMPLES)
            for partition in range(self._reader.partitions(topic))
        }
        self._reader.assign(begins)

    def run(self, more: Callable[[], bool], *, events: Callable[[], list[str]] = list) -> None:
        """Show the run for as long as there is `more`; `events` are told between two looks."""
        if self._console.is_terminal:
            with Live(self._drawn(), console=self._console, refresh_per_second=4, transient=True) as live:
                self._loop(more, events, DRAW_SECONDS, lambda: live.update(self._drawn()))
        else:
            self._loop(more, events, PLAIN_SECONDS, self._print_line)

    def close(self) -> None:
        self._reader.close()

    def line(self) -> str:
        """The run in one plain line."""
        view, now = self.view, time()
        live = sum(not view.silent(worker, now) for worker in view.executors)
        parts = [
            f"{monotonic() - self._began:6.0f} s",
            f"step {view.step}",
            f"version {view.version}",
            f"{view.turns_per_second(now):.0f} turns/s",
            f"{view.settled}{f' of {self._total}' if self._total else ''} trajectories settled",
            f"{live} executors",
        ]
        if view.solved is not None:
            parts.insert(2, f"solved {view.solved:.0%}")
        return "  ".join(parts)

    def _print_line(self) -> None:
        self._console.print(self.line(), highlight=False, soft_wrap=True)

    def _loop(
        self, more: Callable[[], bool], events: Callable[[], list[str]], every: float, draw: Callable[[], None]
    ) -> None:
        next_drawing = monotonic() + every
        while more():
            for item in self._reader.read(2000, READ_SECONDS):
                if isinstance(item, Envelope) and item.record is not None:
                    self.view.take(item.record, item.timestamp_seconds)
            for event in events():
                self._console.print(event, highlight=False, soft_wrap=True)
            if monotonic() >= next_drawing:
                next_drawing = monotonic() + every
                draw()

    def _drawn(self) -> Group:
        now = time()
        head = Text.assemble(
            (f"{self._title}  ", "bold"),
            (f"{monotonic() - self._began:.0f} s   ", "dim"),
            f"{self.view.turns_per_second(now):.0f} turns/s   policy version {self.view.version}",
        )
        return Group(head, Text(), self._executors(now), Text(), self._trajectories(), self._curve())

    def _executors(self, now: float) -> Table:
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
        table.add_column("executor")
        table.add_column("state")
        for title in ("version", "running", "waiting", "KV used", "tokens/s", "swap"):
            table.add_column(title, justify="right")
        for worker, beat in sorted(self.view.executors.items()):
            silent = self.view.silent(worker, now)
            used = 1 - beat.kv_bytes_free / beat.kv_bytes_total if beat.kv_bytes_total else 0.0
            table.add_row(
                worker,
                Text("silent", "red") if silent else Text(beat.state.value, "green"),
                str(beat.policy_version),
                str(beat.rollout.running),
                str(beat.rollout.waiting),
                f"{used:.0%}",
                f"{beat.hardware.decode_tokens_per_second:,.0f}",
                f"{1000 * beat.swap_seconds:.0f} ms",
                style="dim" if silent else "",
            )
        if not self.view.executors:
            table.add_row("waiting for the first heartbeat", style="dim")
        return table

    def _trajectories(self) -> Text:
        ends = "  ".join(f"{outcome.value.replace('_', ' ')} {count}" for outcome, count in self.view.ends.items())
        of = f" of {self._total}" if self._total else ""
        return Text.assemble(("trajectories  ", "dim"), f"settled {self.view.settled}{of}   ", (ends, "dim"))

    def _curve(self) -> Text:
        if self.view.solved is None:
            return Text("no trajectory has ended yet", "dim")
        shown = list(self.view.curve)[-SHOWN_VERSIONS:]
        return Text.assemble(
            ("solved        ", "dim"),
            ("".join(_bar(share) for share in shown), "cyan"),
            f"  {self.view.solved:.0%} lately, {self.view.turns_each:.1f} turns a trajectory",
            (f"   step {self.view.step}", "dim"),
        )


def _bar(share: float) -> str:
    return BARS[min(len(BARS) - 1, int(share * len(BARS)))]
