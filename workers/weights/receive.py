"""Receiving policy versions: followed, fetched, decoded and verified on a thread of its own while the engine runs.

Keeps true
- What is staged is whole and verified: every slice that is wanted, its base, its chunks and its result by digest.
- Nothing is allocated before a manifest was checked against the model's own shapes, and its signature if there is a
  key.
- Of several new versions only the newest is staged: what lies between is applied to host memory alone. Versions never
  go back, whatever is on the log.
- A joiner, and whoever cannot go on from what it has, begins at the newest anchor.
- Nothing is ever raised into the engine: a refused version is counted and logged, and the old one serves on.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event, Thread
from time import perf_counter
from typing import Any

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from prometheus_client import Counter, Gauge, Histogram
from torch import Tensor

from schemas.errors import RoseError
from schemas.weights import ChunkRef, WeightChunk, WeightManifest
from topics.reader import Reader
from topics.records import Envelope
from topics.settings import BusSettings
from workers.weights import codec
from workers.weights.anchor_store import AnchorStore
from workers.weights.assembly import Assembled, Assembly, Stopped
from workers.weights.checks import check_manifest
from workers.weights.fetch import ChunkFetch
from workers.weights.geometry import Box
from workers.weights.index import opened
from workers.weights.manifests import PLACE, Lineage, PlacedManifest, find_lineage
from workers.weights.refusals import Refusal, VersionRefused
from workers.weights.signing import check_signature

LOOK_SECONDS = 0.2
"""How long one look for manifests lasts; also how soon `stop` is noticed."""

FETCH_ATTEMPTS = 3
"""How often chunks that seem to be missing are looked for: a replica may be behind."""

RETRY_SECONDS = 0.5
"""Pause after a failure of the bus or a chunk that was not there."""

MANIFEST_BATCH = 16
"""Manifests taken from librdkafka at once."""

SMALL_FETCHES: dict[str, Any] = {"fetch.max.bytes": 4 * 2**20}
"""An answer hands out nothing before it is whole: over a slow link one of many megabytes looks like a broker that is
gone."""

RECEIVED_BYTES = Counter("rose_weights_received_bytes_total", "Payload bytes of the chunks of staged versions.")
RECEIVE_SECONDS = Histogram(
    "rose_weights_receive_seconds",
    "Fetching, decoding and verifying one version.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
REFUSED = Counter("rose_weights_refused_total", "Versions that were not taken.", ["reason"])
RETRIES = Counter("rose_weights_retries_total", "Fetches begun anew after a failure of the bus.")
STAGED_VERSION = Gauge("rose_weights_staged_version", "The newest version that was staged.")

log = structlog.get_logger("weights")


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A verified version in host memory."""

    version: int
    tensors: dict[str, Tensor]
    """By Hugging Face name, in the element type in which it was published. Nobody writes to them any more."""
    bytes: int
    """Payload bytes that were fetched for it."""
    manifest: WeightManifest
    seconds: float
    """Fetching, decoding and verifying."""


class WeightReceiver:
    """Follows the versions of one model: start it, poll `staged`, stop it."""

    def __init__(
        self,
        settings: BusSettings,
        model_id: str,
        *,
        shapes: Mapping[str, Sequence[int]],
        wanted: Mapping[str, Box] | None = None,
        store: AnchorStore | None = None,
        key: Ed25519PublicKey | None = None,
        client_id: str = "rose-weights",
    ) -> None:
        """`shapes`: of every tensor of the model, as `model_folder.folder_shapes` reads them.

        `wanted`: the part of each tensor that this receiver's shard needs (`shards.wanted_by`); None is everything.
        `store`: where the trainer puts large anchors. `key`: whose signature a version must bear; None takes unsigned
        ones too.
        """
        self.refusals: dict[Refusal, int] = dict.fromkeys(Refusal, 0)
        """Versions not taken, by reason."""
        self._settings = settings
        self._model_id = model_id
        self._shapes = shapes
        self._wanted = wanted
        self._store = store
        self._key = key
        self._client_id = client_id
        self._changed = Condition()
        self._staged: StagedVersion | None = None
        self._current: Assembled | None = None
        self._refused: set[int] = set()
        """Offsets of manifests that no path led to."""
        self._blamed: set[int] = set()
        """Offsets of manifests at which paths ended."""
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=client_id, daemon=True)

    def start(self) -> None:
        codec.warm_up()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        self._thread.join()

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

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except Stopped:
                return
            except RoseError as error:
                log.warning("fetching anew", model=self._model_id, reason=str(error))
            except Exception:  # whatever it is, the engine must go on serving and later versions must still arrive
                log.exception("receiving failed", model=self._model_id)
            if not self._stopping.is_set():
                RETRIES.inc()
                self._stopping.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        lineage, begin = find_lineage(self._settings, self._model_id)
        with (
            closing(Reader(self._settings, self._client_id, group="weights")) as manifests,
            closing(Reader(self._settings, self._client_id, group="weights", ends=True, **SMALL_FETCHES)) as chunks,
        ):
            manifests.assign({PLACE: begin})
            while not self._stopping.is_set():
                self._catch_up(lineage, chunks)
                read = manifests.read(MANIFEST_BATCH, LOOK_SECONDS)
                lineage.learn(item for item in read if isinstance(item, Envelope))

    @property
    def _version(self) -> int:
        return -1 if self._current is None else self._current.version

    def _catch_up(self, lineage: Lineage, chunks: Reader) -> None:
        """Take the newest version that can be taken."""
        newest = lineage.newest
        if newest is None or newest.manifest.version <= self._version or newest.offset in self._refused:
            return
        version = newest.manifest.version
        paths = [lineage.path(version, since=self._version)] if self._current is not None else []
        paths.append(lineage.path(version))
        failure = _Failure(newest, VersionRefused(Refusal.WRONG_BASE, "not all that it builds on is on the log"))
        for path in sorted((path for path in paths if path is not None), key=_payload_bytes):
            failed = self._take(path, chunks)
            if failed is None:
                lineage.forget_before(self._version)
                return
            failure = failed
        self._refuse(newest, failure)

    def _take(self, path: list[PlacedManifest], chunks: Reader) -> "_Failure | None":
        """Follow a path as far as it goes, and stage what that led to; None if it went to the end."""
        started = perf_counter()
        assembly = Assembly(None if path[0].manifest.base_version is None else self._current, self._wanted)
        taken: WeightManifest | None = None
        failure: _Failure | None = None
        for placed in path:
            manifest = placed.manifest
            try:
                if self._key is not None:
                    check_signature(manifest, self._key)
                manifest = opened(manifest, partial(self._fetch_from_log, chunks))
                check_manifest(manifest, self._shapes)
                assembly.add(manifest, partial(self._fetch, manifest, chunks))
            except VersionRefused as refused:
                failure = _Failure(placed, refused)
                break
            taken = manifest
        if taken is not None and taken.version > self._version:
            self._stage(assembly.done, taken, perf_counter() - started)
        return failure

    def _stage(self, done: Assembled, manifest: WeightManifest, seconds: float) -> None:
        self._current = done
        RECEIVED_BYTES.inc(done.bytes)
        RECEIVE_SECONDS.observe(seconds)
        STAGED_VERSION.set(done.version)
        log.info("staged", model=self._model_id, version=done.version, bytes=done.bytes, seconds=seconds)
        with self._changed:
            self._staged = StagedVersion(done.version, done.tensors, done.bytes, manifest, seconds)
            self._changed.notify_all()

    def _refuse(self, newest: PlacedManifest, failure: "_Failure") -> None:
        """No path leads to the newest version: not looked at again. Counted at the manifest which is to blame."""
        self._refused.add(newest.offset)
        if failure.placed.offset in self._blamed:
            return
        self._blamed.add(failure.placed.offset)
        refusal, version = failure.refused.refusal, failure.placed.manifest.version
        REFUSED.labels(refusal.value).inc()
        detail = str(failure.refused)
        log.error("version refused", version=version, model=self._model_id, reason=refusal.value, detail=detail)
        with self._changed:
            self.refusals[refusal] += 1
            self._changed.notify_all()

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
        yield from self._store.fetch(manifest.files, refs, self._stopping)
        if self._stopping.is_set():
            raise Stopped

    def _fetch_from_log(self, chunks: Reader, refs: list[ChunkRef]) -> Iterable[tuple[ChunkRef, WeightChunk]]:
        missing = refs
        for attempt in range(FETCH_ATTEMPTS):
            if attempt:
                self._stopping.wait(RETRY_SECONDS)
            fetch = ChunkFetch(chunks, missing, self._stopping)
            yield from fetch
            if self._stopping.is_set():
                raise Stopped
            missing = fetch.missing
            if not missing:
                return
        where = f"partition {missing[0].partition} offset {missing[0].offset}"
        raise VersionRefused(Refusal.MISSING_CHUNK, f"{len(missing)} chunks are not there, the first at {where}")


@dataclass(frozen=True, slots=True)
class _Failure:
    """Where a path ended."""

    placed: PlacedManifest
    refused: VersionRefused


def _payload_bytes(path: list[PlacedManifest]) -> int:
    return sum(placed.manifest.payload_bytes for placed in path)
