"""The prefix cache of a simulated engine: how many leading tokens of each context are in its KV memory.

Keeps true
- A context is a sequence of segments. Two contexts share a segment if its name is the same. Only the last segment of
  a context belongs to one request; the segments before may be shared by several.
- A context is found in whole blocks. Segments that no request uses are evicted, the least recently used first, and of
  one segment the last blocks first, as vLLM evicts blocks.
- A segment in use is never evicted.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """A named part of a context."""

    name: str
    tokens: int


class PrefixCache:
    """Cached segments, in tokens."""

    def __init__(self, block_tokens: int) -> None:
        self.tokens = 0
        """Tokens of all cached segments, used or not."""
        self._block = block_tokens
        self._used: dict[str, list[int]] = {}
        """Segments in use: cached tokens, and the number of requests that use them."""
        self._unused: OrderedDict[str, int] = OrderedDict()
        """Cached tokens of the segments without a request, in the order of eviction."""
        self._unused_tokens = 0

    @property
    def used_tokens(self) -> int:
        """Cached tokens that cannot be evicted."""
        return self.tokens - self._unused_tokens

    def lookup(self, segments: Sequence[Segment]) -> int:
        """Return how many leading tokens of a context are cached."""
        found = 0
        for name, tokens in segments:
            used = self._used.get(name)
            cached = min(tokens, self._unused.get(name, 0) if used is None else used[0])
            found += cached
            if cached < tokens:
                break
        return found // self._block * self._block

    def tokens_in_use(self, name: str) -> int:
        """Return the cached tokens of a segment that other requests use."""
        used = self._used.get(name)
        return 0 if used is None else used[0]

    def use(self, name: str) -> None:
        """Count one more request that uses a segment."""
        used = self._used.get(name)
        if used is not None:
            used[1] += 1
            return
        tokens = self._unused.pop(name, 0)
        self._unused_tokens -= tokens
        self._used[name] = [tokens, 1]

    def release(self, name: str) -> None:
        """Count one request less that uses a segment."""
        used = self._used[name]
        used[1] -= 1
        if not used[1]:
            del self._used[name]
            self.tokens -= used[0]
            self.put(name, used[0])

    def extend(self, name: str, tokens: int) -> None:
        """Record that at least `tokens` tokens of a segment in use are computed."""
        used = self._used[name]
        if tokens > used[0]:
            self.tokens += tokens - used[0]
            used[0] = tokens

    def take(self, name: str) -> int:
        """Remove a segment without a request from the cache, and return its tokens: a request holds them from now."""
        tokens = self._unused.pop(name, 0)
        self._unused_tokens -= tokens
        self.tokens -= tokens
        return tokens

    def put(self, name: str, tokens: int) -> None:
        """Keep a segment that its request does not use any more, unless another one uses it."""
        if name in self._used:
            return
        before = self._unused.pop(name, 0)
        kept = max(before, tokens)
        if kept:
            self._unused[name] = kept
            self._unused_tokens += kept - before
            self.tokens += kept - before

    def shrink(self, most_tokens: int) -> None:
        """Evict until at most `most_tokens` tokens are cached, as far as unused segments allow."""
        while self.tokens > most_tokens and self._unused:
            name, tokens = next(iter(self._unused.items()))
            left = max(0, tokens - (self.tokens - most_tokens)) // self._block * self._block
            self.tokens -= tokens - left
            self._unused_tokens -= tokens - left
            if left:
                self._unused[name] = left
            else:
                del self._unused[name]

    def clear(self) -> None:
        """Forget all segments that no request uses."""
        self._unused.clear()
        self.tokens -= self._unused_tokens
        self._unused_tokens = 0
