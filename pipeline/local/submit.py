"""Sends the prompts of a JSONL file to the prompts topic: all of them, or none.

Keeps true
- Nothing is sent before every line is checked; every bad line is reported with its number and the reason.
- A run that is started again sends no prompt that its log has already. A prompt that differs from the prompt that was
  sent with its id is refused.
- As in the ledger, a group is requested once, by its own record or by a prompt in its home partition that is no dead
  letter. A refused group is not requested, and its id can be used again.
"""

import codecs
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rose.schemas.errors import RecordError, UsageError
from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import EVALUATION_PREFIX, Prompt, is_evaluation, sampling_error
from rose.schemas.wire import encode, parse_prompt_json
from rose.topics.catalog import GROUPS, PROMPTS, home_partition
from rose.topics.dead_letters import dead_lettered_places
from rose.topics.log_reader import read_whole_topics
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.environments.config import members_to_open


@dataclass(frozen=True, slots=True)
class RequestedWork:
    """The requested groups and prompts, by group id."""

    groups: dict[str, Group] = field(default_factory=dict)
    """Groups with a decision, including refused ones."""
    prompts: dict[str, Prompt] = field(default_factory=dict)
    """Prompts that are still on the log and not refused."""

    def knows(self, group_id: str) -> bool:
        """Return whether another prompt with this id would be refused because the id is taken."""
        group = self.groups.get(group_id)
        return group_id in self.prompts or (group is not None and group.state is not GroupState.REFUSED)

    def sizes(self, members_ratio: float) -> dict[str, int]:
        """Return the number of trajectories of each group, including refused ones, without those of evaluations.

        `members_ratio`: see EnvironmentConfig.
        """
        prompts = {name: members_to_open(prompt.group_size, members_ratio) for name, prompt in self.prompts.items()}
        groups = {name: group.group_size for name, group in self.groups.items() if not is_evaluation(name)}
        return prompts | groups


def read_requested(settings: BusSettings) -> RequestedWork:
    """Read the requested work from the log. Raises TopicMissing or BusError."""
    requested, waiting = RequestedWork(), dict[str, tuple[int, Prompt]]()
    with closing(Reader(settings, "rose-asked")) as reader:
        homes = reader.partition_count(PROMPTS)
    for envelope in read_whole_topics(settings, [PROMPTS], client_id="rose-asked"):
        prompt = envelope.record
        if isinstance(prompt, Prompt) and home_partition(prompt.group_id, homes) == envelope.partition:
            waiting[f"{envelope.partition}/{envelope.offset}"] = envelope.offset, prompt
    dead = {
        f"{partition}/{offset}" for partition, offset in dead_lettered_places(settings, PROMPTS, client_id="rose-asked")
    }
    for envelope in read_whole_topics(settings, [GROUPS], client_id="rose-asked"):
        if isinstance(envelope.record, Group):
            requested.groups[envelope.key] = envelope.record
        else:
            requested.groups.pop(envelope.key, None)
    for place, (offset, prompt) in waiting.items():
        group = requested.groups.get(prompt.group_id)
        refused = group is not None and group.state is GroupState.REFUSED and group.offset == offset
        if place not in dead and not refused:
            requested.prompts.setdefault(prompt.group_id, prompt)
    return requested


SENT = "prompts.sent"
"""File in a run's folder that records the sent prompts: in each line a group id and a digest of its prompt."""

PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"BZh": ("bzip2", "bunzip2"),
    b"PK\x03\x04": ("zip", "unzip"),
}
"""First bytes of compressed files, the program that compresses them and the program that decompresses them."""

WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
"""Byte order marks of text that is not UTF-8. The missing mark, UTF-32 little-endian, begins like the first."""

BINARY = {b"PAR1": "a Parquet file", b"SQLite format 3\0": "an SQLite database", b"ARROW1": "an Arrow file"}
"""First bytes of files that are no text."""

SHOWN_GROUPS = 5
"""Number of changed prompts that an error names."""

SHOWN_LINES = 20
"""Number of bad lines that an error names; the others are counted."""


class BadPrompts(UsageError):
    """The prompt file has bad lines, or no prompts."""

    def __init__(self, path: Path, lines: int, bad: Sequence[tuple[int, str]]) -> None:
        named = [f"  line {number}: {reason}" for number, reason in bad[:SHOWN_LINES]]
        if len(bad) > SHOWN_LINES:
            named.append(f"  and {len(bad) - SHOWN_LINES} more")
        summary = f"{len(bad)} of {lines} lines are no prompts" if lines else "there is no prompt in it"
        super().__init__("\n".join([f"{path}: {summary}; nothing was sent", *named]))


def read_prompts(
    path: Path, environments: Collection[str], *, without: Path | None = None, trained: bool = True
) -> list[Prompt]:
    """Read the prompts of a JSONL file. Every prompt must be for one of the `environments`; empty lines are skipped.

    `without` is a `metrics.jsonl`, whose settled groups are left out. `trained`: whether the prompts are trained on, so
    that their sampling must be one that the loss can weigh. Raises BadPrompts or UsageError.
    """
    settled = frozenset() if without is None else settled_groups(without)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if foreign := _format_error(content):
        raise UsageError(f"{path} {foreign}; nothing was sent")
    lines = content.splitlines()
    prompts: dict[str, Prompt] = {}
    first_seen: dict[str, int] = {}
    bad: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip().removeprefix(codecs.BOM_UTF8):
            continue
        try:
            prompt = _prompt(line)
            if prompt.group_id in prompts:
                raise UsageError(f"group_id {prompt.group_id} is that of line {first_seen[prompt.group_id]}")
            if prompt.environment not in environments:
                raise UsageError(
                    f"unknown environment {prompt.environment!r}: the configuration here names "
                    f"{', '.join(environments)}; name your own in environment.environments"
                )
            if trained and (reason := sampling_error(prompt.sampling)):
                raise UsageError(reason)
            if prompt.evaluation or prompt.pinned_version is not None or is_evaluation(prompt.group_id):
                raise UsageError(
                    "only `rose evaluator` sets evaluation and pinned_version, and group ids that begin with "
                    f"{EVALUATION_PREFIX}: leave them out"
                )
        except (UsageError, RecordError) as error:
            bad.append((number, str(error)))
        else:
            prompts[prompt.group_id] = prompt
            first_seen[prompt.group_id] = number
    if bad or not prompts:
        raise BadPrompts(path, len(bad) + len(prompts), bad)
    return [prompt for name, prompt in prompts.items() if name not in settled]


def settled_groups(metrics: Path) -> frozenset[str]:
    """Return the ids of the groups that the steps of a run's `metrics.jsonl` have settled. Raises UsageError."""
    from rose.workers.trainer.metrics import decode_line

    try:
        lines = metrics.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {metrics}: {error.strerror}") from None
    settled: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            settled.update(decode_line(line).group_ids)
        except (msgspec.DecodeError, RecursionError) as error:
            cut_short = ": a step that was cut short as its run was killed: leave that line out"
            raise UsageError(
                f"{metrics} is no metrics.jsonl of a run: line {number} is no step ({error})"
                f"{cut_short if 1 < number == len(lines) else ''}"
            ) from None
    return frozenset(settled)


def count_homes(settings: BusSettings) -> int:
    """Return the number of home partitions. Raises TopicMissing or BusError."""
    with closing(Writer(settings, "rose-submit")) as writer:
        return writer.partition_count(PROMPTS)


def send_prompts(settings: BusSettings, prompts: Iterable[Prompt], *, sent: Callable[[], None] = lambda: None) -> None:
    """Write each prompt to its home partition and wait until all are stored; `sent` is called once for each prompt.

    Raises TopicMissing or BusError.
    """
    homes = count_homes(settings)
    writer = Writer(settings, "rose-submit")
    for prompt in prompts:
        home = home_partition(prompt.group_id, homes)
        writer.write(PROMPTS, prompt, key=prompt.group_id, partition=home, on_delivery=lambda *place: sent())
        writer.poll()
    writer.flush()


@dataclass(frozen=True, slots=True)
class RunWork:
    """The prompts and trajectories that a run has to do."""

    prompts: list[Prompt]
    """The prompts that are still to be sent."""
    known: int
    """Number of given prompts that the log has already."""
    trajectories: int
    """Number of trajectories of all prompts, on the log or to be sent."""


def remaining_work(
    settings: BusSettings, prompts: Sequence[Prompt], folder: Path, *, members_ratio: float = 1.0
) -> RunWork:
    """Return the prompts that the log does not have yet, and append them to the record of sent prompts in `folder`.

    `members_ratio`: see EnvironmentConfig.

    Raises UsageError if a prompt was changed after it was sent; TopicMissing or BusError.
    """
    requested, noted = read_requested(settings), _read_sent(folder / SENT)
    new = [prompt for prompt in prompts if not requested.knows(prompt.group_id)]
    known = [prompt for prompt in prompts if requested.knows(prompt.group_id)]
    changed = [prompt.group_id for prompt in known if _was_changed(prompt, requested, noted)]
    if changed:
        named = ", ".join(changed[:SHOWN_GROUPS]) + (", ..." if len(changed) > SHOWN_GROUPS else "")
        raise UsageError(
            f"{len(changed)} of {len(prompts)} prompts are not what this run was given before under their group_id "
            f"({named}): give a changed prompt a group_id of its own; nothing was sent"
        )
    with (folder / SENT).open("ab") as file:
        file.write(b"".join(msgspec.json.encode([each.group_id, _digest(each)]) + b"\n" for each in new))
    opens = {prompt.group_id: members_to_open(prompt.group_size, members_ratio) for prompt in new}
    sizes = requested.sizes(members_ratio) | opens
    return RunWork(new, len(known), sum(sizes.values()))


def _read_sent(file: Path) -> dict[str, str]:
    """Return the digest of the last prompt that was sent, by group id. A truncated line is skipped."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    noted = {}
    for line in lines:
        with suppress(msgspec.DecodeError):
            group_id, digest = msgspec.json.decode(line, type=tuple[str, str])
            noted[group_id] = digest
    return noted


def _was_changed(prompt: Prompt, requested: RequestedWork, noted: Mapping[str, str]) -> bool:
    """Return whether the prompt differs from the prompt that was sent with its id, as far as that is known."""
    group, sent = requested.groups.get(prompt.group_id), requested.prompts.get(prompt.group_id)
    if sent is not None:
        return _digest(sent) != _digest(prompt)
    if prompt.group_id in noted:
        return noted[prompt.group_id] != _digest(prompt)
    return group is not None and (group.needed or group.group_size) != prompt.group_size


def _digest(prompt: Prompt) -> str:
    """Return a digest of everything that matters to the trajectories: all but the note. Arguments have no order."""
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(prompt, note=""), order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def _format_error(content: bytes) -> str | None:
    """Return what kind of file this is and how to convert it; None if it may be JSON lines in UTF-8."""
    for magic, (name, tool) in PACKED.items():
        if content.startswith(magic):
            return f"is packed by {name}: unpack it first ({tool})"
    for magic, kind in BINARY.items():
        if content.startswith(magic):
            return f"is {kind}: write its prompts as JSON objects, one a line"
    if content.startswith(WIDE) or b"\0" in content[:4]:
        return "is text in UTF-16 or UTF-32: save it in UTF-8 (iconv -f UTF-16 -t UTF-8)"
    text = content.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"["):
        return "is a JSON array: write its prompts one a line, without commas between them (jq -c '.[]')"
    if text.partition(b"\n")[0].rstrip() == b"{":
        return "has prompts of several lines each: write its prompts one a line (jq -c .)"
    return None


def _prompt(line: bytes) -> Prompt:
    prompt = parse_prompt_json(line.strip().removeprefix(codecs.BOM_UTF8))
    encode(prompt)  # raises RecordError if the prompt is too large
    return prompt
