"""The counterparts of an environment worker on a real broker: executors whose turns follow a script, and outcomes.

Keeps true: the sampled tokens depend only on trajectory and turn, so two runs can be compared token by token. The
script solves the calculator's sums, correctly or not, in a varying number of turns, and includes events of real
executors: preempted attempts before the result, a turn truncated by its length, and a second result with other tokens.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import OFFSET_BEGINNING

from rose.pipeline.local.fork_server import ForkedProcess
from rose.schemas.arrays import pack_logprobs, pack_tokens, unpack_tokens
from rose.schemas.prompts import Prompt
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Sample
from rose.schemas.turns import TurnOutcome, TurnRequest, TurnResult, assemble_context
from rose.topics.admin import create_topics
from rose.topics.catalog import COMPLETED, PROMPTS, REQUESTED, SAMPLES, Partitions, home_partition
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.support.roles import role_process, stop
from tests.support.settling import settle

WAIT_SECONDS = 120.0
"""A run of a few hundred turns that takes longer has stalled."""

CHARACTERS = "".join(chr(code) for code in range(32, 127))
PAD, ACT, END = range(3)
FIRST_CHARACTER = 3


def model_folder(folder: Path) -> Path:
    """Return a folder with a character tokenizer and the files of a turn format."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    words = ["<pad>", "<act>", "<end>"]
    vocabulary = {token: index for index, token in enumerate([*words, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "turn_format.json").write_text(json.dumps({"suffix": "<act>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


@contextmanager
def worker_process(
    settings: BusSettings, number: int, config: Mapping[str, Any], log: Path | None = None
) -> Iterator[ForkedProcess]:
    """Run an environment worker in its own process. A worker that still runs at the end is stopped."""
    own = {f"environment.{name}": value for name, value in config.items() if name != "model_folder"}
    settings_values = {
        "model.folder": config["model_folder"],
        "trainer.groups_per_step": 1,
        "trainer.max_staleness": 9,
        **own,
    }
    with role_process("environment", settings, number, settings_values, log=log) as worker:
        yield worker
        stop(worker)


class ScriptedExecutors:
    """Reads requests and samples, and writes results and outcomes. The test pumps it in its own thread."""

    def __init__(
        self,
        settings: BusSettings,
        partitions: Partitions,
        *,
        results: Callable[[TurnRequest, bytes], list[TurnResult]] | None = None,
    ) -> None:
        """`results` is the script: the results of a request and its context. The default is `results_of`."""
        create_topics(settings, partitions)
        self.settings = settings
        self._homes = partitions.home
        self._results = results or results_of
        self._writer = Writer(settings, "scripted-executors")
        self._reader = Reader(settings, "scripted-executors", group="scripted")
        homes = {(REQUESTED, home): OFFSET_BEGINNING for home in range(partitions.home)}
        samples = {(SAMPLES, part): OFFSET_BEGINNING for part in range(partitions.samples)}
        self._reader.assign({**homes, **samples})
        self.requests: dict[tuple[str, int], TurnRequest] = {}
        self._links: dict[int, dict[int, TurnRequest]] = defaultdict(dict)
        """Requests by home and offset."""
        self.requested = 0
        """Number of read requests, duplicates included."""
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.withdrawn: set[tuple[str, int]] = set()
        """Turns whose requests were withdrawn."""
        self.holds: set[str] = set()
        """Trajectories that were put on hold."""
        self.settled = 0
        """Number of samples that were settled; every `step_samples` of them are a step."""
        self.step_samples = 16
        self.settles = True
        """Whether samples get their outcome."""
        self.answers: Callable[[TurnRequest], bool] = lambda _request: True
        """Selects the requests that are answered on arrival."""

    def submit(self, prompt: Prompt, *, partition: int | None = None) -> None:
        """Write a prompt to its home, or to the given partition."""
        home = home_partition(prompt.group_id, self._homes) if partition is None else partition
        self._writer.write(PROMPTS, prompt, key=prompt.group_id, partition=home)
        self._writer.flush()

    def write_result(self, result: TurnResult) -> None:
        self._writer.write(
            COMPLETED, result, key=result.trajectory_id, partition=result.home, trajectory_id=result.trajectory_id
        )

    def pump(self, seconds: float = 0.05) -> None:
        """Answer all present requests."""
        for item in self._reader.read(500, seconds):
            assert isinstance(item, Envelope)
            self._take(item)
        self._writer.flush()

    def pump_until(self, condition: Callable[[], bool], *, what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited {WAIT_SECONDS:.0f} s for {what}"
            self.pump()

    def answer(self, requests: Iterable[TurnRequest]) -> None:
        """Write the results of these requests. The next pump stores them."""
        for request in requests:
            for result in self._results(request, self.context_of(request)):
                self.write_result(result)

    def context_of(self, request: TurnRequest) -> bytes:
        """Return the context of a request, read back as an executor does."""
        return assemble_context(request, self._links[request.home])

    def settle(self, sample: Sample) -> None:
        self.settled += 1
        settle(self._writer, sample, step=1 + self.settled // self.step_samples)

    def close(self) -> None:
        self._reader.close()

    def _take(self, envelope: Envelope) -> None:
        record = envelope.record
        if isinstance(record, TurnRequest) and record.withdrawn:
            self.withdrawn.add((record.trajectory_id, record.turn))
        elif isinstance(record, TurnRequest) and record.hold:
            self.holds.add(record.trajectory_id)
        elif isinstance(record, TurnRequest):
            self.requested += 1
            self._links[envelope.partition][envelope.offset] = record
            self.requests[record.trajectory_id, record.turn] = record
            if self.answers(record):
                self.answer([record])
        elif isinstance(record, Sample):
            self.samples[record.trajectory_id].append(record)
            if self.settles:
                self.settle(record)


def results_of(request: TurnRequest, context: bytes) -> list[TurnResult]:
    """Return the results in order: perhaps a preempted attempt, the result, perhaps a second result."""
    noise = draw(request.trajectory_id, request.turn)
    results = []
    if noise % 5 == 0:
        results.append(_result(request, "", attempt=0, outcome=TurnOutcome.PREEMPTED))
    action = scripted_action(request, context)
    cut = noise % 7 == 0 and not action.startswith("=")
    results.append(_result(request, action, attempt=len(results), cut=cut))
    if noise % 3 == 0:
        results.append(_result(request, "0+0", attempt=len(results)))
    return results


def draw(trajectory_id: str, turn: int) -> int:
    """Return a number that depends only on trajectory and turn."""
    return int.from_bytes(hashlib.blake2b(f"{trajectory_id}/{turn}".encode(), digest_size=4).digest(), "little")


def scripted_action(request: TurnRequest, context: bytes) -> str:
    """Return tool calls for some turns and then the answer, which is correct in half of the trajectories."""
    noise = draw(request.trajectory_id, request.turn)
    if request.turn == 0 or noise % 3:
        return f"{noise % 90}+{noise % 7}"
    task = unpack_tokens(context)
    operands = "".join(CHARACTERS[token - FIRST_CHARACTER] for token in task[: task.index(ACT)])
    total = sum(int(sign + digit) for sign, digit in zip(operands[::2], operands[1::2], strict=True))
    return f"={total if draw(request.trajectory_id, -1) % 2 else 100}"


def _result(
    request: TurnRequest,
    text: str,
    *,
    attempt: int,
    outcome: TurnOutcome = TurnOutcome.COMPLETED,
    cut: bool = False,
) -> TurnResult:
    """Return a result. If `cut`, the turn ends at its length limit, before a stop token."""
    tokens = [FIRST_CHARACTER + CHARACTERS.index(character) for character in text]
    if outcome is TurnOutcome.COMPLETED and not cut:
        tokens.append(END)
    version = draw(request.trajectory_id, request.turn) % 7
    half = len(tokens) // 2
    spans = [VersionSpan(0, half, version), VersionSpan(half, len(tokens), version + 1)]
    return TurnResult(
        trajectory_id=request.trajectory_id,
        group_id=request.group_id,
        home=request.home,
        turn=request.turn,
        attempt=attempt,
        outcome=outcome,
        worker=f"scripted-{attempt}",
        tokens=pack_tokens(tokens),
        logprobs=pack_logprobs([-0.25 * (token % 8) for token in tokens]),
        finish_reason="length" if cut else "stop",
        spans=tuple(span for span in spans if span.end > span.start),
        context_tokens=request.context_tokens,
        device_seconds={"dedicated": 0.5, "serving": 0.25 * attempt},
    )


def essence(sample: Sample) -> Sample:
    """Return the sample without clock values, which is equal in two runs of one trajectory."""
    turns = tuple(
        msgspec.structs.replace(turn, times=type(turn.times)(), environment_seconds=0.0) for turn in sample.turns
    )
    return msgspec.structs.replace(sample, turns=turns, completed_at=0.0)
