"""Receives policy versions: follows, fetches, decodes and verifies them on a thread while the engine runs.

Keeps true
- Nothing is learned from a manifest that is not trusted (`trust.py`), and nothing is allocated before a manifest was
  checked against the model's shapes.
- A staged version is complete and verified: every needed slice, its base, its chunks and its result by digest.
- Of several new versions only the newest is staged; those in between are applied only in host memory. Versions never go
  back, whatever is on the log; `lineage.py` chooses the next version to try.
- No exception reaches the engine: a refused version is counted and logged, and the current version is served on.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event, Thread
from time import perf_counter

import structlog
from confluent_kafka import OFFSET_BEGINNING
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from torch import Tensor

from rose.schemas.errors import RoseError, describe_error
from rose.schemas.weights import ChunkRef, WeightChunk, WeightManifest
from rose.topics.catalog import CHUNKS
from rose.topics.log_reader import RecordFetch
from rose.topics.metrics import register, unregister
from rose.topics.reader import Reader
from rose.topics.records import EndOfPartition, Envelope
from rose.topics.settings import BusSettings
from rose.workers.weights import codec
from rose.workers.weights.assembly import Assembled, Assembly, ReceiverStopped
from rose.workers.weights.checks import Refusal, VersionRefused, check_manifest
from rose.workers.weights.chunk_stores import AnchorStore
from rose.workers.weights.layout import Box
from rose.workers.weights.lineage import Lineage, Path, Placed
from rose.workers.weights.manifests import MANIFEST_PARTITION, read_index
from rose.workers.weights.trust import Trust, UntrustedReason, require_signing_key

MAX_GAP = 8
"""A longer gap, in chunks, is skipped with a seek; the bus client has fetched a shorter one already."""

CHUNKS_PER_READ = 8
"""Most chunks taken from the bus client in one read: less than 8 MB."""


class ChunkFetch:
    """Iterate to get `(ref, chunk)` for every chunk that exists, in order within each partition; then see `missing`."""

    def __init__(self, reader: Reader, refs: Iterable[ChunkRef], stop: Event) -> None:
        """`reader` must report ends of partitions and must not be used otherwise during the iteration."""
        self.missing: list[ChunkRef] = []
        self._refs = {(ref.partition, ref.offset): ref for ref in refs}
        places: dict[int, list[int]] = defaultdict(list)
        for partition, offset in self._refs:
            places[partition].append(offset)
        offsets_by_place = {(CHUNKS, partition): offsets for partition, offsets in places.items()}
        self._fetch = RecordFetch(
            reader, offsets_by_place, jump_records=MAX_GAP, batch=CHUNKS_PER_READ, should_stop=stop.is_set
        )

    @property
    def bytes_read(self) -> int:
        """Bytes of all chunks that were read, needed or not."""
        return self._fetch.bytes_read

    def __iter__(self) -> Iterator[tuple[ChunkRef, WeightChunk]]:
        """Yields chunks; ends early on `stop`. Raises BusError or FetchStalled."""
        for envelope in self._fetch:
            ref = self._refs[envelope.partition, envelope.offset]
            if isinstance(envelope.record, WeightChunk):
                yield ref, envelope.record
            else:  # a tombstone: the chunk was deleted
                self.missing.append(ref)
        self.missing += [self._refs[partition, offset] for (_, partition), offset in self._fetch.missing]


LOOK_SECONDS = 0.2
"""Longest wait of one read for manifests; `stop` is noticed within it."""

FETCH_ATTEMPTS = 3
"""Number of tries to fetch chunks that seem to be missing: a replica may be behind."""

RETRY_SECONDS = 0.5
"""Pause after a failure of the bus or a missing chunk."""

REASON_CHARACTERS = 1_000
"""Longest reason that is reported."""

MANIFEST_BATCH = 16
"""Most manifests taken from librdkafka in one read."""

SMALL_FETCHES = {"fetch.max.bytes": str(4 * 2**20), "queued.max.messages.kbytes": str(8 * 2**10)}
"""Fetch sizes for chunks. A fetch response is used only when it is complete, so over a slow link a response of many
megabytes looks like a broker that does not answer. A sharded receiver also should not prefetch chunks that it does
not need."""

REFUSAL_OF = {
    UntrustedReason.UNSIGNED: Refusal.UNSIGNED,
    UntrustedReason.FORGED: Refusal.FORGED,
    UntrustedReason.STRANGER: Refusal.STRANGER,
}
"""The refusal for each reason of distrust."""

UNTRUSTED_SENTENCES = {
    Refusal.UNSIGNED: "versions are signed by nobody, and weights.trusted_key is set: set the trainer's signing_key",
    Refusal.FORGED: "versions are signed by another key than weights.trusted_key, or were changed since",
    Refusal.STRANGER: "versions are of another run or namespace than {run}: set run.name to that of the trainer",
}

RECEIVING = CollectorRegistry()
"""Metrics of receivers, exported while a receiver exists."""

RECEIVED_BYTES = Counter("rose_weights_received_bytes_total", "Bytes read for staged versions.", registry=RECEIVING)
RECEIVE_SECONDS = Histogram(
    "rose_weights_receive_seconds",
    "Time to fetch, decode and verify one version.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
    registry=RECEIVING,
)
REFUSED = Counter("rose_weights_refused_total", "Versions refused, by reason.", ["reason"], registry=RECEIVING)
RETRIES = Counter("rose_weights_retries_total", "Fetches repeated after a failure of the broker.", registry=RECEIVING)
STAGED_VERSION = Gauge("rose_weights_staged_version", "Newest staged version; -1 if none.", registry=RECEIVING)
STAGED_VERSION.set(-1)
for _refusal in Refusal:
    REFUSED.labels(_refusal.value)

log = structlog.get_logger("weights")


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A verified version in host memory."""

    version: int
    tensors: dict[str, Tensor]
    """Tensors by Hugging Face name, in the published element type. The receiver does not write to them any more."""
    bytes: int
    """Bytes read for the version from the log and the store, including chunks that were read but not needed."""
    manifest: WeightManifest
    seconds: float
    """Seconds of fetching, decoding and verifying."""


class WeightReceiver:
    """Follows the versions of one run. Call `start`, poll `staged`, call `stop`."""

    def __init__(
        self,
        settings: BusSettings,
        trust: Trust,
        *,
        shapes: Mapping[str, Sequence[int]],
        shard: Mapping[str, Box] | None = None,
        store: AnchorStore | None = None,
        engine_dtype: str | None = None,
        client_id: str = "rose-weights",
        threads: int | None = None,
    ) -> None:
        """`trust`: decides which versions are taken.

        `shapes`: shape of every tensor of the model, as `model_folder.folder_shapes` reads them.

        `shard`: the part of each tensor that this receiver needs (`layout.shard_of`); None means all. `store`: the
        anchor store of the trainer. `engine_dtype`: the element type that must hold every value exactly, if given.
        `threads`: threads that decode; None: half of the cores, at most 8.

        Raises UsageError if the broker authenticates clients and `trust` has no key.
        """
        require_signing_key(settings, trust.key, "trusted_key")
        register(RECEIVING)
        self.refusals: dict[Refusal, int] = dict.fromkeys(Refusal, 0)
        """Number of refused versions by reason."""
        self._settings = settings
        self._trust = trust
        self._shapes = shapes
        self._shard = shard
        self._store = store
        self._engine_dtype = engine_dtype
        self._client_id = client_id
        self._threads = threads
        self._changed = Condition()
        self._staged: StagedVersion | None = None
        self._current: Assembled | None = None
        self._refused_newest: tuple[int, str] | None = None
        self.newest = -1
        """The newest trusted version on the log; -1 for none."""
        self._lineage = Lineage()
        self._counted: set[int] = set()
        """Offsets of manifests that are counted as refused."""
        self._untrusted: set[Refusal] = set()
        """Reasons of distrust that were logged; each is logged once."""
        self._untrusted_to = -1
        """Offset of the last untrusted manifest that was counted."""
        self._fetched_bytes = 0
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=client_id, daemon=True)

    def start(self) -> None:
        """Compile the codec and start the thread."""
        codec.warm_up()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for its end."""
        self._stopping.set()
        self._thread.join()
        unregister(RECEIVING)

    def staged(self, timeout_seconds: float = 0.0) -> StagedVersion | None:
        """The newest staged version, returned once; None if there is none within the time."""
        with self._changed:
            self._changed.wait_for(lambda: self._staged is not None, timeout_seconds)
            staged, self._staged = self._staged, None
            return staged

    def refused(self, refusal: Refusal, timeout_seconds: float = 0.0) -> int:
        """Number of versions refused for this reason; waits for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self.refusals[refusal] > 0, timeout_seconds)
            return self.refusals[refusal]

    @property
    def refused_newest(self) -> tuple[int, str] | None:
        """The newest version and why it is not taken; None if it was taken or may still be taken.

        The version is -1 if no version is trusted and an untrusted one is on the log.
        """
        with self._changed:
            return self._refused_newest

    @property
    def fetched_bytes(self) -> int:
        """Bytes read so far, for staged and other versions."""
        return self._fetched_bytes

    def refuse(self, version: int, reason: str) -> None:
        """Record that the engine refused a staged version: `refused_newest` until another version is staged."""
        self._log_refusal(version, reason)

    def _log_refusal(self, version: int, reason: str) -> None:
        with self._changed:
            self._refused_newest = version, reason[:REASON_CHARACTERS]
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except ReceiverStopped:
                return
            except RoseError as error:
                log.warning("reader_restarting", model=self._trust.model_id, reason=str(error))
            except Exception:  # after any error the engine goes on serving and later versions are received
                log.exception("reader_restarting", model=self._trust.model_id)
            if not self._stopping.is_set():
                RETRIES.inc()
                self._stopping.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        small = self._settings.with_defaults(SMALL_FETCHES)
        with (
            closing(Reader(self._settings, self._client_id, report_ends=True)) as manifests,
            closing(Reader(small, self._client_id, report_ends=True)) as chunks,
        ):
            self._lineage.versions.clear()  # all manifests that may still be taken are read again
            manifests.assign({MANIFEST_PARTITION: OFFSET_BEGINNING})
            at_end = False
            while not self._stopping.is_set():
                read = manifests.read(MANIFEST_BATCH, LOOK_SECONDS)
                learned = [self._on_manifest(item) for item in read if isinstance(item, Envelope)]
                first_end = not at_end and any(isinstance(item, EndOfPartition) for item in read)
                at_end = at_end or first_end
                if first_end or (at_end and any(learned)):
                    self._catch_up(chunks)

    def _on_manifest(self, envelope: Envelope) -> bool:
        """Add a manifest to the lineage if it is trusted, and return whether it is."""
        judged = self._trust.verify(envelope)
        if isinstance(judged, WeightManifest):
            self._lineage.on_manifest(judged, envelope.offset)
            self.newest = max(self.newest, judged.version)
            return True
        if judged is not None and envelope.offset > self._untrusted_to:
            self._untrusted_to = envelope.offset
            self._on_untrusted(REFUSAL_OF[judged])
        return False

    def _on_untrusted(self, refusal: Refusal) -> None:
        """Count an untrusted manifest and log each reason once."""
        reason = UNTRUSTED_SENTENCES[refusal].format(run=self._trust.run)
        if refusal not in self._untrusted:
            self._untrusted.add(refusal)
            log.warning("version_untrusted", model=self._trust.model_id, refusal=refusal.value, reason=reason)
        if self._lineage.newest is None:
            self._log_refusal(-1, reason)
        self._count(refusal)

    def _count(self, refusal: Refusal) -> None:
        REFUSED.labels(refusal.value).inc()
        with self._changed:
            self.refusals[refusal] += 1
            self._changed.notify_all()

    def _catch_up(self, chunks: Reader) -> None:
        """Take the newest reachable version, or as much of the path to it as possible.

        Refusals are counted when nothing is left to try, so that `refused_newest` is up to date when a count changes.
        """
        refused: list[Refusal] = []
        try:
            while (path := self._lineage.next_path()) is not None:
                try:
                    refused += self._follow_path(path, chunks)
                except RoseError as error:
                    self._log_refusal(path[-1].manifest.version, str(error))
                    raise
            self._lineage.forget_useless()
            blocked = self._lineage.blocked()
            newest = self._lineage.newest
            if blocked is not None and newest is not None:
                placed, why = blocked
                self._log_refusal(newest.manifest.version, f"version {placed.manifest.version}: {why}")
                refused += self._on_refused(placed, why)
        finally:
            for refusal in refused:
                self._count(refusal)

    def _follow_path(self, path: Path, chunks: Reader) -> list[Refusal]:
        """Follow a path as far as possible and stage the last version that was applied.

        Returns the refusals to count.
        """
        started, fetched_before = perf_counter(), self._fetched_bytes
        assembly = Assembly(
            None if path[0].manifest.base_version is None else self._current, self._shard, threads=self._threads
        )
        taken: tuple[Placed, WeightManifest] | None = None
        failure: tuple[Placed, VersionRefused] | None = None
        for placed in path:
            try:
                manifest = read_index(placed.manifest, partial(self._fetch_from_log, chunks))
                check_manifest(manifest, self._shapes, engine_dtype=self._engine_dtype)
                assembly.add(manifest, partial(self._fetch, manifest, chunks))
            except VersionRefused as refused:
                failure = placed, refused
                break
            except (ReceiverStopped, RoseError):
                raise
            except Exception as error:  # the error would occur again, and other versions must be tried
                log.exception("version_unreadable", version=placed.manifest.version)
                failure = placed, VersionRefused(Refusal.UNREADABLE, describe_error(error))
                break
            taken = placed, manifest
        if taken is not None and (self._lineage.held is None or taken[0].order > self._lineage.held):
            self._stage(assembly.done, taken[1], self._fetched_bytes - fetched_before, perf_counter() - started)
            self._lineage.on_taken(taken[0])
        if failure is None:
            return []
        self._lineage.on_refused(path, *failure)
        return self._on_refused(*failure)

    def _stage(self, done: Assembled, manifest: WeightManifest, fetched_bytes: int, seconds: float) -> None:
        self._current = done
        RECEIVED_BYTES.inc(fetched_bytes)
        RECEIVE_SECONDS.observe(seconds)
        STAGED_VERSION.set(done.version)
        log.info(
            "version_staged", model=self._trust.model_id, version=done.version, bytes=fetched_bytes, seconds=seconds
        )
        with self._changed:
            self._staged = StagedVersion(done.version, done.tensors, fetched_bytes, manifest, seconds)
            self._refused_newest = None
            self._changed.notify_all()

    def _on_refused(self, placed: Placed, why: VersionRefused) -> list[Refusal]:
        """Log the refusal of a manifest once; returns the refusals to count."""
        if placed.offset in self._counted:
            return []
        self._counted.add(placed.offset)
        version, model = placed.manifest.version, self._trust.model_id
        log.error("version_refused", version=version, model=model, refusal=why.refusal.value, reason=str(why))
        return [why.refusal]

    def _fetch(
        self, manifest: WeightManifest, chunks: Reader, refs: list[ChunkRef]
    ) -> Iterable[tuple[ChunkRef, WeightChunk | bytes]]:
        """Fetch chunks from store or log.

        Raises VersionRefused, ReceiverStopped, BusError, StoreError or FetchStalled.
        """
        if manifest.files:
            return self._fetch_from_store(manifest, refs)
        return self._fetch_from_log(chunks, refs)

    def _fetch_from_store(self, manifest: WeightManifest, refs: list[ChunkRef]) -> Iterable[tuple[ChunkRef, bytes]]:
        if self._store is None:
            raise VersionRefused(Refusal.MISSING_CHUNK, "its chunks lie in an anchor store: set weights.store")
        for ref, payload in self._store.fetch(manifest.files, refs, self._stopping):
            self._fetched_bytes += len(payload)
            yield ref, payload
        if self._stopping.is_set():
            raise ReceiverStopped

    def _fetch_from_log(self, chunks: Reader, refs: list[ChunkRef]) -> Iterable[tuple[ChunkRef, WeightChunk]]:
        missing = refs
        for attempt in range(FETCH_ATTEMPTS):
            if attempt:
                self._stopping.wait(RETRY_SECONDS)
            fetch = ChunkFetch(chunks, missing, self._stopping)
            try:
                yield from fetch
            finally:
                self._fetched_bytes += fetch.bytes_read
            if self._stopping.is_set():
                raise ReceiverStopped
            missing = fetch.missing
            if not missing:
                return
        where = f"partition {missing[0].partition} offset {missing[0].offset}"
        raise VersionRefused(Refusal.MISSING_CHUNK, f"{len(missing)} chunks are not there, the first at {where}")
