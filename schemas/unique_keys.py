"""Keys of maps that people write.

Example: `json.loads(text, object_pairs_hook=each_once)`.
"""

from collections.abc import Hashable, Iterable
from typing import Any

SHOWN_CHARACTERS = 64
"""Most characters of a key in the sentence that says that the key is there twice."""


def reject_duplicate_keys(pairs: Iterable[tuple[Hashable, Any]]) -> dict[Hashable, Any]:
    """Return the map of these pairs. Raises ValueError if two have the same key."""
    found: dict[Hashable, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key `{str(key)[:SHOWN_CHARACTERS]}` is there twice: leave one of them out")
        found[key] = value
    return found
