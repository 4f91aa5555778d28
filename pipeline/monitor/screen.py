"""The live view on a terminal, and the same in plain lines where there is none."""

from collections.abc import Callable, Sequence
from time import monotonic

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rose.pipeline.monitor.diagnosis import STANDSTILL_SECONDS, Finding, Severity, diagnose, headline
from rose.pipeline.monitor.facts import ExecutorFacts, Facts
from rose.pipeline.monitor.follower import RunFollower
from rose.pipeline.terminal import escape_control_chars
from rose.schemas.heartbeats import ExecutorState

READ_SECONDS = 0.25
"""Longest wait for new records between two looks at the screen and the processes."""

DRAW_SECONDS = 0.5
"""Time between two drawings."""

PLAIN_SECONDS = 10.0
"""Time between two plain lines when no step ends."""

UNANSWERED_SECONDS = 8.0
"""Time without an answer after which the broker is shown as away."""

BARS = "▁▂▃▄▅▆▇█"
SHOWN_VERSIONS = 60
"""Policy versions of the curve on the screen."""

STYLES = {Severity.UNWELL: "bold red", Severity.WAITS: "yellow", Severity.NOTE: "dim"}


class Screen:
    """Shows a run as it goes on."""

    def __init__(
        self,
        follower: RunFollower,
        console: Console,
        *,
        title: str,
        total: int = 0,
        started_executors: Sequence[str] = (),
    ) -> None:
        """`total`: trajectories asked for, when known. `started_executors`: executors that start with the screen."""
        self._follower = follower
        self._console = console
        self._title = title
        self._total = total
        self._started_executors = started_executors
        self._began = monotonic()
        self._last_headline: str | None = None

    def run(self, more: Callable[[], bool], *, events: Callable[[], list[str]] = list) -> None:
        """Show the run for as long as there is `more`; `events` are printed between two looks."""
        if self._console.is_terminal:
            with Live(self._drawn(), console=self._console, refresh_per_second=4, transient=True) as live:
                self._loop(more, events, DRAW_SECONDS, lambda: live.update(self._drawn()))
        else:
            self._loop(more, events, PLAIN_SECONDS, self._print_line)

    def line(self) -> str:
        """The run in one plain line."""
        view, now = self._follower.run_state, monotonic()
        parts = [
            f"{now - self._began:6.0f} s",
            f"step {view.step}",
            f"version {view.version}",
            f"{view.turns_per_second(now):.0f} turns/s",
            f"{view.settled}{self._total_text()} trajectories settled",
            count_executors(self._follower.facts().executors),
        ]
        if view.solved is not None:
            parts.insert(2, f"solved {view.solved:.0%}")
        return "  ".join(parts)

    def _print_line(self) -> None:
        self._print(self.line())

    def _print(self, line: str) -> None:
        self._console.print(Text(escape_control_chars(line)), soft_wrap=True)

    def _loop(
        self, more: Callable[[], bool], events: Callable[[], list[str]], every: float, draw: Callable[[], None]
    ) -> None:
        next_drawing = monotonic() + every
        while more():
            self._follower.poll(READ_SECONDS)
            for event in events():
                self._print(event)
            if not self._console.is_terminal:
                self._print_headline_changes()
            if monotonic() >= next_drawing:
                next_drawing = monotonic() + every
                draw()

    def _print_headline_changes(self) -> None:
        """The moment that nothing moves, and why; again when the reason is another one."""
        _, why = self._findings()
        reason = None if why is None else "".join(each for each in why if not each.isdigit())
        if reason is not None and reason != self._last_headline and why is not None:
            self._print(why)
        self._last_headline = reason

    def _findings(self) -> tuple[list[Finding], str | None]:
        facts = self._follower.facts()
        if self._follower.unanswered_seconds > UNANSWERED_SECONDS:
            away = f"the broker has not answered for {self._follower.unanswered_seconds:.0f} s"
            away += f" ({self._follower.broker_error})" if self._follower.broker_error else ""
            return [Finding(Severity.UNWELL, "broker", away)], f"nothing moves: {away}"
        findings = diagnose(facts)
        return findings, headline(facts, findings, starting=self._starting(facts))

    def _starting(self, facts: Facts) -> list[str] | None:
        """The started executors that have sent no heartbeat yet; None once a turn was applied, or after a while."""
        view, elapsed = self._follower.run_state, monotonic() - self._began
        if not self._started_executors or view.applied_at >= view.began or elapsed >= STANDSTILL_SECONDS:
            return None
        known = {each.worker for each in facts.executors}
        return [name for name in self._started_executors if name not in known]

    def _drawn(self) -> Group:
        now, view = monotonic(), self._follower.run_state
        head = Text.assemble(
            (f"{self._title}  ", "bold"),
            (f"{now - self._began:.0f} s   ", "dim"),
            f"{view.turns_per_second(now):.0f} turns/s   policy version {view.version}",
        )
        facts = self._follower.facts()
        findings, why = self._findings()
        parts: list[RenderableType] = [
            head,
            Text(),
            executor_table(facts.executors),
            Text(),
            work_line(facts),
            self._settled(),
        ]
        parts += [self._curve(), Text(), *finding_lines(findings)]
        if why is not None:
            parts.insert(1, Text(escape_control_chars(why), "bold red"))
        return Group(*parts)

    def _settled(self) -> Text:
        view = self._follower.run_state
        ends = "  ".join(f"{outcome.value.replace('_', ' ')} {count}" for outcome, count in view.ends.items())
        return Text.assemble(
            ("settled       ", "dim"), f"{view.settled}{self._total_text()} trajectories   ", (ends, "dim")
        )

    def _total_text(self) -> str:
        """Return ` of N`, with the number of requested trajectories that were not refused; empty if it is unknown."""
        view = self._follower.run_state
        return f" of {max(self._total - view.refused, view.opened)}" if self._total else ""

    def _curve(self) -> Text:
        view = self._follower.run_state
        if view.solved is None:
            return Text("no trajectory has ended yet", "dim")
        shown = list(view.curve)[-SHOWN_VERSIONS:]
        return Text.assemble(
            ("solved        ", "dim"),
            ("".join(_bar(share) for share in shown), "cyan"),
            f"  {view.solved:.0%} lately, {view.turns_each:.1f} turns a trajectory",
            (f"   step {view.step}", "dim"),
        )


def count_executors(executors: Sequence[ExecutorFacts]) -> str:
    """Return the number of executors in each state, e.g. `executors: 2 ready, 1 starting`."""
    counts: dict[str, int] = {}
    for each in executors:
        state = "silent" if each.silent else "refusing" if each.refused_version > each.version else each.state.value
        counts[state] = counts.get(state, 0) + 1
    if not counts:
        return "no executor"
    return f"executors: {', '.join(f'{count} {state}' for state, count in sorted(counts.items()))}"


def executor_table(executors: Sequence[ExecutorFacts]) -> Table | Text:
    """A row for each."""
    if not executors:
        return Text("no heartbeats of executors yet", "dim")
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("executor")
    table.add_column("state")
    for title in ("version", "turns", "KV used", "tokens/s", "swap"):
        table.add_column(title, justify="right")
    for each in executors:
        table.add_row(
            each.worker,
            _state_text(each),
            str(each.version) if each.version >= 0 else "none",
            f"{each.held} of {each.max_turns}",
            f"{each.kv_used:.0%}",
            f"{each.tokens_per_second:,.0f}",
            f"{1000 * each.swap_seconds:.0f} ms",
            style="dim" if each.silent else "",
        )
    return table


def work_line(facts: Facts) -> Text:
    """Return the line of open groups, their trajectories and waiting prompts."""
    window = f" of {facts.window_groups}" if facts.window_groups is not None else ""
    return Text.assemble(
        ("groups        ", "dim"),
        f"{facts.open_groups}{window} open: {facts.in_a_turn} trajectories in a turn, "
        f"{facts.waiting_for_trainer} wait for the trainer   ",
        (f"prompts waiting {facts.prompts_waiting}", "dim"),
    )


def finding_lines(findings: Sequence[Finding]) -> list[Text]:
    """Return one line for each finding."""
    return [
        Text.assemble(
            (f"{finding.severity.value:<8}", STYLES[finding.severity]),
            escape_control_chars(f"{finding.who}: {finding.sentence}"),
        )
        for finding in findings
    ]


def _state_text(executor: ExecutorFacts) -> Text:
    if executor.silent:
        return Text(f"silent for {executor.silent_seconds:.0f} s", "red")
    if executor.refused_version > executor.version:
        return Text(f"refuses {executor.refused_version}", "red")
    if executor.frozen:
        return Text("frozen", "yellow")
    return Text(executor.state.value, "green" if executor.state is ExecutorState.READY else "yellow")


def _bar(share: float) -> str:
    return BARS[min(len(BARS) - 1, int(share * len(BARS)))]
