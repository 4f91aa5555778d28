"""Why is nothing happening: from what was seen of a run to sentences that say who waits for whom.

Keeps true
- Silence is told by when something was last received here, never by another host's clock.
- A finding is unwell when somebody has to mend it; waiting for one another is how a run works.
- Where nothing was applied for `STILL_SECONDS`, there is one line that says why.

Pure. Example
    2 executors STARTING, both refusing version 0 for the same reason, 16 trajectories in a turn
        -> unwell: "2 executors refuse version 0: float32 on the wire, the engine holds bfloat16"
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from schemas.slack import ExecutorState

STILL_SECONDS = 10.0
"""A run in which no turn was applied for so long says why."""

SILENT_SECONDS = 5.0
"""So long without a word of whoever should speak is told: a trainer, a router."""

CLOCK_SECONDS = 5.0
"""A heartbeat whose sender's clock differs by more from its receiver's is told; what it took to come is in it."""

NAMED = 4
"""Executors that are named one by one; of more, the number is told."""


class Severity(Enum):
    """How much a finding matters, the worst first."""

    UNWELL = "unwell"
    """It stands still, or does less than it could, until somebody mends it."""
    WAITS = "waits"
    """Somebody waits for somebody else."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know, in a sentence."""

    severity: Severity
    who: str
    """`executors`, `router`, `environments`, `trainer`, `prompts`, `letters` or `broker`."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorFacts:
    """One executor, by its newest heartbeat."""

    worker: str
    state: ExecutorState
    version: int
    refused_version: int = -1
    refused_reason: str = ""
    silent_seconds: float
    """Since the heartbeat came here; since the beginning of looking for one that came before."""
    ttl_seconds: float
    held: int = 0
    """Turns that it runs or keeps waiting."""
    max_turns: int = 0
    clock_off_seconds: float = 0.0
    """Its clock against this machine's."""
    kv_used: float = 0.0
    """Share of its KV cache."""
    tokens_per_second: float = 0.0
    """Of one sequence."""
    swap_seconds: float = 0.0
    """The engine's pause at its latest version."""
    paused_reason: str = ""
    cuts: int = 0
    """Times that serving took room back from rollouts."""
    frozen: bool = False
    """It was cut, and grows no more for now."""
    rivals: bool = False
    """Two run under its name."""

    @property
    def silent(self) -> bool:
        return self.silent_seconds > self.ttl_seconds

    @property
    def ready(self) -> bool:
        return self.state is ExecutorState.READY and not self.silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was seen of a run. What is not known is None, and nothing is concluded from it."""

    executors: Sequence[ExecutorFacts] = ()
    newest_version: int = -1
    """On the log, of those that are believed."""
    disbelieved: int = 0
    """Manifests on the log that are of another run, or not signed by the trusted key."""
    max_lag_versions: int = 2**53
    """Executors that are further behind the newest version that is served get no turns."""
    environment_workers: int | None = None
    homes: int = 0
    homes_owned: int | None = None
    routers: int | None = None
    prompts_waiting: int = 0
    open_groups: int = 0
    window_groups: int | None = None
    """Groups that all environment workers together may hold open."""
    in_a_turn: int = 0
    """Trajectories of open groups that are under way."""
    waiting_for_trainer: int = 0
    """Trajectories of open groups that have ended and have no outcome."""
    results_waiting: int = 0
    """Results that no environment worker has taken in."""
    applied_seconds: float = 0.0
    """Since a turn was last seen to be applied, or since the beginning of looking."""
    dispatched_seconds: float = 0.0
    """The same of a turn sent to an executor."""
    settled_seconds: float = 0.0
    """The same of an outcome, or of a sample that the trainer could settle."""
    letters: Mapping[str, int] = field(default_factory=dict)
    """Dead letters by topic."""

    @property
    def work_left(self) -> bool:
        return self.prompts_waiting > 0 or self.open_groups > 0


def diagnose(facts: Facts) -> list[Finding]:
    """What is to be known, what is unwell first."""
    found = [
        *_executors(facts),
        *_routers(facts),
        *_environments(facts),
        *_trainer(facts),
        *_prompts(facts),
        *_letters(facts),
    ]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def headline(facts: Facts, findings: Sequence[Finding]) -> str | None:
    """Why nothing moves, in one line; None while something does."""
    if facts.applied_seconds < STILL_SECONDS:
        return None
    for severity in (Severity.UNWELL, Severity.WAITS):
        sentences = [each.sentence for each in findings if each.severity is severity]
        if sentences:
            return f"nothing moves: {'; '.join(sentences)}"
    if not facts.work_left:
        return "nothing moves: no prompts left"
    return "nothing moves, and the log does not say why: see the logs of the roles"


def _executors(facts: Facts) -> Iterator[Finding]:
    there = [each for each in facts.executors if each.state is not ExecutorState.STOPPING]
    speaking = [each for each in there if not each.silent]
    if not there:
        yield Finding(Severity.UNWELL if facts.work_left else Severity.NOTE, "executors", "no executor is there")
    for each in there:
        if each.silent:
            sentence = f"{each.worker} has been silent for {each.silent_seconds:.0f} s"
            yield Finding(Severity.UNWELL, "executors", sentence)
    refusing = [each for each in speaking if each.refused_version > each.version]
    yield from _refusals(refusing)
    waiting = [each for each in speaking if each.state is ExecutorState.STARTING and each not in refusing]
    if waiting and facts.newest_version < 0:
        others = f"none of the {facts.disbelieved} on the log is of this run, signed by its key"
        why = others if facts.disbelieved else "the trainer has published none yet"
        sentence = f"{_count(waiting)} for a first policy version: {why}"
        yield Finding(Severity.WAITS, "executors", sentence)
    elif waiting:
        sentence = f"{_count(waiting)} to take up version {facts.newest_version}"
        yield Finding(Severity.WAITS, "executors", sentence)
    served = max((each.version for each in speaking), default=-1)
    for each in speaking:
        lag = served - each.version
        if each.ready and each not in refusing and lag > facts.max_lag_versions:
            sentence = f"{each.worker} serves version {each.version}, another serves version {served}: it gets no turns"
            yield Finding(Severity.UNWELL, "executors", sentence)
        elif each.ready and each not in refusing and facts.newest_version - each.version > facts.max_lag_versions:
            sentence = f"{each.worker} serves version {each.version}, the newest on the log is {facts.newest_version}"
            yield Finding(Severity.NOTE, "executors", sentence)
        if each.state is ExecutorState.PAUSED:
            why = each.paused_reason or "it does not say why"
            yield Finding(Severity.WAITS, "executors", f"{each.worker} is paused, and takes no turns: {why}")
        if each.frozen:
            times = "once" if each.cuts == 1 else f"{each.cuts} times"
            sentence = f"{each.worker} lends no more than it does now: serving took room back {times} since it started"
            yield Finding(Severity.NOTE, "executors", sentence)
        if each.rivals:
            sentence = f"two executors run as {each.worker}, and one of them gets no turns: no two have the same name"
            yield Finding(Severity.UNWELL, "executors", sentence)
        if abs(each.clock_off_seconds) > CLOCK_SECONDS:
            off = f"{abs(each.clock_off_seconds):.0f} s {'ahead of' if each.clock_off_seconds > 0 else 'behind'}"
            yield Finding(Severity.NOTE, "executors", f"the clock of {each.worker} is {off} ours")


def _refusals(refusing: Iterable[ExecutorFacts]) -> Iterator[Finding]:
    alike: dict[tuple[int, str, int], list[ExecutorFacts]] = {}
    for each in refusing:
        alike.setdefault((each.refused_version, each.refused_reason, each.version), []).append(each)
    for (refused, reason, version), executors in alike.items():
        serving = f", and serve{'s' if len(executors) == 1 else ''} version {version}" if version >= 0 else ""
        verb = "refuses" if len(executors) == 1 else "refuse"
        sentence = f"{_who(executors)} {verb} version {refused}{serving}: {reason or 'they do not say why'}"
        yield Finding(Severity.UNWELL, "executors", sentence)


def _routers(facts: Facts) -> Iterator[Finding]:
    if facts.routers == 0 and facts.work_left:
        yield Finding(Severity.UNWELL, "router", f"no router is there{_asked(facts)}")
        return
    ready = [each for each in facts.executors if each.ready and each.max_turns > each.held]
    held = sum(each.held for each in facts.executors)
    still = min(facts.dispatched_seconds, facts.applied_seconds)
    if ready and facts.in_a_turn and not held and not facts.results_waiting and still >= SILENT_SECONDS:
        sentence = (
            f"{_trajectories(facts.in_a_turn)} ask for turns and {_who(ready)} could run them, but no turn was sent "
            f"out for {still:.0f} s: does a router serve?"
        )
        yield Finding(Severity.UNWELL, "router", sentence)
    elif held and facts.in_a_turn and facts.applied_seconds >= SILENT_SECONDS:
        yield Finding(Severity.WAITS, "executors", f"{held} turns are being run, none has ended")


def _environments(facts: Facts) -> Iterator[Finding]:
    workers, owned = facts.environment_workers, facts.homes_owned
    if workers == 0 and facts.work_left:
        yield Finding(Severity.UNWELL, "environments", "no environment worker is there")
    elif workers and owned is not None and owned < facts.homes:
        sentence = f"{facts.homes - owned} of {facts.homes} homes have no environment worker"
        yield Finding(Severity.UNWELL, "environments", sentence)
    if facts.results_waiting and facts.applied_seconds >= SILENT_SECONDS:
        sentence = (
            f"{facts.results_waiting} results wait for an environment worker, "
            f"and none was applied for {facts.applied_seconds:.0f} s"
        )
        yield Finding(Severity.UNWELL, "environments", sentence)


def _trainer(facts: Facts) -> Iterator[Finding]:
    if not facts.waiting_for_trainer or facts.in_a_turn:
        return
    silent = facts.settled_seconds >= SILENT_SECONDS
    told = f", which has settled nothing for {facts.settled_seconds:.0f} s" if silent else ""
    full = facts.window_groups is not None and facts.open_groups >= facts.window_groups
    groups = "every group of the window waits" if full else f"all {facts.open_groups} open groups wait"
    yield Finding(Severity.WAITS, "trainer", f"{groups} for the trainer{told}")


def _prompts(facts: Facts) -> Iterator[Finding]:
    if not facts.prompts_waiting:
        left = f": the last {facts.open_groups} groups are open" if facts.open_groups else ""
        yield Finding(Severity.NOTE, "prompts", f"no prompts left{left}")
    elif facts.window_groups is not None and facts.open_groups >= facts.window_groups:
        sentence = f"the window is full: {facts.open_groups} groups are open, {facts.prompts_waiting} prompts wait"
        yield Finding(Severity.NOTE, "prompts", sentence)


def _letters(facts: Facts) -> Iterator[Finding]:
    if total := sum(facts.letters.values()):
        where = ", ".join(f"{count} of {topic}" for topic, count in facts.letters.items())
        letters = "dead letter" if total == 1 else "dead letters"
        yield Finding(Severity.NOTE, "letters", f"{total} {letters} ({where}): see `rose letters list`")


def _asked(facts: Facts) -> str:
    return f": {_trajectories(facts.in_a_turn)} ask for turns" if facts.in_a_turn else ""


def _trajectories(count: int) -> str:
    return "1 trajectory" if count == 1 else f"{count} trajectories"


def _count(executors: Sequence[ExecutorFacts]) -> str:
    return f"{_who(executors)} wait{'s' if len(executors) == 1 else ''}"


def _who(executors: Sequence[ExecutorFacts]) -> str:
    if len(executors) > NAMED:
        return f"{len(executors)} executors"
    names = [each.worker for each in executors]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
