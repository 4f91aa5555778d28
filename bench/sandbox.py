"""Measures checkpoints and recovery of the sandbox environment.

    python -m bench.sandbox

The workload is that of an agent on a code base, drawn by seed: `--trajectories` tasks of `--turns` turns, on
`BASE_FILES` files. A share of the turns changes nothing (reads, tests), files (edits, sometimes a large file), or
leaves a process, which runs on for two to four turns. The shares are those that Crab (arXiv 2604.28138) counted for
three agents on Terminal-Bench; the turns are ours. Between two turns nothing happens for `--think` seconds, in which a
model would sample.

recovered   Share of trajectories, each killed once at a random turn (SIGKILL to the process that holds its sandbox,
            while a command runs or between two), whose remaining observations and last files are those of the
            undisturbed run after another process restored its newest state. `chat` makes the task anew and goes on with
            the next turn.
bytes       Bytes of the states that are written to the log and of the packs in the store, against a pack of all files
            after every turn.
time        Seconds of a task against the same commands in a sandbox without inspector and checkpoints, in alternation,
            with `--timed-think` seconds of the model a turn; and processor seconds a turn of worker and sandbox.
left        Sandboxes' processes, leases and checkpoints that are left at the end.
`--json FILE` stores the result.
"""

import asyncio
import multiprocessing
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.check import Check, keep, options, say
from rose.workers.environments.protocol import SnapshotError
from rose.workers.environments.sandbox.actions import Action, parse_action
from rose.workers.environments.sandbox.checkpoints import Change
from rose.workers.environments.sandbox.environment import SandboxEnvironment
from rose.workers.environments.sandbox.host import SandboxSettings, configure_sandboxes
from rose.workers.environments.sandbox.leases import folder_of_leases
from rose.workers.environments.sandbox.process import SHELL
from rose.workers.environments.sandbox.tree import encode_pack

AGENTS = {"claude-code": (0.87, 0.05, 0.08), "iflow": (0.70, 0.25, 0.05), "swe-agent": (0.75, 0.25, 0.0)}
"""Shares of turns that change nothing, files only, and processes, by agent: Crab's figures on Terminal-Bench."""

BASE_FILES, BASE_BYTES = 200, 8_000
SERVICE_TURNS = 4
"""Turns in which a process runs, on average, from the one that starts it to the one that ends it."""

LARGE_SHARE, LARGE_BYTES = 0.2, 400_000
"""Share of the turns with changed files that write a large file, and its bytes."""

LEAST_RECOVERED, MOST_BYTES, MOST_TIME = 1.0, 0.2, 1.02
WAIT_SECONDS = 60.0

SETUP = [
    'mkdir src && python3 -c "import random; r = random.Random($SEED); '
    f"[open('src/m%d.py' % i, 'w').write(''.join(r.choices('abcdefgh (){{}}\\n', k={BASE_BYTES}))) "
    f'for i in range({BASE_FILES})]"',
]
READS = [
    "ls src | wc -l",
    "grep -c abc src/m{n}.py",
    "head -c 60 src/m{n}.py",
    "cat notes 2>/dev/null; true",
    "wc -c src/*|tail -1",
]
EDITS = [
    "sed -i '1s/^/# {n}\\n/' src/m{n}.py",
    "echo {n} >> notes",
    "cp src/m{n}.py src/n{n}.py; rm -f src/n{other}.py",
]
LARGE = (
    "python3 -c \"import random; open('data{small}', 'wb').write(random.Random({n}).randbytes(" + f'{LARGE_BYTES}))"'
)
START = "(while [ ! -e stop{n} ]; do sleep 0.1; done) > /dev/null 2>&1 & echo {n} > service"
STOP = "for f in {{0..199}}; do touch stop$f; done; sleep 0.3; rm -f stop*; cat service"


def actions_of(agent: str, turns: int, seed: int) -> list[str]:
    """The actions of one trajectory."""
    draw = random.Random(f"{agent}.{seed}")
    nothing, files, processes = AGENTS[agent]
    starts = processes / SERVICE_TURNS
    nothing, files = nothing / (nothing + files + starts), files / (nothing + files + starts)
    runs_on, found = 0, []
    for _ in range(turns):
        kind = draw.random()
        if runs_on:  # a service runs for some turns
            runs_on -= 1
            command = STOP if runs_on == 0 else draw.choice(READS)
        elif kind < nothing:
            command = draw.choice(READS)
        elif kind < nothing + files:
            command = LARGE if draw.random() < LARGE_SHARE else draw.choice(EDITS)
        else:
            command, runs_on = START, draw.randint(2, 4)
        values = {"n": draw.randrange(BASE_FILES), "other": draw.randrange(BASE_FILES), "small": draw.randrange(3)}
        found.append(f"```bash\n{command.format(**values)}\n```")
    return found


@dataclass
class Played:
    """The result of one play of a trajectory."""

    observations: list[str] = field(default_factory=list)
    files: str = ""
    seconds: float = 0.0
    """Seconds of the turns, without the time of the model."""
    changes: list[str] = field(default_factory=list)
    log_bytes: int = 0
    stored_bytes: int = 0
    whole_bytes: int = 0
    """Packs of all files, after every turn."""
    waits: int = 0
    abandoned: int = 0


FILES = "```bash\nfind . /tmp -type f | sort | xargs -d '\\n' cat | sha1sum\n```"


async def play(environment: SandboxEnvironment, actions: list[str], think: float, *, weighs: bool = False) -> Played:
    """Play on to the end, on a sandbox that exists."""
    played = Played()
    for action in actions:
        began = time.perf_counter()
        step = await environment.step(action)
        await environment.snapshot()
        played.seconds += time.perf_counter() - began
        played.observations.append(step.observation)
        played.changes.append(str(step.info["changed"]))
        if weighs:
            played.whole_bytes += await asyncio.to_thread(whole_bytes, environment)
        await asyncio.sleep(think)
    played.files = (await environment.step(FILES)).observation
    figures = environment.figures
    played.log_bytes, played.stored_bytes = figures.state_bytes, figures.stored_bytes
    played.waits, played.abandoned = figures.waits, figures.abandoned
    return played


def whole_bytes(environment: SandboxEnvironment) -> int:
    """Bytes of a pack of all files."""
    assert environment.sandbox is not None
    tree = environment.sandbox.scan()
    places = {digest: (entry.path, number) for entry in tree.values() for number, digest in enumerate(entry.digests)}
    blocks = dict(zip(places, environment.sandbox.read(list(places.values())), strict=True))
    return len(encode_pack(b"", list(tree.values()), [], blocks))


async def begun(seed: int, *, saves: bool = True) -> SandboxEnvironment:
    environment = SandboxEnvironment()
    await environment.reset(seed, {"setup": [*SETUP], "disk_mib": 64})
    if saves:
        await environment.snapshot()
    return environment


async def undisturbed(agent: str, turns: int, seed: int, think: float, *, weighs: bool = False) -> Played:
    environment = await begun(seed)
    try:
        return await play(environment, actions_of(agent, turns, seed), think, weighs=weighs)
    finally:
        await environment.close()


async def plain(agent: str, turns: int, seed: int, think: float) -> None:
    """The same commands in the same sandbox, without inspector and checkpoints."""
    environment = await begun(seed, saves=False)
    assert environment.sandbox is not None
    for action in actions_of(agent, turns, seed):
        asked = parse_action(action)
        assert isinstance(asked, Action)
        await asyncio.to_thread(environment.sandbox.run, [*SHELL, asked.text])
        await asyncio.sleep(think)
    await environment.close()


def hold(store: str, line: Connection, agent: str, turns: int, seed: int, think: float) -> None:
    """Play a trajectory, and tell each state before the next turn, as a worker does to the log. Ends by SIGKILL."""
    configure_sandboxes(SandboxSettings(store=store))

    async def held() -> None:
        environment = await begun(seed)
        line.send((await environment.snapshot(), 0))
        for number, action in enumerate(actions_of(agent, turns, seed)):
            await asyncio.sleep(think)
            await environment.step(action)
            line.send((await environment.snapshot(), number + 1))

    asyncio.run(held())


async def killed(store: str, agent: str, turns: int, seed: int, think: float) -> tuple[Any, Played | None, Played]:
    """Kill the holder at a random turn; go on from its newest state, and from the task's beginning."""
    draw = random.Random(seed)
    at, delay = draw.randrange(turns), draw.random() * 2 * think
    ours, theirs = multiprocessing.Pipe(duplex=False)
    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(store, theirs, agent, turns, seed, think))
    holder.start()
    theirs.close()
    state, done = b"", -1
    while done < at:
        state, done = await asyncio.to_thread(ours.recv)
    await asyncio.sleep(delay)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    while ours.poll():
        try:
            state, done = ours.recv()
        except EOFError:
            break
    rest = actions_of(agent, turns, seed)[done:]
    environment = SandboxEnvironment()
    began = time.perf_counter()
    try:
        await environment.restore(state)
        restore_seconds = time.perf_counter() - began
        ours_after: Played | None = await play(environment, rest, 0.0)
    except SnapshotError as error:
        say(f"{agent} {seed}: killed after turn {done}: {error}")
        restore_seconds, ours_after = 0.0, None
    await environment.close()
    anew = await begun(seed)
    chat = await play(anew, rest, 0.0)
    await anew.close()
    return (done, restore_seconds), ours_after, chat


def same(played: Played | None, whole: Played) -> bool:
    """Whether a play from some turn on ended like the undisturbed one."""
    if played is None:
        return False
    expected = whole.observations[len(whole.observations) - len(played.observations) :]
    return (played.observations, played.files) == (expected, whole.files)


def measure(agent: str, trajectories: int, turns: int, think: float, store: str) -> tuple[dict[str, Any], list[Check]]:
    """Measure one agent's workload."""
    wholes, recovered, chats, restores = [], 0, 0, []
    for seed in range(trajectories):
        whole = asyncio.run(undisturbed(agent, turns, seed, think, weighs=True))
        wholes.append(whole)
        (at, seconds), ours, chat = asyncio.run(killed(store, agent, turns, seed, think))
        recovered += same(ours, whole)
        chats += same(chat, whole)
        restores.append(seconds)
        say(f"{agent} {seed}: killed after turn {at}, recovered {same(ours, whole)}, chat alone {same(chat, whole)}")
    count = sum(len(whole.changes) for whole in wholes)
    shares = {change.value: sum(w.changes.count(change.value) for w in wholes) / count for change in Change}
    written = sum(whole.log_bytes + whole.stored_bytes for whole in wholes)
    every = sum(whole.whole_bytes for whole in wholes)
    figures: dict[str, Any] = {
        "agent": agent,
        "turns": count,
        **{f"share_{name}": round(share, 3) for name, share in shares.items()},
        "recovered": recovered / trajectories,
        "recovered_chat": chats / trajectories,
        "restore_seconds_median": round(statistics.median(restores), 3),
        "log_bytes": sum(whole.log_bytes for whole in wholes),
        "stored_bytes": sum(whole.stored_bytes for whole in wholes),
        "every_turn_bytes": every,
        "commands_that_waited": sum(whole.waits for whole in wholes),
        "saves_abandoned": sum(whole.abandoned for whole in wholes),
    }
    against = f"{trajectories} trajectories of {turns} turns, one kill each; chat alone {chats / trajectories:.2f}"
    return figures, [
        Check(f"{agent}: recovered", recovered / trajectories, "", LEAST_RECOVERED, "min", against),
        Check(f"{agent}: bytes of every-turn checkpoints", written / every, "", MOST_BYTES, "max", f"{every} bytes"),
    ]


def time_of(agent: str, trajectories: int, turns: int, think: float) -> tuple[dict[str, Any], Check]:
    """Time of turns with checkpoints against turns without, in alternation."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    processor: dict[bool, float] = {True: 0.0, False: 0.0}
    for seed in range(trajectories):
        for saves in (True, False) if seed % 2 else (False, True):
            before, began = processor_seconds(), time.perf_counter()
            asyncio.run(undisturbed(agent, turns, seed, think) if saves else plain(agent, turns, seed, think))
            seconds[saves].append(time.perf_counter() - began)
            processor[saves] += processor_seconds() - before
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    figures = {
        "agent": agent,
        "time_ratio_median": round(statistics.median(ratios), 4),
        "time_ratios": [round(ratio, 4) for ratio in ratios],
        "processor_seconds_a_turn_with": round(processor[True] / trajectories / turns, 5),
        "processor_seconds_a_turn_without": round(processor[False] / trajectories / turns, 5),
    }
    against = f"{trajectories} pairs of {turns} turns, model {think:g} s a turn"
    return figures, Check(f"{agent}: time", statistics.median(ratios), "times", MOST_TIME, "max", against)


def processor_seconds() -> float:
    """Processor time of this process and of the sandboxes that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def left_behind(store: Path, seconds: float) -> dict[str, int]:
    """Count what is left of all sandboxes after the stated time."""
    from tests.support.sandbox_fixtures import sandbox_processes  # its import makes a sandbox

    until = time.monotonic() + seconds
    while True:
        found = {
            "processes": len(sandbox_processes()),
            "leases": len(list(folder_of_leases().glob("*.lease"))),
            "checkpoints": sum(path.is_file() for path in store.rglob("*")),
        }
        if not any(found.values()) or time.monotonic() > until:
            return found
        time.sleep(1.0)  # the kernel and the reaper report no end of a sandbox to this process


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--trajectories", type=int, default=20, help="tasks of each agent")
    parser.add_argument("--turns", type=int, default=30, help="turns of each task")
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=list(AGENTS), help="whose workload")
    parser.add_argument("--think", type=float, default=0.2, help="seconds in which the model samples a turn")
    parser.add_argument("--timed", type=int, default=4, help="pairs of tasks of each agent that are timed")
    parser.add_argument("--timed-think", type=float, default=3.0, help="the same as --think, in these tasks")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rose-sandbox-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    store = folder / "store"
    configure_sandboxes(SandboxSettings(store=str(store), store_seconds=30.0))
    rows, checks = [], []
    for agent in given.agents:
        figures, found = measure(agent, given.trajectories, given.turns, given.think, str(store))
        timed, check = time_of(agent, given.timed, given.turns, given.timed_think)
        rows.append({**figures, **timed})
        checks += [*found, check]
    left = left_behind(store, 120.0)
    checks.append(
        Check("left behind", sum(left.values()), "", 0, "max", ", ".join(f"{v} {k}" for k, v in left.items()))
    )
    if not keep({"cores": os.cpu_count(), "rows": rows, "checks": checks}, given.json):
        print(*checks, sep="\n")
    shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(check.met for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
