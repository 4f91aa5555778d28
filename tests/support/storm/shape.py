"""How large a storm is, and of which kind. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a storm is."""

    nodes: int
    """Of the broker's cluster; 0: a broker that is left alone, and whose clients return by name."""
    lenders: int = 0
    control: int = 0
    """1: a control app says which of them lend."""
    cells: int = 1
    rounds: int = 1
    leaves: int = 0
    """So many workers in each round are asked to leave, and nothing else is done; 0: every kind of fault is."""
    round_seconds: float = 50.0
    groups_per_second: float = 1.5
    group_size: int = 4
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
        """Who was killed returns under its name; else under a new one where its role allows."""
        return self.nodes == 0


def leaving(leaves: int) -> Shape:
    """On three nodes, with a lender: so many workers are asked to leave, one in six seconds."""
    return Shape(
        nodes=3, lenders=1, leaves=leaves, round_seconds=6.0 * leaves, groups_per_second=0.7, blocking_groups=0
    )
