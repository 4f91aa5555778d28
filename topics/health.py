"""How a process is: whether its loop turns over, and whether it does now what it is there for.

Keeps true
- Alive is said of the loop alone: a broker that is away, a version that does not come and a seat that another has are
  no reason to start a process again.
- A loop says when it turned over, how it is, and how long it may be silent. Silent for longer it hangs, whatever it
  said.
- Who only waits for its turn is ready: routers share the cells and any more wait, and a rollout may go on.

Example
    says "serves" at 0, for 120 s     -> alive and ready until 120
    says "recovers", not ready, at 50 -> alive and not ready until 170
    silence until 171                 -> neither
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

HUNG_SECONDS = 120.0
"""Silence of a loop that turns over many times a second: twice what its longest call to the broker may take."""

START_SECONDS = 1800.0
"""Before its first word, and of a word while its engine loads: a large one loads and compiles for minutes."""


class Word(NamedTuple):
    """A loop's newest."""

    said: str
    ready: bool
    at: float
    """Monotonic seconds."""
    lasts_seconds: float


@dataclass(frozen=True, slots=True)
class Standing:
    """How a process is, for whoever asks."""

    alive: bool
    ready: bool
    sentence: str


def standing(word: Word, now: float) -> Standing:
    """What the word means by now. Pure."""
    silent = now - word.at
    if silent > word.lasts_seconds:
        return Standing(False, False, f"its loop hangs: no word for {silent:.0f} s, the last was: {word.said}")
    return Standing(True, word.ready, word.said)


class Health:
    """Keeps the newest word: the loop's, or that it waits properly. Any thread reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._word = Word("starting", False, clock(), START_SECONDS)
        self._writing = Lock()

    def says(self, said: str, *, ready: bool = True, lasts_seconds: float = HUNG_SECONDS) -> None:
        """The loop turned over, and this is how it is."""
        with self._writing:
            self._word = Word(said, ready, self._clock(), lasts_seconds)

    def turned_over(self) -> None:
        """The loop turned over, and is as it was."""
        with self._writing:
            said, ready, _, lasts_seconds = self._word
            self._word = Word(said, ready, self._clock(), lasts_seconds)

    @property
    def standing(self) -> Standing:
        return standing(self._word, self._clock())


HEALTH = Health()
"""This process's."""
