"""What lending costs serving: latency, throughput and prefix hits of a vLLM server, alone and beside rollouts.

    python -m bench.coserve --trace AzureLLMInferenceTrace_code.csv
    python -m bench.coserve --trace mooncake_synthetic_trace.jsonl --prompt-divisor 64 --first 3200
    python -m bench.coserve --trace square:15,1,90

A slice of the trace (`--first`, `--requests`) is compressed in length (`--prompt-divisor`, `--output-divisor`) and in
time: at the pace at which serving alone is busy some 25 % of the time, found by measuring unless `--pace` gives it.
Then every arm (bench.coserving.arms) has a window of the same slice, `--repeats` times in rotated order: clients in
processes of their own stream from an unmodified vLLM server over HTTP, each request at its moment, whatever became of
those before it. A window whose clients were late is thrown away, told, and run again. Figures are medians over windows
and their range; ratios are over serving alone, and a margin that alone again has too is `unresolved`. Budgets for time
to first token and time per output token are 5 times the unloaded median unless given.
`--json FILE` writes one object with `checks` and everything else; `-` is standard output.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.check import keep, options, say
from bench.coserving.arms import ARMS, SWEEP, TRAJECTORIES, Arm, Guest
from bench.coserving.curve import draw
from bench.coserving.figures import latency, percentile
from bench.coserving.pace import first_guess, search, unloaded
from bench.coserving.report import show
from bench.coserving.results import checks, published_ratios, standings, worst
from bench.coserving.server import LENT, LONGEST_TOKENS, SERVED, VOCABULARY, Launch, Server, lending, make_model, serve
from bench.coserving.square import SQUARE, read_arrivals
from bench.coserving.windows import Budgets, Window, busy, figures, run_window
from rose.schemas.errors import RoseError
from rose.workers.loadgen.requests import StreamedCompletion
from rose.workers.loadgen.traces import TraceScaling, TraceWindow, scale_requests

TRIES = 3
"""Windows that an arm may have in a round until one counts."""

BUDGET = 5.0
"""Times the unloaded median."""

MOST_LATE = 0.01
"""Seconds that clients may be late in one of a hundred cases."""


def in_rotation(arms: Sequence[Arm], number: int) -> list[Arm]:
    """The order of a round: each begins with another arm, and every other one goes the other way round, so that what an
    arm leaves behind does not always meet the same one.
    """
    step = -1 if number % 2 else 1
    return [arms[(number + step * place) % len(arms)] for place in range(len(arms))]


def run_rounds(
    arms: Sequence[Arm], repeats: int, run: Callable[[Arm, int], Window], tell: Callable[[str], None]
) -> list[Window]:
    """Every window of a run, those thrown away with them."""
    windows = []
    for number in range(repeats):
        for arm in in_rotation(arms, number):
            for _ in range(TRIES):
                window = run(arm, number)
                windows.append(window)
                if not window.thrown:
                    break
                tell(f"round {number}, {arm.name}: thrown away, {window.thrown}")
    return windows


def budgets(answers: Sequence[StreamedCompletion], ttft: float | None, tpot: float | None) -> Budgets:
    """Those given, in milliseconds; else from the unloaded medians."""
    waits = [latency(each.due, each.moments, each.counts) for each in answers]
    unloaded_ttft = percentile([wait.ttft for wait in waits], 50)
    unloaded_tpot = percentile([wait.tpot for wait in waits if wait.tpot is not None], 50)
    return Budgets(
        ttft=BUDGET * unloaded_ttft if ttft is None else ttft / 1000,
        tpot=BUDGET * unloaded_tpot if tpot is None else tpot / 1000,
    )


def paced(
    server: Server, work: TraceWindow, answers: Sequence[StreamedCompletion], given: float | None
) -> tuple[float, TraceWindow]:
    """The pace of the run, and the slice at it. Raises RoseError."""
    alone = Arm("finding the pace")
    most_late = float("inf")  # how busy serving is depends on how many ask, not on milliseconds

    def busy_at(pace: float) -> float:
        share = busy(run_window(alone, server, work.at_pace(pace), number=0, most_late=most_late))
        say(f"at {pace:.3g} times the trace's pace serving alone is busy {share:.0%} of the time")
        return share

    pace = search(busy_at, first_guess(answers, work)) if given is None else given
    return pace, work.at_pace(pace)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole run; what --json writes. Raises RoseError."""
    known = (*ARMS, *SWEEP) if arguments.sweep else ARMS
    arms = [arm for arm in known if not arguments.arm or arm.name in arguments.arm]
    shape = TraceScaling(
        prompt_divisor=arguments.prompt_divisor,
        output_divisor=arguments.output_divisor,
        longest=LONGEST_TOKENS,
        vocabulary=VOCABULARY,
    )
    work = scale_requests(read_arrivals(arguments.trace, first=arguments.first, count=arguments.requests), shape)
    with ExitStack() as stack:
        model, lent = make_model(folder / "model", SERVED), make_model(folder / "lent", LENT)
        plain = stack.enter_context(serve(Launch(), model, folder / "server-0.log"))
        answers = unloaded(plain, work)
        promised = budgets(answers, arguments.ttft, arguments.tpot)
        pace, work = paced(plain, work, answers, arguments.pace)
        servers: dict[Launch, Server] = {Launch(): plain}
        for launch in dict.fromkeys(arm.launch for arm in arms if arm.launch != Launch()):
            name, lends = f"server-{len(servers)}", None
            if launch.lends is not None:
                socket = folder / f"{name}.sock"
                lends = lending(launch.lends, lent, socket, ttft=promised.ttft, tpot=promised.tpot)
            servers[launch] = stack.enter_context(serve(launch, model, folder / f"{name}.log", lends))

        def run(arm: Arm, number: int) -> Window:
            say(f"round {number}: {arm.name}, {work.seconds:.0f} s")
            return run_window(arm, servers[arm.launch], work, number=number, most_late=MOST_LATE)

        for launch, server in servers.items():  # a server's first window is its slowest, a guest is built at its first
            guests = Guest(TRAJECTORIES) if server.lends_at else None
            run(Arm("warming up", launch=launch, guests=guests), -1)
        windows = run_rounds(arms, arguments.repeats, run, say)
    return result(arguments, arms, windows, promised) | {
        "pace": pace,
        "window_seconds": work.seconds,
        "requests_cut_short": work.truncated,
    }


def result(
    arguments: argparse.Namespace, arms: Sequence[Arm], windows: Sequence[Window], promised: Budgets
) -> dict[str, Any]:
    """What the windows amount to."""
    found = standings(arms, windows, promised)
    return {
        "cores": os.cpu_count(),
        "asked": vars(arguments),
        "budgets_ms": {"ttft": 1000 * promised.ttft, "tpot": 1000 * promised.tpot},
        "checks": checks(arms, found),
        "arms": found,
        "peers": published_ratios() if arguments.trace.startswith(SQUARE) else {},
        "worst": worst(windows),
        "windows": [
            {
                "arm": each.arm,
                "round": each.round,
                "thrown": each.thrown,
                "server": each.server,
                **figures(each, promised),
            }
            for each in windows
        ],
    }


def number(kind: Callable[[str], float], above: float) -> Callable[[str], float]:
    """An argument that is a number above this one."""

    def parse(text: str) -> float:
        value = kind(text)
        if not above < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above {above:g}")
        return value

    parse.__name__ = kind.__name__
    return parse


def arguments_of(line: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__)
    parser.add_argument(
        "--trace", required=True, metavar="FILE", help="Azure CSV, Mooncake JSONL, or square:HIGH,LOW,SECONDS"
    )
    parser.add_argument(
        "--arm", action="append", choices=[arm.name for arm in (*ARMS, *SWEEP)], help="run this one; may be given again"
    )
    parser.add_argument("--sweep", action="store_true", help="the guest at other dials too")
    parser.add_argument("--plot", metavar="FILE", help="draw guest tokens over what they cost, as HTML")
    parser.add_argument("--repeats", type=number(int, 0), default=5, help="windows of each arm")
    parser.add_argument("--requests", type=number(int, 0), default=400, help="of a window")
    parser.add_argument("--first", type=number(int, -1), default=0, help="row of the trace that a window begins with")
    parser.add_argument(
        "--prompt-divisor", type=number(int, 0), default=16, help="the trace's prompts are divided by this"
    )
    parser.add_argument(
        "--output-divisor", type=number(int, 0), default=2, help="the trace's answers are divided by this"
    )
    parser.add_argument("--pace", type=number(float, 0), help="seconds of the trace in each second; found if not given")
    parser.add_argument("--ttft", type=number(float, 0), metavar="MS", help="budget for the time to first token")
    parser.add_argument("--tpot", type=number(float, 0), metavar="MS", help="budget for the mean time between tokens")
    return parser.parse_args(line)


def main() -> None:
    arguments = arguments_of()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and clients are stopped on the way out
    try:
        with tempfile.TemporaryDirectory(prefix="coserve-") as folder:
            measured = measure(arguments, Path(folder))
    except RoseError as error:
        sys.exit(str(error))
    told = keep(measured, arguments.json)
    if arguments.plot:
        draw(measured["arms"], Path(arguments.plot))
    if not told:
        pace, seconds = measured["pace"], measured["window_seconds"]
        print(f"{arguments.trace} at {pace:.3g} times its pace: {arguments.requests} requests in {seconds:.0f} s")
        show(measured["arms"], measured["peers"], measured["checks"], measured["worst"])


if __name__ == "__main__":
    main()
