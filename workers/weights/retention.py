"""Deletes chunks, manifests and files of the anchor store that no version needs.

Keeps true
- What a version from the run's second-newest anchor on may need is kept, so a receiver in the middle of the older chain
  can finish.
- What another run's or model's manifest names is kept until that manifest has a tombstone, however old it is.
- What is younger than the retention of weights is kept: it may belong to a version whose manifest is not written yet.
- Only what the run's own trusted manifests have given up is deleted. An untrusted manifest deletes nothing; at worst it
  keeps something until its tombstone.
- A manifest's tombstone is written after the files that it names are deleted. Compaction keeps the manifest until then,
  since its record key is its own.
- A failure to delete is logged and ends nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from confluent_kafka import KafkaException

from rose.schemas.errors import RoseError
from rose.schemas.weights import FirstChunk, WeightManifest
from rose.topics.admin import delete_before
from rose.topics.catalog import CHUNKS
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.weights.chunk_stores import AnchorStore, lowest_offsets
from rose.workers.weights.lineage import Placed
from rose.workers.weights.manifests import MANIFEST_PARTITION, read_manifests, run_keys
from rose.workers.weights.trust import Trust

ANCHORS_KEPT = 2
"""Number of anchors kept for each run: the newest and the one before it."""

QUIET_SECONDS = 7 * 24 * 3600.0
"""A run that keeps chunks from being deleted is named in a warning after this long without a manifest: it may have
ended."""

CLIENT = "rose-weights"

log = structlog.get_logger("weights")


@dataclass(frozen=True, slots=True)
class Released:
    """The chunks, files and manifests that can be deleted."""

    before: dict[int, int]
    """First offset that is needed in each partition of the chunks topic."""
    files: list[str]
    keys: list[str]
    """Record keys of manifests."""
    kept_for: list[str]
    """Quiet runs whose manifests keep more chunks than this run: model and run, as in their record keys."""


@dataclass(frozen=True, slots=True)
class RunClaim:
    """The chunks that another run's manifest needs."""

    run: str
    at: float
    first: tuple[FirstChunk, ...]


def delete_released(settings: BusSettings, trust: Trust, store: AnchorStore | None = None) -> None:
    """Delete what the run's versions have given up. A failure is logged; the next call tries again."""
    with _log_failure():
        found = what_is_released(trust, read_manifests(settings), stored=store is not None)
        for run in found.kept_for:
            log.warning("chunks_kept", run=run, reason="if this run has ended for good, end its manifests")
        before = {(CHUNKS, partition): offset for partition, offset in found.before.items()}
        with _log_failure():
            if before:
                delete_before(settings, before, client_id=CLIENT)
        with _log_failure():
            if store is not None:
                store.delete(found.files)
            _end(settings, found.keys)  # after the files, since only the manifest names them


@contextmanager
def _log_failure() -> Iterator[None]:
    """Log an exception instead of raising it."""
    try:
        yield
    except (RoseError, KafkaException, OSError) as error:
        log.warning("records_not_deleted", reason=str(error))
    except Exception:  # any other error of a client or driver: training goes on
        log.exception("records_not_deleted")


def _end(settings: BusSettings, keys: list[str]) -> None:
    if not keys:
        return
    writer = Writer(settings, CLIENT)
    for key in keys:
        writer.tombstone(MANIFEST_PARTITION[0], key=key, partition=MANIFEST_PARTITION[1])
    writer.flush()


def what_is_released(trust: Trust, envelopes: Iterable[Envelope], *, stored: bool = True) -> Released:
    """Find what can be deleted, from all messages of the manifests topic.

    `stored`: whether files of anchors can be deleted; otherwise manifests that name files are kept.
    """
    own: dict[int, Placed] = {}
    written: dict[int, str] = {}
    others: dict[str, list[RunClaim]] = {}
    ended: dict[str, int] = {}
    now = 0.0
    for envelope in envelopes:
        manifest = envelope.record
        if not isinstance(manifest, WeightManifest):
            ended[envelope.key] = envelope.offset
            others.pop(envelope.key, None)
        elif (manifest.model_id, manifest.run) != (trust.model_id, trust.run):
            claim = RunClaim(f"{manifest.model_id}/{manifest.run}", envelope.timestamp_seconds, manifest.first)
            others.setdefault(envelope.key, []).append(claim)
        elif trust.verified(envelope) is manifest:
            own[envelope.offset] = Placed(manifest, envelope.offset)
            written[envelope.offset] = envelope.key
            now = max(now, envelope.timestamp_seconds)
    needed = live_manifests(own.values())
    own_chunks = [chunk for placed in needed for chunk in placed.manifest.first]
    first = lowest_offsets(own_chunks)
    claims = [claim for found in others.values() for claim in found]
    everybodys = lowest_offsets([*own_chunks, *(chunk for claim in claims for chunk in claim.first)])
    kept = {placed.offset for placed in needed}
    dead = [placed for offset, placed in own.items() if offset not in kept]
    files = {file for placed in dead for file in placed.manifest.files}
    files -= {file for placed in needed for file in placed.manifest.files}
    stay = [*needed, *(placed for placed in dead if placed.manifest.files and not stored)]
    keys = {written[placed.offset] for placed in dead} - {written[placed.offset] for placed in stay}
    own_keys = run_keys(trust.model_id, trust.run)  # the signature does not cover the record key
    last = {key: offset for offset, key in written.items() if key.startswith(own_keys)}
    return Released(
        before={partition: everybodys[partition] for partition in first},
        files=sorted(files) if stored else [],
        keys=sorted(key for key in keys if key in last and ended.get(key, -1) < last[key]),
        kept_for=quiet_runs(claims, first, now),
    )


def quiet_runs(claims: Iterable[RunClaim], first: Mapping[int, int], now: float) -> list[str]:
    """The runs that need chunks before these offsets and have written no manifest for QUIET_SECONDS."""
    newest: dict[str, float] = {}
    needing: set[str] = set()
    for claim in claims:
        newest[claim.run] = max(claim.at, newest.get(claim.run, claim.at))
        if any(chunk.offset < first.get(chunk.partition, -1) for chunk in claim.first):
            needing.add(claim.run)
    return sorted(run for run in needing if now - newest[run] >= QUIET_SECONDS)


def live_manifests(manifests: Iterable[Placed]) -> list[Placed]:
    """The manifests of one run that may still be needed, sorted by version."""
    found = sorted(manifests, key=lambda placed: (placed.order, placed.offset))
    anchors = [number for number, placed in enumerate(found) if placed.manifest.base_version is None]
    return found[anchors[-ANCHORS_KEPT:][0] :] if anchors else found
