"""Receiving policy versions: followed, fetched, decoded and verified on a thread of its own while the engine runs.

Keeps true
- Nothing is learned from a manifest that is not believed (`rose.workers.weights.trust`), and nothing is allocated
  before one was checked against the model's own shapes.
- What is staged is whole and verified: every slice that is wanted, its base, its chunks and its result by digest.
- Of several new versions only the newest is staged: what lies between is applied to host memory alone. Versions never
  go back, whatever is on the log; which one is tried next is `rose.workers.weights.lineage`'s to say.
- Nothing is ever raised into the engine: a refused version is counted and logged, and the old one serves on.
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
from rose.topics.fetch import RecordFetch
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
"""A gap of more chunks than this is jumped over: so much the bus client has fetched ahead already."""

CHUNKS_PER_READ = 8
"""Chunks taken from the bus client at once: under 8 MB."""


class ChunkFetch:
    """Iterate for `(ref, chunk)` of every chunk that is there, each partition in order; then see `missing`."""

    def __init__(self, reader: Reader, refs: Iterable[ChunkRef], stop: Event) -> None:
        """`reader` reports ends of partitions and is used for nothing else meanwhile."""
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
        """Of all chunks that came, wanted or passed over."""
        return self._fetch.bytes_read

    def __iter__(self) -> Iterator[tuple[ChunkRef, WeightChunk]]:
        """Ends early on `stop`. Raises BusError or FetchStalled."""
        for envelope in self._fetch:
            ref = self._refs[envelope.partition, envelope.offset]
            if isinstance(envelope.record, WeightChunk):
                yield ref, envelope.record
            else:  # a tombstone: somebody deleted it
                self.missing.append(ref)
        self.missing += [self._refs[partition, offset] for (_, partition), offset in self._fetch.missing]


LOOK_SECONDS = 0.2
"""How long one look for manifests lasts; also how soon `stop` is noticed."""

FETCH_ATTEMPTS = 3
"""How often chunks that seem to be missing are looked for: a replica may be behind."""

RETRY_SECONDS = 0.5
"""Pause after a failure of the bus or a chunk that was not there."""

REASON_CHARACTERS = 1_000
"""Of a reason that is told on."""

MANIFEST_BATCH = 16
"""Manifests taken from librdkafka at once."""

SMALL_FETCHES = {"fetch.max.bytes": str(4 * 2**20), "queued.max.messages.kbytes": str(8 * 2**10)}
"""An answer hands out nothing before it is whole: over a slow link one of many megabytes looks like a broker that is
gone. And a shard that wants a part of the chunks should not have all of them fetched ahead."""

REFUSAL_OF = {
    UntrustedReason.UNSIGNED: Refusal.UNSIGNED,
    UntrustedReason.FORGED: Refusal.FORGED,
    UntrustedReason.STRANGER: Refusal.STRANGER,
}
"""What becomes of manifests that are not believed."""

UNTRUSTED_SENTENCES = {
    Refusal.UNSIGNED: "versions are signed by nobody, and weights.trusted_key is set: set the trainer's signing_key",
    Refusal.FORGED: "versions are signed by another key than weights.trusted_key, or were changed since",
    Refusal.STRANGER: "versions are of another run or namespace than {run}: set run.name to that of the trainer",
}

RECEIVING = CollectorRegistry()
"""What a receiver exports, as long as there is one."""

RECEIVED_BYTES = Counter(
    "rose_weights_received_bytes_total", "Bytes that were read for staged versions.", registry=RECEIVING
)
RECEIVE_SECONDS = Histogram(
    "rose_weights_receive_seconds",
    "Fetching, decoding and verifying one version.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
    registry=RECEIVING,
)
REFUSED = Counter(
    "rose_weights_refused_total", "Versions that were not taken, by reason.", ["reason"], registry=RECEIVING
)
RETRIES = Counter("rose_weights_retries_total", "Fetches begun anew after a failure of the bus.", registry=RECEIVING)
STAGED_VERSION = Gauge(
    "rose_weights_staged_version", "The newest version that was staged; -1 for none.", registry=RECEIVING
)
STAGED_VERSION.set(-1)
for _refusal in Refusal:
    REFUSED.labels(_refusal.value)

log = structlog.get_logger("weights")


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A verified version in host memory."""

    version: int
    tensors: dict[str, Tensor]
    """By Hugging Face name, in the element type in which it was published. Nobody writes to them any more."""
    bytes: int
    """Read for it, from the log and the store; what lay between its chunks and was passed over is among them."""
    manifest: WeightManifest
    seconds: float
    """Fetching, decoding and verifying."""


class WeightReceiver:
    """Follows the versions of one run: start it, poll `staged`, stop it."""

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
    ) -> None:
        """`trust`: whose versions are taken. `shapes`: of every tensor, as `model_folder.folder_shapes` reads them.

        `wanted`: the part of each tensor that this receiver's shard needs (`shards.shard_of`); None is everything.
        `store`: where the trainer puts large anchors. `engine_dtype`: what must hold every value exactly, if given.
        Raises UsageError where there must be a key and `trust` has none.
        """
        require_signing_key(settings, trust.key, "trusted_key")
        register(RECEIVING)
        self.refusals: dict[Refusal, int] = dict.fromkeys(Refusal, 0)
        """Versions not taken, by reason."""
        self._settings = settings
        self._trust = trust
        self._shapes = shapes
        self._shard = shard
        self._store = store
        self._engine_dtype = engine_dtype
        self._client_id = client_id
        self._changed = Condition()
        self._staged: StagedVersion | None = None
        self._current: Assembled | None = None
        self._refused_newest: tuple[int, str] | None = None
        self.newest = -1
        """The newest version on the log that is believed; -1 for none."""
        self._lineage = Lineage()
        self._counted: set[int] = set()
        """Offsets of manifests that were counted as refused."""
        self._untrusted: set[Refusal] = set()
        """What was told of manifests that are not believed; it is told once."""
        self._untrusted_to = -1
        """Offset of the last of them that was counted."""
        self._fetched_bytes = 0
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=client_id, daemon=True)

    def start(self) -> None:
        codec.warm_up()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        self._thread.join()
        unregister(RECEIVING)

    def staged(self, timeout_seconds: float = 0.0) -> StagedVersion | None:
        """The newest staged version, handed out once; None if there is none within the time."""
        with self._changed:
            self._changed.wait_for(lambda: self._staged is not None, timeout_seconds)
            staged, self._staged = self._staged, None
            return staged

    def refused(self, refusal: Refusal, timeout_seconds: float = 0.0) -> int:
        """How many versions were refused for this reason; waits for the first of them."""
        with self._changed:
            self._changed.wait_for(lambda: self.refusals[refusal] > 0, timeout_seconds)
            return self.refusals[refusal]

    @property
    def refused_newest(self) -> tuple[int, str] | None:
        """The newest version and why it is not taken; None if it is taken, or may still be.

        The version is -1 where none is believed, and something is there that is not.
        """
        with self._changed:
            return self._refused_newest

    @property
    def fetched_bytes(self) -> int:
        """Read so far, of versions that were staged and of those that were not."""
        return self._fetched_bytes

    def refuse(self, version: int, reason: str) -> None:
        """For an engine that does not take what was staged: `refused_newest` until another version is staged."""
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
                log.warning("fetching anew", model=self._trust.model_id, reason=str(error))
            except Exception:  # whatever it is, the engine goes on serving and later versions arrive
                log.exception("receiving failed", model=self._trust.model_id)
            if not self._stopping.is_set():
                RETRIES.inc()
                self._stopping.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        small = self._settings.with_defaults(SMALL_FETCHES)
        with (
            closing(Reader(self._settings, self._client_id, report_ends=True)) as manifests,
            closing(Reader(small, self._client_id, report_ends=True)) as chunks,
        ):
            self._lineage.versions.clear()  # all that may still be taken is read again
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
        """Whether a manifest is believed; then it is known from here on."""
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
        """Something is on the log that is not believed: counted, and told once. Nothing is learned from it."""
        reason = UNTRUSTED_SENTENCES[refusal].format(run=self._trust.run)
        if refusal not in self._untrusted:
            self._untrusted.add(refusal)
            log.warning("version not believed", model=self._trust.model_id, reason=refusal.value, detail=reason)
        if self._lineage.newest is None:
            self._log_refusal(-1, reason)
        self._count(refusal)

    def _count(self, refusal: Refusal) -> None:
        REFUSED.labels(refusal.value).inc()
        with self._changed:
            self.refusals[refusal] += 1
            self._changed.notify_all()

    def _catch_up(self, chunks: Reader) -> None:
        """Take the newest version that can be taken, or as much of what leads there as can be.

        What was refused is counted once nothing is left to try: by then `refused_newest` says what came of it.
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
        """Follow a path as far as it goes, and stage what that led to; what is to be counted."""
        started, fetched_before = perf_counter(), self._fetched_bytes
        assembly = Assembly(None if path[0].manifest.base_version is None else self._current, self._shard)
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
            except (
                Exception
            ) as error:  # whatever it is, it would be so again: the versions beside this one must be tried
                log.exception("a version cannot be read", version=placed.manifest.version)
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
        log.info("staged", model=self._trust.model_id, version=done.version, bytes=fetched_bytes, seconds=seconds)
        with self._changed:
            self._staged = StagedVersion(done.version, done.tensors, fetched_bytes, manifest, seconds)
            self._refused_newest = None
            self._changed.notify_all()

    def _on_refused(self, placed: Placed, why: VersionRefused) -> list[Refusal]:
        """Logged once, at the manifest which is to blame; what is to be counted."""
        if placed.offset in self._counted:
            return []
        self._counted.add(placed.offset)
        version, model = placed.manifest.version, self._trust.model_id
        log.error("version refused", version=version, model=model, reason=why.refusal.value, detail=str(why))
        return [why.refusal]

    def _fetch(
        self, manifest: WeightManifest, chunks: Reader, refs: list[ChunkRef]
    ) -> Iterable[tuple[ChunkRef, WeightChunk | bytes]]:
        """Raises VersionRefused, Stopped, BusError, StoreError or FetchStalled."""
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
