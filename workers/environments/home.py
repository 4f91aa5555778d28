"""One home partition: its prompts in order, its trajectories, and how far its inputs are done. Pure.

Keeps true
- Prompts open in the order of the log, so the committed prompt offset says exactly which of them have been decided.
- A group id opens once; a later prompt of the same id is refused.
- The offset to commit is that of the oldest input whose consequences are not on the log.
- A group is unsettled from its opening until every one of its trajectories has an outcome.

Example
    prompts a (offset 0), b (1), a again (2)    open in turn; the third is refused
    results at 7, 8 and 9 are read; 8 is done   low water 7
    7 is done                                   low water 9
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.limits import GROUP_SIZE
from schemas.prompts import Prompt
from workers.environments.trajectory import Trajectory


class Unfinished:
    """Offsets of one partition that were read and are not done."""

    def __init__(self, begin: int) -> None:
        self.next = begin
        """The offset after the last one read."""
        self._open: dict[int, None] = {}

    def read(self, offset: int) -> None:
        """An input with consequences has come."""
        self._open[offset] = None
        self.next = offset + 1

    def passed(self, offset: int) -> None:
        """An input without consequences has come."""
        self.next = offset + 1

    def done(self, offset: int) -> None:
        """Its consequences are in the transaction that is about to be committed."""
        del self._open[offset]

    @property
    def low_water(self) -> int:
        """The offset to commit."""
        return next(iter(self._open), self.next)


@dataclass(frozen=True, slots=True)
class Begun:
    """A trajectory's environment was reset."""

    observation: bytes
    """Tokens, framed, packed."""
    state: bytes


@dataclass(slots=True)
class Opening:
    """A prompt whose environments are being reset, or that is refused."""

    offset: int
    prompt: Prompt
    awaited: int
    """Environments that are still being reset. At 0 it may go on the log, once those before it have."""
    refusal: str = ""
    """Why the prompt opens nothing."""
    begun: dict[int, Begun | str] = field(default_factory=dict)
    """By index in the group; a string says why the environment failed."""


class Home:
    """What a worker knows of one home. Everything in it comes from the log."""

    def __init__(self, partition: int, *, life: int, prompts_from: int, results_from: int) -> None:
        self.partition = partition
        self.life = life
        """Grows with every recovery: what was begun for an earlier life of the home is void."""
        self.trajectories: dict[str, Trajectory] = {}
        self.known: set[str] = set()
        """Ids of the groups that were opened."""
        self.unsettled: dict[str, int] = {}
        """By group: a bit for every trajectory without an outcome."""
        self.results = Unfinished(results_from)
        self.openings: deque[Opening] = deque()
        """Begun, not on the log, in order."""
        self._waiting: deque[tuple[int, Prompt]] = deque()
        self._prompts_next = prompts_from

    @property
    def prompts_low_water(self) -> int:
        """The prompt offset to commit."""
        if self.openings:
            return self.openings[0].offset
        return self._waiting[0][0] if self._waiting else self._prompts_next

    @property
    def waits(self) -> bool:
        """Whether a prompt waits to be opened."""
        return bool(self._waiting)

    @property
    def can_open(self) -> bool:
        """Whether `open_next` may be called: not while a prompt of the same group id is neither open nor refused."""
        if not self._waiting:
            return False
        group_id = self._waiting[0][1].group_id
        return all(opening.prompt.group_id != group_id for opening in self.openings)

    def submitted(self, offset: int, prompt: Prompt) -> None:
        """A prompt has come."""
        self._waiting.append((offset, prompt))
        self._prompts_next = offset + 1

    def open_next(self) -> Opening:
        """Begin with the prompt that waits longest. It is refused already if its group id is known."""
        offset, prompt = self._waiting.popleft()
        if prompt.group_id in self.known:
            reason = f"group id {prompt.group_id} was submitted before: give every group an id of its own"
            opening = Opening(offset, prompt, awaited=0, refusal=reason)
        else:
            self.opened(prompt)
            opening = Opening(offset, prompt, awaited=prompt.group_size)
        self.openings.append(opening)
        return opening

    def refuse(self, opening: Opening, reason: str) -> None:
        """The prompt opens nothing after all; its group id is free again."""
        opening.refusal = reason
        self.known.discard(opening.prompt.group_id)
        self.unsettled.pop(opening.prompt.group_id, None)

    def take_complete(self) -> Iterator[Opening]:
        """Those that may go on the log now, in order."""
        while self.openings and self.openings[0].awaited == 0:
            yield self.openings.popleft()

    def opened(self, prompt: Prompt) -> None:
        """The group counts as unsettled from now on."""
        self.known.add(prompt.group_id)
        self.unsettled[prompt.group_id] = (1 << prompt.group_size) - 1

    def settled(self, group_id: str, trajectory_id: str) -> None:
        """A trajectory has its outcome; saying it twice does no harm."""
        bits = self.unsettled.get(group_id)
        index = trajectory_id[len(group_id) + 1 :]
        if bits is None or not index.isdecimal() or int(index) >= GROUP_SIZE:
            return
        bits &= ~(1 << int(index))
        if bits:
            self.unsettled[group_id] = bits
        else:
            del self.unsettled[group_id]
