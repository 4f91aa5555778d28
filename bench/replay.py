"""A router core in its own process: replays a recorded history, one part for each line on standard input.

`PYTHONPATH=TREE python -P TREE/bench/replay.py WORKERS TRAJECTORIES TURN_SECONDS DECISIONS PARTS` measures the core of
the tree TREE. The answer to each line is one line of JSON: the decisions of the part, and the processor time in
seconds. The arguments and the answers must not change: `bench.cores` also runs this program of earlier commits.
"""

import gc
import json
import sys
import time
from itertools import pairwise

from bench.history import HEARTBEAT_SECONDS, Fleet, Recorder
from rose.pipeline.routing.router import Router

RAMP_TURNS = 2.0
"""Duration of the ramp in turns: all trajectories have begun after it, and most have had a turn."""


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
    gc.freeze()  # the recorded objects and the time to scan them are not the core's
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
