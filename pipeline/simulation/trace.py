"""The trace of a simulation, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Keeps true
- A worker is a process of the trace. Its tracks are serving's steps, the times in which the guest computes, and as many
  tracks of turns as the worker ever held at once.
- Versions and cuts are instants of their worker. The trainer's steps are a process of their own.

Format: Chrome's JSON trace events, times in microseconds of the simulation.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from rose.pipeline.simulation.recorder import GuestRun, HeldTurn, MemoryDecision, Recorder, ServingSteps, Swap
from rose.pipeline.simulation.trainer import StepFigures

TRAINER = 1
"""Process of the trainer; those of the workers follow."""

Event = dict[str, Any]


class Track(NamedTuple):
    """A track of a worker that is not one of turns."""

    number: int
    name: str


SERVING, GUEST = Track(1, "serving"), Track(2, "guest")

TRACKS: dict[type, Track] = {ServingSteps: SERVING, GuestRun: GUEST}
"""The tracks of entries that are slices."""

FIRST_TURN_TRACK = 3


def encode_trace(recorder: Recorder, steps: Iterable[StepFigures]) -> Iterator[bytes]:
    """Yield the trace file piece by piece."""
    separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    for event in trace_events(recorder, steps):
        yield separator + msgspec.json.encode(event)
        separator = b",\n"
    yield b'\n],"otherData":' + msgspec.json.encode({"entries left out": recorder.left_out}) + b"}\n"


def trace_events(recorder: Recorder, steps: Iterable[StepFigures]) -> Iterator[Event]:
    """Yield the events of the trace: those of the trainer, then those of each worker by name."""
    yield _name("process_name", "trainer", TRAINER)
    yield from _trainer_events(steps)
    processes: dict[str, int] = {}
    named: set[tuple[int, int]] = set()
    turns: defaultdict[str, list[HeldTurn]] = defaultdict(list)
    for entry in recorder.entries:
        if entry.worker not in processes:
            processes[entry.worker] = TRAINER + 1 + len(processes)
            yield _name("process_name", entry.worker, processes[entry.worker])
        process = processes[entry.worker]
        track = TRACKS.get(type(entry))
        if track is not None and (process, track.number) not in named:
            named.add((process, track.number))
            yield _name("thread_name", track.name, process, track.number)
        if isinstance(entry, ServingSteps):
            name = "prefill" if entry.prompt_tokens else "decode"
            facts = {"steps": entry.steps, "decoding": entry.decoding, "prompt tokens": entry.prompt_tokens}
            yield _slice(name, process, SERVING.number, entry.began_at, entry.ended_at, facts)
        elif isinstance(entry, GuestRun):
            yield _slice("guest computes", process, GUEST.number, entry.began_at, entry.ended_at)
        elif isinstance(entry, Swap):
            yield _instant(f"version {entry.version}", process, entry.at)
        elif isinstance(entry, MemoryDecision) and entry.cuts:
            yield _instant("cut", process, entry.at)
        elif isinstance(entry, HeldTurn):
            turns[entry.worker].append(entry)
    for worker, process in processes.items():
        yield from _worker_tracks(process, turns[worker])


def _trainer_events(steps: Iterable[StepFigures]) -> Iterator[Event]:
    for number, step in enumerate(steps, 1):
        facts = {"tokens": step.tokens, "trained": step.trained}
        yield _slice(f"step {number}: collects", TRAINER, 1, step.began_at, step.collected_at)
        yield _slice(f"step {number}: trains and publishes", TRAINER, 1, step.collected_at, step.ended_at, facts)
        yield _instant(f"version {number}", TRAINER, step.ended_at)


def _worker_tracks(process: int, turns: list[HeldTurn]) -> Iterator[Event]:
    """Yield the names of a worker's tracks, and its turns: each on the first track that is free."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    tracks = 0
    for turn in sorted(turns, key=lambda each: (each.received_at, each.key)):
        while busy and busy[0][0] <= turn.received_at:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            track = heapq.heappop(free)
        else:
            track = FIRST_TURN_TRACK + tracks
            tracks += 1
            yield _name("thread_name", f"turns {tracks}", process, track)
        result = turn.result
        heapq.heappush(busy, (result.finished_at, track))
        facts = {
            "outcome": turn.outcome.value,
            "version": turn.version,
            "context tokens": result.request.context_tokens,
            "cached tokens": result.cached_tokens,
            "sampled tokens": result.sampled_tokens,
        }
        name = "/".join(map(str, turn.key))
        yield _slice(name, process, track, turn.received_at, result.finished_at, facts)


def _slice(name: str, process: int, track: int, began_at: float, ended_at: float, facts: Event | None = None) -> Event:
    begins, ends = _microseconds(began_at), _microseconds(ended_at)
    event = {"ph": "X", "name": name, "pid": process, "tid": track, "ts": begins, "dur": ends - begins}
    return {**event, "args": facts} if facts else event


def _instant(name: str, process: int, at: float) -> Event:
    return {"ph": "i", "s": "p", "name": name, "pid": process, "tid": 0, "ts": _microseconds(at)}


def _name(kind: str, name: str, process: int, track: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
