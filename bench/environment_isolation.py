"""Measures the cost of running environments in a separate process instead of a thread of the worker.

    python -m bench.environment_isolation

The worker's own runner pool steps the calculator, without a bus: `TOGETHER` trajectories at once, then one alone.
Thread and process alternate, and the medians are compared.

processor   Additional processor time of a step in a process, in microseconds, of worker and process together, with many
            steps under way.
latency     Additional time of a single step from its start to its answer, in milliseconds, at the median.
begin       Seconds until a new process has answered its first job: the delay of jobs whose process has ended.
memory      MiB of a process and its keeper; shared memory is divided by the number of its users.
`--json FILE` stores the result.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.check import Check, options, say, tell
from bench.processes import processor_seconds
from rose.workers.environments.jobs import Job, ResetJob, ResultCallback, Runner, RunnerLimits, StepJob
from rose.workers.environments.process_runner import ProcessRunner
from rose.workers.environments.registry import load_environment
from rose.workers.environments.runner_pool import RunnerPool
from rose.workers.environments.runner_server import ProcessSetup
from rose.workers.environments.thread_runner import ThreadRunner
from rose.workers.environments.transitions import StepResult
from rose.workers.environments.turn_format import TurnFormat

MODEL = Path(__file__).parents[1] / "workers" / "models" / "calculator"
NAME = "calculator"
LIMITS = RunnerLimits(max_live=256, timeout_seconds=60.0, max_context_tokens=1024)
TOGETHER, ALONE = 64, 500
WAIT_SECONDS = 60.0
PROCESSOR, LATENCY, BEGIN, MEMORY = 300.0, 2.0, 5.0, 128.0


@contextmanager
def stage(kind: str) -> Iterator[tuple[RunnerPool, list[int]]]:
    """Yield the worker's runner pool and the ids of its processes; `kind` is `thread` or `process`."""
    turn_format = TurnFormat(MODEL)
    pids: list[int] = []

    def new_runner(name: str, answer: ResultCallback, life: int) -> Runner:
        if kind == "thread":
            return ThreadRunner(turn_format, lambda own: load_environment(own)(), answer, LIMITS, generation=life)
        setup = ProcessSetup(
            environment=name, model_folder=str(MODEL), import_paths=sys.path, limits=LIMITS, generation=life
        )
        return ProcessRunner(setup, answer)

    made = RunnerPool(new_runner, LIMITS)
    try:
        answered(made, [ResetJob(generation=0, trajectory_id="0", environment=NAME, ticket=0, seed=7, arguments={})])
        if kind == "process":
            pids += [process.pid for process in psutil.Process().children(recursive=True)]
        yield made, pids
    finally:
        made.close()


def answered(on: RunnerPool, jobs: list[Job]) -> dict[str, bytes]:
    """Run these jobs and return their states."""
    on.start(jobs)
    states: dict[str, bytes] = {}
    while len(states) < len(jobs):
        for job, answer in on.results(WAIT_SECONDS):
            assert not isinstance(answer, StepResult) or not answer.done, "the task goes on"
            states[job.trajectory_id] = getattr(answer, "state", b"")
    return states


def mebibytes(pids: list[int]) -> float:
    """Return the MiB of memory that these processes hold; shared memory is divided by the number of its users."""
    return float(sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 2**20)


def steps(states: dict[str, bytes], action: bytes) -> list[Job]:
    """Return one step for each trajectory."""
    return [
        StepJob(generation=0, trajectory_id=name, environment=NAME, ticket=0, tokens=action, state=state)
        for name, state in states.items()
    ]


def measure(kind: str, rounds: int) -> tuple[float, float, float, float]:
    """Return processor microseconds per step, milliseconds of a single step, seconds to the first answer, and MiB of
    the process.
    """
    began = time.perf_counter()
    with stage(kind) as (on, pids):
        begin = time.perf_counter() - began
        names = [str(number) for number in range(TOGETHER)]
        action = b"".join(token.to_bytes(4, "little") for token in TurnFormat(MODEL).action_tokens("1+2"))
        used, count, alone = 0.0, 0, []
        for _ in range(rounds):
            jobs: list[Job] = [
                ResetJob(
                    generation=0, trajectory_id=name, environment=NAME, ticket=0, seed=7, arguments={"min_operands": 8}
                )
                for name in names
            ]
            states = answered(on, jobs)
            before = time.process_time() + sum(map(processor_seconds, pids))
            for _ in range(8):
                states = answered(on, steps(states, action))
            used += time.process_time() + sum(map(processor_seconds, pids)) - before
            count += 8 * TOGETHER
        for number in range(ALONE):
            if number % 8 == 0:
                states = answered(on, jobs[:1])
            at = time.perf_counter()
            states = answered(on, steps(states, action))
            alone.append(time.perf_counter() - at)
        return 1e6 * used / count, 1e3 * statistics.median(alone), begin, mebibytes(pids)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of steps in each measurement")
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float, float, float]]] = {"thread": [], "process": []}
    for _ in range(3):
        for kind, measures in found.items():
            measures.append(measure(kind, arguments.rounds))
            say(f"{kind}: " + ", ".join(f"{value:.2f}" for value in measures[-1]))
    thread, process = (
        [statistics.median(column) for column in zip(*measures, strict=True)] for measures in found.values()
    )
    checks = [
        Check(name, round(value, 2), unit, bound, "max", against, {"thread": round(at, 2), "process": round(there, 2)})
        for name, value, unit, bound, against, at, there in (
            ("processor", process[0] - thread[0], "us a step", PROCESSOR, "a thread", thread[0], process[0]),
            ("latency", process[1] - thread[1], "ms at the median", LATENCY, "a thread", thread[1], process[1]),
            ("begin", process[2], "s", BEGIN, "what a step may take", thread[2], process[2]),
            ("memory", process[3], "MiB", MEMORY, "a thread has none of its own", thread[3], process[3]),
        )
    ]
    tell(checks, broker="none", file=arguments.json)


if __name__ == "__main__":
    main()
