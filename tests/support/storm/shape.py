"""Size and kind of a storm. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size and kind of a storm."""

    nodes: int
    """Nodes of the broker's cluster; 0 means a broker without faults, whose clients restart under their names."""
    lenders: int = 0
    control: int = 0
    """1 runs a control app that grants lending."""
    cells: int = 1
    ranks: int = 1
    """Ranks of each dedicated executor."""
    rounds: int = 1
    leaves: int = 0
    """Number of workers that are stopped in each round, without other faults; 0 means every kind of fault."""
    round_seconds: float = 50.0
    groups_per_second: float = 1.5
    group_size: int = 4
    members_ratio: float = 1.25
    groups_ratio: float = 1.5
    blocking_groups: int = 2

    @property
    def seconds(self) -> float:
        return self.rounds * self.round_seconds

    @property
    def moves(self) -> bool:
        """Whether executors move between cells."""
        return bool(self.control) and self.cells > 1

    @property
    def by_name(self) -> bool:
        """Whether a killed worker restarts under its name; otherwise under a new name if its role allows."""
        return self.nodes == 0


def leaving(leaves: int) -> Shape:
    """Return a shape of three nodes and a lender in which so many workers are stopped, one every six seconds."""
    return Shape(
        nodes=3, lenders=1, leaves=leaves, round_seconds=6.0 * leaves, groups_per_second=0.7, blocking_groups=0
    )
