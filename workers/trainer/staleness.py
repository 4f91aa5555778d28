"""How old a sample is, in versions of the policy. Pure."""

from collections.abc import Sequence

from rose.schemas.samples import Sample


def staleness(sample: Sample, version: int, abandoned: Sequence[tuple[int, int]] = ()) -> int:
    """Number of versions by which the policy is ahead of the sample's oldest token; 0 if no token was sampled."""
    return steps_between(sample.oldest_version, version, abandoned) if sample.spans else 0


def steps_between(since: int, version: int, abandoned: Sequence[tuple[int, int]]) -> int:
    """Number of training steps between two versions of the run.

    Abandoned versions are not counted, nor the version after each abandoned range, which is the same policy as the
    version before the range.
    """
    return max(0, version - since - sum(last - first + 2 for first, last in abandoned if since < first))


def still_relevant(
    abandoned: Sequence[tuple[int, int]], version: int, *, max_staleness: int
) -> tuple[tuple[int, int], ...]:
    """The abandoned ranges that can still affect a sample; a sample from before any other range is stale anyway."""
    return tuple(one for one in abandoned if steps_between(one[1] + 1, version, abandoned) <= max_staleness)
