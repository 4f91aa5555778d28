"""The work that a log has requests for: its groups, and the prompts that wait to be opened.

Keeps true: as in the ledger, a group is requested once, by its own record or by a prompt in its home partition that is
no dead letter. A refused group is not requested, and its id can be used again.
"""

from dataclasses import dataclass, field

from rose.schemas.partitioning import home_partition
from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import Prompt
from rose.topics.catalog import GROUPS, PROMPTS
from rose.topics.dead_letters import dead_lettered_places
from rose.topics.log_reader import read_whole_topics
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings


@dataclass(frozen=True, slots=True)
class RequestedWork:
    """The requested groups and prompts, by group id."""

    groups: dict[str, Group] = field(default_factory=dict)
    """Groups with a decision, including refused ones."""
    prompts: dict[str, Prompt] = field(default_factory=dict)
    """Prompts that are still on the log and not refused."""

    def knows(self, group_id: str) -> bool:
        """Return whether another prompt with this id would be refused because the id is taken."""
        group = self.groups.get(group_id)
        return group_id in self.prompts or (group is not None and group.state is not GroupState.REFUSED)

    def sizes(self) -> dict[str, int]:
        """Return the number of trajectories of each group, including refused ones."""
        prompts = {name: prompt.group_size for name, prompt in self.prompts.items()}
        return prompts | {name: group.group_size for name, group in self.groups.items()}


def read_requested(settings: BusSettings) -> RequestedWork:
    """Read the requested work from the log. Raises TopicMissing or BusError."""
    asked, waiting = RequestedWork(), dict[str, tuple[int, Prompt]]()
    reader = Reader(settings, "rose-asked")
    try:
        homes = reader.partition_count(PROMPTS)
    finally:
        reader.close()
    for envelope in read_whole_topics(settings, [PROMPTS], client_id="rose-asked"):
        prompt = envelope.record
        if isinstance(prompt, Prompt) and home_partition(prompt.group_id, homes) == envelope.partition:
            waiting[f"{envelope.partition}/{envelope.offset}"] = envelope.offset, prompt
    dead = {
        f"{partition}/{offset}" for partition, offset in dead_lettered_places(settings, PROMPTS, client_id="rose-asked")
    }
    for envelope in read_whole_topics(settings, [GROUPS], client_id="rose-asked"):
        if isinstance(envelope.record, Group):
            asked.groups[envelope.key] = envelope.record
        else:
            asked.groups.pop(envelope.key, None)
    for place, (offset, prompt) in waiting.items():
        group = asked.groups.get(prompt.group_id)
        refused = group is not None and group.state is GroupState.REFUSED and group.offset == offset
        if place not in dead and not refused:
            asked.prompts.setdefault(prompt.group_id, prompt)
    return asked
