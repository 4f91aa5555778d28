"""One home partition: its prompts in order, its trajectories and the offsets that are done. Pure.

Keeps true
- Prompts are decided in the order of the log, and the committed prompt offset is that of the first prompt that waits. A
  group opens as soon as its environments are reset, also before an earlier group; its prompt is skipped when it is read
  again.
- A group id opens once. A later prompt with the same id is refused, and a prompt of another home is forwarded there.
- Prompts of evaluations open as they come: the window of groups does not hold them back, and their offsets, which lie
  in another topic, are not committed. One that cannot be opened ends at once as a failure, and is not refused.
- The offset to commit is that of the oldest input whose consequences are not on the log.
- A group is unsettled from its opening until each of its trajectories has an outcome.
- A group that was opened with more trajectories than its prompt asks for is complete once as many as asked for have
  ended with a reward. The count is on the log with the samples that it counts.
- A group is forgotten only once it is old by the worker's clock and by the log's time, so a clock that is wrong forgets
  no group too early.

Example:
    prompts a (offset 0), b (1), a again (2)    opened in turn; the third is refused
    results at 7, 8 and 9 are read; 8 is done   low water 7
    7 is done                                   low water 9
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from rose.schemas.limits import MAX_GROUP_SIZE
from rose.schemas.progress import Group, GroupState, SettleRequest
from rose.schemas.prompts import EVALUATION_PREFIX, Prompt, is_evaluation, trajectory_id
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Sample
from rose.topics.catalog import MAX_MESSAGE_BYTES, PROMPTS, Topic, home_partition
from rose.topics.records import Envelope, InvalidMessage
from rose.workers.environments.config import members_to_open
from rose.workers.environments.prompt_decisions import DecisionKind, PromptDecision
from rose.workers.environments.trajectory import Trajectory

OLD_BATCH = 500
"""Most groups that are forgotten in one transaction."""

FORWARD_BYTES = MAX_MESSAGE_BYTES - 1024
"""Largest message that is forwarded: a larger one may exceed the limit of its topic with another batch and key."""


class OffsetTracker:
    """Tracks the offsets of one partition that were read but are not done."""

    def __init__(self, begin: int) -> None:
        self.next = begin
        """The offset after the last one that was read."""
        self._open: dict[int, None] = {}

    def on_read(self, offset: int) -> None:
        """An input with consequences was read."""
        self._open[offset] = None
        self.next = offset + 1

    def on_skipped(self, offset: int) -> None:
        """An input without consequences was read."""
        self.next = offset + 1

    def on_done(self, offset: int) -> None:
        """The consequences of the input are in the transaction that is about to be committed."""
        del self._open[offset]

    @property
    def low_water(self) -> int:
        """The offset to commit: that of the oldest input that is not done."""
        return next(iter(self._open), self.next)


class KnownGroup(NamedTuple):
    """The state of a group that a home remembers."""

    size: int
    state: GroupState
    offset: int
    """Offset of the group's prompt."""
    decided_to: int
    """The prompts before this offset have been decided."""
    changed_at: float


@dataclass(slots=True)
class OpenGroup:
    """A group of which some trajectory has no outcome."""

    prompt: Prompt
    missing_outcomes: int
    """Bit mask of the trajectories without an outcome, by index."""
    outcomes_from: int
    needed: int = 0
    """See `Group.needed`."""
    rewarded: int = 0
    """See `Group.rewarded`."""
    deferrals: int = 0
    deferred: bool = False
    seen_at: float | None = None
    """Monotonic seconds at the first look for overdue groups; None before it."""

    @property
    def is_complete(self) -> bool:
        """Whether its trajectories that have not ended are surplus."""
        return 0 < self.needed <= self.rewarded

    @property
    def members(self) -> Iterator[str]:
        """Ids of all its trajectories."""
        return (trajectory_id(self.prompt.group_id, index) for index in range(self.prompt.group_size))


class Home:
    """State of one home. All of it is derived from the log."""

    def __init__(
        self,
        partition: int,
        *,
        homes: int,
        dead_lettered: frozenset[tuple[str, int]] = frozenset(),
        members_ratio: float = 1.0,
    ) -> None:
        """`homes`: number of home partitions.

        `dead_lettered`: topic names and offsets of messages that are dead letters already. `members_ratio`: see
        TrajectoryRules.
        """
        self.partition = partition
        self.trajectories: dict[str, Trajectory] = {}
        self.groups: dict[str, KnownGroup] = {}
        self.open_groups: dict[str, OpenGroup] = {}
        self.settled: list[str] = []
        """Groups whose last outcome has come but that are not recorded as settled."""
        self.results = OffsetTracker(0)
        self.undecodable_results: list[tuple[Envelope | InvalidMessage, str]] = []
        """Messages that are no results, with reasons; not yet written as dead letters."""
        self.orphaned_trajectories: list[str] = []
        """Trajectories whose groups have settled without them; their records are to be deleted."""
        self.settle_requests: dict[str, SettleRequest] = {}
        """Settle requests that are not carried out yet, by trajectory."""
        self.decisions: deque[PromptDecision] = deque()
        """Decisions that are not on the log yet, in order."""
        self.changed_groups: set[str] = set()
        """Open groups whose counts or deferral have changed since their records were last written."""
        self.oldest_fresh = 0
        """The oldest policy version that can still be trained on, by the newest outcome of a known group; 0: any."""
        self.newest_version = -1
        """The newest policy version that sampled a token of a result that was read."""
        self.newest_step = 0
        """The newest step of the trainer, by the outcomes of known groups."""
        self.swept_fresh = 0
        """`oldest_fresh` when the trajectories were last searched for older tokens."""
        self._homes = homes
        self._members_ratio = members_ratio
        self._dead_lettered = dead_lettered
        self._waiting: deque[Envelope | InvalidMessage] = deque()
        self._evaluations: dict[str, Envelope] = {}
        """Prompts of evaluations that are not decided yet, by group."""
        self._open_evaluations: set[str] = set()
        """Groups of evaluations that are open, and some that were."""
        self._prompts_next = 0
        self._log_time = 0.0
        """Newest timestamp of the records that were read, unix seconds; brokers set them."""

    def begin(self, *, prompts_from: int, results_from: int) -> None:
        """Set the offsets from which the inputs are read."""
        self._prompts_next = prompts_from
        self.results = OffsetTracker(results_from)

    def needed(self, request_next: int) -> tuple[int, int]:
        """The first offsets of the home's requests and results that are still needed.

        `request_next`: a lower bound of the offset of its next request.
        """
        lives = self.trajectories.values()
        requests = min((trajectory.needs_from for trajectory in lives), default=request_next)
        applied = min((life.applied[0].offset for life in lives if life.applied), default=self.results.next)
        return requests, min(applied, self.results.low_water)

    @property
    def prompts_low_water(self) -> int:
        """The prompt offset to commit."""
        for decision in self.decisions:
            if decision.message.topic is PROMPTS:
                return decision.message.offset
        return self._waiting[0].offset if self._waiting else self._prompts_next

    @property
    def active_groups(self) -> int:
        """Number of open groups that are neither deferred nor of an evaluation."""
        groups = self.open_groups.items()
        return sum(not group.deferred and name not in self._open_evaluations for name, group in groups)

    @property
    def waits(self) -> bool:
        """Whether a prompt waits to be decided."""
        return bool(self._waiting)

    @property
    def training_groups(self) -> int:
        """Number of open groups that are not of an evaluation."""
        self._open_evaluations &= self.open_groups.keys()
        return len(self.open_groups) - len(self._open_evaluations)

    def on_log_time(self, timestamp_seconds: float) -> None:
        """A record with this timestamp was read, of this home or of a topic that all homes read."""
        self._log_time = max(self._log_time, timestamp_seconds)

    def on_prompt(self, message: Envelope | InvalidMessage) -> None:
        """A message of the prompt partition was read."""
        self._waiting.append(message)
        self._prompts_next = message.offset + 1

    def decide(self, *, has_room: bool, outcomes_from: int) -> PromptDecision | None:
        """Decide the message that has waited longest; None if no message waits or it cannot be decided yet.

        Without `has_room` no group is opened. A prompt waits while an earlier prompt of its group is neither open nor
        refused. `outcomes_from`: an end offset of the outcomes topic that was seen before.
        """
        if not self._waiting:
            return None
        decision = self._decision_for(self._waiting[0])
        if decision.kind is DecisionKind.OPEN:
            group_id = decision.opens.group_id
            if not has_room or any(other.prompt and other.prompt.group_id == group_id for other in self.decisions):
                return None
            self._set_open(decision.opens, outcomes_from, decision.needed)
        self.decisions.append(decision)
        self._waiting.popleft()
        return decision

    def on_evaluation(self, message: Envelope) -> None:
        """Read a prompt of an evaluation, or a tombstone that withdraws the prompt of its key."""
        group_id, prompt = message.key, message.record
        if home_partition(group_id, self._homes) != self.partition:
            return
        self._evaluations.pop(group_id, None)
        if isinstance(prompt, Prompt) and group_id not in self.groups and group_id not in self.open_groups:
            self._evaluations[group_id] = message

    def decide_evaluations(self, outcomes_from: int) -> list[PromptDecision]:
        """Open the groups of all prompts of evaluations that wait. `outcomes_from`: see `decide`."""
        opening = []
        for message in self._evaluations.values():
            assert isinstance(message.record, Prompt)
            opens = message.record
            decision = PromptDecision(message, DecisionKind.OPEN, opens, awaited=opens.group_size)
            self._set_open(opens, outcomes_from, 0)
            self.decisions.append(decision)
            opening.append(decision)
        self._evaluations.clear()
        return opening

    def _set_open(self, prompt: Prompt, outcomes_from: int, needed: int) -> OpenGroup:
        if prompt.evaluation:
            self._open_evaluations.add(prompt.group_id)
        return self.open_groups.setdefault(prompt.group_id, _all_wait(prompt, outcomes_from, needed))

    def _decision_for(self, message: Envelope | InvalidMessage) -> PromptDecision:
        if isinstance(message, InvalidMessage):
            return PromptDecision(message, DecisionKind.REFUSE, refusal=message.reason)
        prompt = message.record
        if not isinstance(prompt, Prompt):
            return PromptDecision(message, DecisionKind.REFUSE, refusal="a message without a value is no prompt")
        if prompt.evaluation or is_evaluation(prompt.group_id):
            reason = (
                f"only `rose evaluator` evaluates: leave `evaluation` out, and `{EVALUATION_PREFIX}` of the group id"
            )
            return PromptDecision(message, DecisionKind.REFUSE, prompt, refusal=reason, repeated=True)
        if (home := home_partition(prompt.group_id, self._homes)) != self.partition:
            if message.raw.size > FORWARD_BYTES:
                reason = f"it is too large to be sent on to the home of its group: produce it to partition {home}"
                return PromptDecision(message, DecisionKind.REFUSE, prompt, refusal=reason, repeated=True)
            return PromptDecision(message, DecisionKind.FORWARD, prompt, home=home)
        known = self.groups.get(prompt.group_id)
        if known is None or known.state is GroupState.REFUSED:
            members = members_to_open(prompt.group_size, self._members_ratio)
            needed = prompt.group_size if members > prompt.group_size else 0
            opens = msgspec.structs.replace(prompt, group_size=members)
            return PromptDecision(message, DecisionKind.OPEN, opens, needed=needed, awaited=members)
        if known.offset == message.offset:
            return PromptDecision(message, DecisionKind.PASS)
        reason = f"group id {prompt.group_id} was submitted before: give every group an id of its own"
        return PromptDecision(message, DecisionKind.REFUSE, prompt, refusal=reason, repeated=True)

    def refuse(self, decision: PromptDecision, reason: str) -> None:
        """Refuse a prompt that was to open a group; its group id is free again.

        All trajectories of an evaluation's group fail instead, so that the evaluator learns the reason.
        """
        if decision.opens.evaluation:
            decision.reset_results = dict.fromkeys(range(decision.opens.group_size), reason)
            return
        self.open_groups.pop(decision.opens.group_id, None)
        decision.kind, decision.refusal = DecisionKind.REFUSE, reason
        decision.prompt = msgspec.structs.replace(
            decision.opens, group_size=decision.needed or decision.opens.group_size
        )

    def take_complete(self) -> list[PromptDecision]:
        """Remove and return the decisions that can be written.

        Openings are returned once their resets are done, all others in the order of the prompts.
        """
        complete: list[PromptDecision] = []
        waits: deque[PromptDecision] = deque()
        for decision in self.decisions:
            able = decision.awaited == 0 and (decision.kind is DecisionKind.OPEN or not waits)
            (complete if able else waits).append(decision)
        self.decisions = waits
        return complete

    def dead_lettered_before(self, topic: Topic) -> int:
        """All known dead letters of the topic are before this offset."""
        return max((offset + 1 for name, offset in self._dead_lettered if name == topic.name), default=0)

    def is_dead_lettered(self, message: Envelope | InvalidMessage) -> bool:
        """Whether the message is a dead letter already."""
        return (message.topic.name, message.offset) in self._dead_lettered

    def on_group(self, group: Group) -> None:
        """Apply a group record that was read or is about to be written."""
        decided_to = group.offset + 1 if group.decided_to is None else group.decided_to
        self.groups[group.group_id] = KnownGroup(
            group.group_size, group.state, group.offset, decided_to, group.changed_at
        )
        if group.state is not GroupState.OPEN:
            self.open_groups.pop(group.group_id, None)
        elif group.prompt is not None:
            opened = self._set_open(group.prompt, group.outcomes_from, group.needed)
            opened.prompt, opened.rewarded = group.prompt, group.rewarded  # with its full sampling
            opened.deferrals, opened.deferred = group.deferrals, group.deferred
            if opened.is_complete:  # the surplus trajectories whose steps were running have not ended
                self.changed_groups.add(group.group_id)

    def on_group_tombstone(self, group_id: str) -> None:
        """Apply the tombstone of a group."""
        self.groups.pop(group_id, None)
        self.open_groups.pop(group_id, None)

    def on_sample(self, sample: Sample) -> None:
        """Count a sample that is about to be written."""
        group = self.open_groups.get(sample.group_id)
        if group is not None and group.needed and sample.reward is not None:
            group.rewarded += 1
            self.changed_groups.add(sample.group_id)

    def on_result_spans(self, spans: Iterable[VersionSpan]) -> None:
        """A result with these version spans was read."""
        self.newest_version = max([self.newest_version, *(span.version for span in spans)])

    def on_outcome(
        self, group_id: str, trajectory_id: str, offset: int, *, step: int = 0, oldest_fresh: int = 0
    ) -> None:
        """Apply the outcome of a trajectory; a repeated outcome changes nothing."""
        group = self.open_groups.get(group_id)
        # Outcomes of another home may be of another model, and those of evaluations are no trainer's.
        if group_id in self.groups and not is_evaluation(group_id):
            self.newest_step = max(step, self.newest_step)
            self.oldest_fresh = oldest_fresh or self.oldest_fresh
        index = trajectory_id[len(group_id) + 1 :]
        if group is None or offset < group.outcomes_from or not index.isdecimal() or int(index) >= MAX_GROUP_SIZE:
            return
        group.missing_outcomes &= ~(1 << int(index))
        if not group.missing_outcomes and group_id in self.groups:
            del self.open_groups[group_id]
            self.settled.append(group_id)

    def on_settle_request(self, request: SettleRequest) -> None:
        """Apply an operator's request to settle a trajectory."""
        if home_partition(request.group_id, self._homes) == self.partition:
            self.settle_requests[request.trajectory_id] = request

    def settle_requests_of(self, decision: PromptDecision) -> dict[int, str]:
        """The reasons why trajectories of the group to be opened must not start, by index.

        Whoever settles a group by hand before it opens does not know of its surplus trajectories: they end with it.
        """
        group_id, offset = decision.opens.group_id, decision.message.offset
        members = range(decision.opens.group_size)
        found = {index: self.settle_requests.get(trajectory_id(group_id, index)) for index in members}
        asked = {index: _by_hand(ask) for index, ask in found.items() if ask is not None and ask.offset == offset}
        needed = range(decision.needed or decision.opens.group_size)
        return {**dict.fromkeys(members, asked[0]), **asked} if all(index in asked for index in needed) else asked

    def take_settle_requests(self) -> Iterator[tuple[str, Trajectory | None, str]]:
        """Yields each trajectory to be settled now, with the reason; later results are not applied to it.

        A trajectory whose environment step is running is left until the step is done. None stands for a trajectory that
        is over and has no outcome: its sample waits for the trainer, or was deleted. The home cannot tell which, and a
        second sample could give the trajectory two outcomes.
        """
        for name, request in list(self.settle_requests.items()):
            group, trajectory = self.groups.get(request.group_id), self.trajectories.get(name)
            if group is None or group.offset < request.offset:
                continue  # the group is not open yet
            if group.offset == request.offset and trajectory is not None:
                if trajectory.applying:
                    continue
                trajectory.applying = True
                yield name, trajectory, _by_hand(request)
            elif group.offset == request.offset and self._lacks_outcome(request):
                yield name, None, _by_hand(request)
            del self.settle_requests[name]

    def _lacks_outcome(self, request: SettleRequest) -> bool:
        group = self.open_groups.get(request.group_id)
        return group is not None and any(
            group.missing_outcomes >> index & 1 and request.trajectory_id == trajectory_id(request.group_id, index)
            for index in range(group.prompt.group_size)
        )

    def settle_expired(self, low: int) -> list[str]:
        """Settle the open groups whose outcomes may be deleted, and return their ids.

        These are the groups without a live trajectory whose outcomes may lie before `low`, the first outcome that is
        kept.
        """
        live = {trajectory.prompt.group_id for trajectory in self.trajectories.values()}
        gone = [name for name, group in self.open_groups.items() if group.outcomes_from < low and name not in live]
        for group_id in gone:
            del self.open_groups[group_id]
        self.settled += gone
        return gone

    def take_changed(self) -> list[tuple[KnownGroup, OpenGroup]]:
        """Return the open groups whose records have changed."""
        counted = [
            (known, group)
            for group_id in sorted(self.changed_groups)
            if (group := self.open_groups.get(group_id)) and (known := self.groups.get(group_id))
        ]
        self.changed_groups.clear()
        return counted

    def overdue_groups(self, now: float, monotonic: float, deadline_seconds: float) -> list[OpenGroup]:
        """Return the open groups that were opened more than `deadline_seconds` ago.

        `now`: Unix seconds by the worker's clock. The worker has seen such a group for so long by its `monotonic`
        seconds, or both its clock and the log's time say so: a clock that is wrong ends no trajectory.
        """
        overdue = []
        for group_id, group in self.open_groups.items():
            known = self.groups.get(group_id)
            if known is None:
                continue
            group.seen_at = monotonic if group.seen_at is None else group.seen_at
            old = known.changed_at + deadline_seconds < min(now, self._log_time)
            if old or group.seen_at + deadline_seconds < monotonic:
                overdue.append(group)
        return overdue

    def changed_at(self, now: float) -> float:
        """The time of a change that is written `now`, by the worker's clock: never before what the log says."""
        return max(now, self._log_time)

    def take_settled(self, now: float) -> list[Group]:
        """Remove and return the records of groups that have settled."""
        records = [
            Group(
                group_id=group_id,
                group_size=self.groups[group_id].size,
                state=GroupState.SETTLED,
                offset=self.groups[group_id].offset,
                decided_to=self.groups[group_id].decided_to,
                changed_at=self.changed_at(now),
            )
            for group_id in self.settled
        ]
        for record in records:
            self.on_group(record)
        self.settled = []
        return records

    def take_expired(self, now: float, age_seconds: float) -> list[str]:
        """Remove and return some groups that ended more than `age_seconds` ago.

        Both the worker's clock `now` and the log's time must say so. The group with the largest `decided_to` is kept,
        since it says where to read prompts if the committed offsets are gone.
        """
        last = max(((known.decided_to, known.offset) for known in self.groups.values()), default=(0, 0))
        old = [
            group_id
            for group_id, known in self.groups.items()
            if known.state is not GroupState.OPEN
            and (known.decided_to, known.offset) < last
            and known.changed_at + age_seconds < min(now, self._log_time)
            and group_id not in self.open_groups
        ][:OLD_BATCH]
        for group_id in old:
            del self.groups[group_id]
        return old


def _by_hand(request: SettleRequest) -> str:
    return f"settled by hand: {request.reason or 'no reason was given'}"


def _all_wait(prompt: Prompt, outcomes_from: int, needed: int) -> OpenGroup:
    return OpenGroup(prompt, (1 << prompt.group_size) - 1, outcomes_from, needed)
