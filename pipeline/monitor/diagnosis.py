"""The diagnosis of a run: from facts to sentences that say why nothing happens.

Keeps true
- Silence is measured by when a record last arrived here, never by another machine's clock.
- A finding is UNWELL if an operator has to act; a role that waits for another role is normal.
- If nothing was applied for `STALLED_SECONDS`, one line says why.
- A stage is stalled from the time when it could have moved: its work was there, and a process that could do the work.
- While work is left and nothing moves, a finding is UNWELL as soon as no running work may take that long.

Pure.

Example:
    2 executors STARTING, both refusing version 0 for the same reason, 16 trajectories in a turn
        -> unwell: "2 executors refuse version 0: float32 on the wire, the engine holds bfloat16"
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from rose.pipeline.monitor.facts import CellFacts, ExecutorFacts, Facts, HomeFacts, Patience, StalledWork
from rose.schemas.heartbeats import ExecutorState
from rose.topics import health
from rose.topics.health import RESTART_LIMIT

STALLED_SECONDS = 10.0
"""A run in which no turn was applied for this long gets a sentence that says why."""

SILENT_SECONDS = 5.0
"""Silence of a role, such as a trainer or router, that is reported."""

STANDSTILL_SECONDS = 120.0
"""A run in which nothing moved for this long is UNWELL, whatever waits for what. Where running work may take
longer (`Patience`), the limit is that time."""

LEAST_FAILURES = 8
"""Least number of recent failures that is reported, if they are more than half of the recent outcomes."""

RECENT_START_SECONDS = health.RESTART_WINDOW_SECONDS
"""Only role starts within this period count."""

CLOCK_SECONDS = 5.0
"""Clock differences above this are reported; the difference includes the delivery time of the heartbeat."""

NAMED = 4
"""Up to this number of executors are named one by one; above, a sentence gives the number."""


class Severity(Enum):
    """How much a finding matters, the most severe first."""

    UNWELL = "unwell"
    """Something stands still, or does less than it could, until an operator acts."""
    WAITS = "waits"
    """A role waits for another role."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the diagnosis, as a sentence."""

    severity: Severity
    who: str
    """Subject: `roles`, `executors`, `router`, `environments`, `trainer`, `evaluator`, `prompts`, `letters`, `broker`
    or `run`."""
    sentence: str


def diagnose(facts: Facts) -> list[Finding]:
    """Return all findings, the most severe first."""
    found = [
        *_beginnings(facts),
        *_executors(facts),
        *_routers(facts),
        *_environments(facts),
        *_trainer(facts),
        *_evaluator(facts),
        *_prompts(facts),
        *_dead_letters(facts),
    ]
    found += _standstill(facts, found)
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def headline(facts: Facts, findings: Sequence[Finding], *, starting: Sequence[str] | None = None) -> str | None:
    """Return in one line why nothing moves; None if something does.

    `starting`: executors of a run that has just been started here and that have sent no heartbeat yet; None if the run
    has not just been started.
    """
    if starting:
        return f"starting: {_listed(starting)} load{'s' if len(starting) == 1 else ''} the engine"
    if starting is None and facts.applied_seconds < STALLED_SECONDS:
        return None
    moves = "nothing moves" if starting is None else "starting"
    for severity in (Severity.UNWELL, Severity.WAITS):
        sentences = [each.sentence for each in findings if each.severity is severity]
        if sentences:
            return f"{moves}: {'; '.join(sentences)}"
    if starting is not None:
        return None
    if not facts.work_left:
        return "nothing moves: no prompts left"
    return "nothing moves, and the log does not say why: see the logs of the roles"


def _standstill(facts: Facts, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a finding for a run in which nothing moves, unless `findings` has an UNWELL finding already."""
    still = facts.moved_seconds
    if not facts.work_left or still < STALLED_SECONDS or any(each.severity is Severity.UNWELL for each in findings):
        return
    waits = [each.sentence for each in findings if each.severity is Severity.WAITS]
    if not waits:
        sentence = f"the log does not say why nothing has moved for {still:.0f} s: see the logs of the roles"
        yield Finding(Severity.UNWELL, "run", sentence)
    elif still >= _longest(facts):
        sentence = f"{'; '.join(waits)}: nothing has moved for {still:.0f} s, longer than any work should take"
        yield Finding(Severity.UNWELL, "run", sentence)


def _longest(facts: Facts) -> float:
    """Return the longest time for which nothing may move while the present work proceeds normally."""
    longest = max(STANDSTILL_SECONDS, facts.patience.step_seconds)
    if facts.in_a_turn:
        return max(longest, facts.patience.turn_seconds)
    return max(longest, facts.patience.training_seconds) if facts.waiting_for_trainer else longest


def _beginnings(facts: Facts) -> Iterator[Finding]:
    for each in facts.role_starts:
        if each.times >= RESTART_LIMIT:
            why = each.reason or "its process ends and is started again, its log says why"
            sentence = (
                f"{each.role} restarts again and again, {each.times} times within {RECENT_START_SECONDS:.0f} s: {why}"
            )
            yield Finding(Severity.UNWELL, "roles", sentence)


def _executors(facts: Facts) -> Iterator[Finding]:
    there = [each for each in facts.executors if each.state is not ExecutorState.STOPPING]
    speaking = [each for each in there if not each.silent]
    if not there:
        yield Finding(Severity.UNWELL if facts.work_left else Severity.NOTE, "executors", "no executor is there")
    for each in there:
        if each.silent:
            sentence = f"{each.worker} has been silent for {each.silent_seconds:.0f} s"
            yield Finding(Severity.UNWELL, "executors", sentence)
        elif each.held and each.ended_seconds >= max(STANDSTILL_SECONDS, facts.patience.turn_seconds):
            turns = "1 turn" if each.held == 1 else f"{each.held} turns"
            sentence = f"{each.worker} runs {turns}, and none has ended for {each.ended_seconds:.0f} s"
            yield Finding(Severity.WAITS, "executors", sentence)
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
        sentence = f"{_names_of(executors)} {verb} version {refused}{serving}: {reason or 'they do not say why'}"
        yield Finding(Severity.UNWELL, "executors", sentence)


def _routers(facts: Facts) -> Iterator[Finding]:
    if facts.routers == 0 and facts.work_left:
        asks = f": {_trajectories(facts.in_a_turn)} ask for turns" if facts.in_a_turn else ""
        yield Finding(Severity.UNWELL, "router", f"no router is there{asks}")
        return
    for cell in facts.cells:
        yield from _routing(cell, f" in cell {cell.cell}")
    if not facts.cells:
        yield from _routing(facts, "")


def _routing(facts: Facts | CellFacts, where: str) -> Iterator[Finding]:
    """Yield findings on the turns that one router routes."""
    if facts.applied_seconds < SILENT_SECONDS or not facts.in_a_turn:
        return
    held = sum(each.held for each in facts.executors)
    if held:
        yield Finding(Severity.WAITS, "executors", f"{held} turns are being run{where}, none has ended")
    elif facts.in_a_turn > facts.results_waiting:
        yield from _dispatching(facts, where)


def _dispatching(facts: Facts | CellFacts, where: str) -> Iterator[Finding]:
    """Yield findings on requested turns while no executor runs any."""
    there = [each for each in facts.executors if not each.silent and each.state is not ExecutorState.STOPPING]
    ready = [each for each in there if each.ready]
    room = [each for each in ready if each.max_turns > each.held]
    asking = f"{_trajectories(facts.in_a_turn)} ask for turns{where}"
    still = min(facts.dispatched_seconds, facts.applied_seconds)
    if facts.able_seconds is not None:
        still = min(still, facts.able_seconds)
    for each in room:
        if each.unread_seconds >= STALLED_SECONDS:
            unread = f"and has taken up nothing of what its inbox got {each.unread_seconds:.0f} s ago: see its log"
            yield Finding(Severity.UNWELL, "executors", f"{asking}, {each.worker} could run them, {unread}")
            return
    if room and still >= STALLED_SECONDS:
        sentence = (
            f"{asking} and {_names_of(room)} could run them, but no turn was sent out for {still:.0f} s: "
            "does a router serve?"
        )
        yield Finding(Severity.UNWELL, "router", sentence)
    elif room:
        yield Finding(Severity.WAITS, "router", f"{asking} that no router has sent out yet")
    elif ready:
        yield Finding(Severity.WAITS, "executors", f"{asking}, and no executor has room")
    elif where and not there:
        severity = Severity.WAITS if facts.applied_seconds < STANDSTILL_SECONDS else Severity.UNWELL
        yield Finding(severity, "executors", f"{asking}, and no executor is in that cell")


def _environments(facts: Facts) -> Iterator[Finding]:
    workers, owned = facts.environment_workers, facts.homes_owned
    if facts.foreign_clients:
        sentence = (
            "the consumer group of the environment workers has members that are other programs and take homes: "
            f"{', '.join(facts.foreign_clients)}; give them another group.id"
        )
        yield Finding(Severity.UNWELL, "environments", sentence)
    if workers == 0 and facts.work_left:
        begun = [each.role for each in facts.role_starts if each.role.startswith("environment-")]
        loading = f": {', '.join(begun)} started, and may still load environments (see the log)" if begun else ""
        yield Finding(Severity.UNWELL, "environments", f"no environment worker is there{loading}")
    elif workers and owned is not None and owned < facts.homes:
        sentence = f"{facts.homes - owned} of {facts.homes} homes have no environment worker"
        yield Finding(Severity.UNWELL, "environments", sentence)
    recent = facts.failures
    if recent.failed >= LEAST_FAILURES and 2 * recent.failed > recent.settled:
        sentence = f"{recent.failed} of the last {recent.settled} trajectories failed: {recent.reason or 'no reason'}"
        yield Finding(Severity.UNWELL if facts.work_left else Severity.NOTE, "run", sentence)
    yield from _applying(facts)
    yield from _opening(facts)


def _applying(facts: Facts) -> Iterator[Finding]:
    """Yield findings on results that an environment worker could apply and does not."""
    by_home = [(each, each.results) for each in facts.home_facts if each.results is not None]
    standing = list(_standing(by_home, facts.patience))
    for who, homes, waits, severity in standing:
        still = min(each.stalled_seconds for each in waits)
        count = sum(each.count for each in waits)
        sentence = f"{_waiting(count, 'result')} for {who} ({homes}), and none was applied for {still:.0f} s"
        yield Finding(severity, "environments", sentence)
    if not standing and facts.results_waiting and facts.applied_seconds >= SILENT_SECONDS:
        sentence = (
            f"{facts.results_waiting} results wait for an environment worker, "
            f"and none was applied for {facts.applied_seconds:.0f} s"
        )
        slow = facts.applied_seconds < facts.patience.step_seconds or bool(by_home)
        yield Finding(Severity.WAITS if slow else Severity.UNWELL, "environments", sentence)


def _opening(facts: Facts) -> Iterator[Finding]:
    """Yield findings on prompts that an environment worker could open and does not."""
    by_home = [(each, each.prompts) for each in facts.home_facts if each.prompts is not None]
    standing = list(_standing(by_home, facts.patience))
    no_group = "and the window has room, but no group was opened for"
    for who, homes, waits, severity in standing:
        still = min(each.stalled_seconds for each in waits)
        waiting = _waiting(sum(each.count for each in waits), "prompt")
        sentence = f"{waiting} {no_group} {still:.0f} s: see the log of {who} ({homes})"
        yield Finding(severity, "environments", sentence)
    still = facts.applied_seconds if facts.opened_seconds is None else facts.opened_seconds
    there = still if facts.workers_seconds is None else facts.workers_seconds
    if standing or not facts.can_be_opened or min(still, there) < STALLED_SECONDS:
        return
    waiting = _waiting(facts.can_be_opened, "prompt")
    sentence = f"{waiting} {no_group} {still:.0f} s: see the logs of the environment workers"
    slow = still < facts.patience.step_seconds or bool(by_home)
    yield Finding(Severity.WAITS if slow else Severity.UNWELL, "environments", sentence)


def _standing(
    waits: Sequence[tuple[HomeFacts, StalledWork]], patience: Patience
) -> Iterator[tuple[str, str, list[StalledWork], Severity]]:
    """Yield, by worker and severity, the stalled homes: worker, homes, their waiting work, severity."""
    found: dict[tuple[str, Severity], list[tuple[int, StalledWork]]] = {}
    for home, waiting in waits:
        if waiting.stalled_seconds >= STALLED_SECONDS:
            bound = patience.step_seconds
            if home.idle_seconds < STALLED_SECONDS:  # its steps may queue behind those of its other homes
                bound = max(bound, STANDSTILL_SECONDS)
            severity = Severity.WAITS if waiting.seconds < bound else Severity.UNWELL
            found.setdefault((home.worker, severity), []).append((home.home, waiting))
    for (worker, severity), homes in found.items():
        yield worker, _homes([home for home, _ in homes]), [waiting for _, waiting in homes], severity


def _trainer(facts: Facts) -> Iterator[Finding]:
    if not facts.waiting_for_trainer or facts.in_a_turn:
        return
    silent = facts.settled_seconds >= SILENT_SECONDS
    silence = f", which has settled nothing for {facts.settled_seconds:.0f} s" if silent else ""
    full = facts.window_groups is not None and facts.open_groups >= facts.window_groups
    groups = "every group of the window waits" if full else f"all {facts.open_groups} open groups wait"
    held = (
        "; it may hold a version back until `rose evaluator` has evaluated the newest one" if _may_hold(facts) else ""
    )
    yield Finding(Severity.WAITS, "trainer", f"{groups} for the trainer{silence}{held}")


def _may_hold(facts: Facts) -> bool:
    """Whether the trainer may wait for an evaluation that does not run."""
    return facts.evaluation_due and not facts.evaluating


def _evaluator(facts: Facts) -> Iterator[Finding]:
    if facts.evaluating:
        left = f"{_trajectories(facts.evaluating)} of it have no outcome"
        yield Finding(Severity.NOTE, "evaluator", f"an evaluation is under way: {left}")


def _prompts(facts: Facts) -> Iterator[Finding]:
    if facts.held_homes:
        severity = Severity.WAITS if facts.held_seconds < STALLED_SECONDS else Severity.UNWELL
        sentence = (
            f"the prompts of {_homes(facts.held_homes)} cannot be read, because they lie behind an open transaction: "
            "its producer ends it, the broker after transaction.timeout.ms, or `kafka-transactions.sh abort`"
        )
        yield Finding(severity, "prompts", sentence)
    elif not facts.prompts_waiting:
        left = f": the last {facts.open_groups} groups are open" if facts.open_groups else ""
        yield Finding(Severity.NOTE, "prompts", f"no prompts left{left}")
    elif facts.window_groups is not None and facts.open_groups >= facts.window_groups:
        sentence = f"the window is full: {facts.open_groups} groups are open, {facts.prompts_waiting} prompts wait"
        yield Finding(Severity.NOTE, "prompts", sentence)


def _dead_letters(facts: Facts) -> Iterator[Finding]:
    if total := sum(facts.dead_letters.values()):
        where = ", ".join(f"{count} of {topic}" for topic, count in facts.dead_letters.items())
        noun = "dead letter" if total == 1 else "dead letters"
        yield Finding(Severity.NOTE, "letters", f"{total} {noun} ({where}): see `rose dlq list`")


def _waiting(count: int, what: str) -> str:
    return f"1 {what} waits" if count == 1 else f"{count} {what}s wait"


def _homes(homes: Sequence[int]) -> str:
    return f"home{'' if len(homes) == 1 else 's'} {', '.join(map(str, homes))}"


def _trajectories(count: int) -> str:
    return "1 trajectory" if count == 1 else f"{count} trajectories"


def _count(executors: Sequence[ExecutorFacts]) -> str:
    return f"{_names_of(executors)} wait{'s' if len(executors) == 1 else ''}"


def _names_of(executors: Sequence[ExecutorFacts]) -> str:
    return _listed([each.worker for each in executors])


def _listed(executors: Sequence[str]) -> str:
    if len(executors) > NAMED:
        return f"{len(executors)} executors"
    return executors[0] if len(executors) == 1 else f"{', '.join(executors[:-1])} and {executors[-1]}"
