"""A core in a process of its own: it hears a recorded history, a part at a time, and says what each part took.

Run by its path, with the code of any commit first on the path: `PYTHONPATH=TREE python -P bench/replay.py WORKERS
TRAJECTORIES TURN_SECONDS DECISIONS PARTS`. It takes of that code what all of them have: `bench.history` and the router.
Each line on standard input has it hear the next part; it answers with one line of JSON.
"""

import gc
import json
import sys
import time
from itertools import pairwise

from bench.history import HEARTBEAT_SECONDS, Fleet, Recorder
from rose.pipeline.routing.router import Router

RAMP_TURNS = 2.0
"""As long as so many turns take: until all trajectories have begun, and most have had a turn."""


def main() -> None:
    workers, trajectories, decisions, parts = (int(argument) for argument in (*sys.argv[1:3], *sys.argv[4:]))
    turn_seconds = float(sys.argv[3])
    gc.disable()
    recorder = Recorder(Fleet(workers, trajectories, turn_seconds=turn_seconds))
    recorder.record(HEARTBEAT_SECONDS + RAMP_TURNS * turn_seconds)
    bounds = [len(recorder.history)]
    for _ in range(parts):
        recorder.record(decisions / trajectories * turn_seconds)
        bounds.append(len(recorder.history))
    history, router = recorder.history, Router()
    gc.freeze()  # what was recorded is not the core's, nor is the time to look through it
    gc.enable()
    for now, event in history[: bounds[0]]:
        router.on_event(event, now)
    print(flush=True)
    for begin, end in pairwise(bounds):
        sys.stdin.readline()
        part, before = history[begin:end], router.counters.dispatched
        processor = time.process_time()
        for now, event in part:
            router.on_event(event, now)
            router.tick(now)
        processor = time.process_time() - processor
        print(json.dumps([router.counters.dispatched - before, processor]), flush=True)


if __name__ == "__main__":
    main()
