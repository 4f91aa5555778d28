"""Receiving policy versions: followed, fetched and verified on a thread of its own while the engine runs.

Keeps true
- What is staged is whole and verified: every tensor of the model, every chunk's digest, the digest of all together.
- Nothing is allocated before a manifest was checked against the model's own shapes.
- Only the newest version is fetched, and only the newest staged one is offered.
- Nothing is ever raised into the engine: a refused version is counted and logged, and the old one serves on.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Condition, Event, Thread
from time import perf_counter

import structlog
from prometheus_client import Counter, Gauge, Histogram
from torch import Tensor

from schemas.errors import RoseError
from schemas.weights import WeightManifest
from topics.bus import Envelope, Reader
from topics.settings import BusSettings
from workers.weights.fetch import ChunkFetch
from workers.weights.layout import (
    Refusal,
    VersionRefused,
    WholeDigest,
    check_chunk,
    check_manifest,
    row_bytes,
)
from workers.weights.manifests import PLACE, PlacedManifest, newest, newest_manifest
from workers.weights.tensors import bytes_of, empty

LOOK_SECONDS = 0.2
"""How long one look for manifests lasts; also how soon `stop` is noticed."""

FETCH_ATTEMPTS = 3
"""How often chunks that seem to be missing are looked for: a replica may be behind."""

RETRY_SECONDS = 0.5
"""Pause after a failure of the bus or a chunk that was not there."""

MANIFEST_BATCH = 16
"""Manifests taken from librdkafka at once."""

RECEIVED_BYTES = Counter("rose_weights_received_bytes_total", "Payload bytes of the chunks of staged versions.")
RECEIVE_SECONDS = Histogram(
    "rose_weights_receive_seconds",
    "Fetching and verifying one version.",
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
    """By Hugging Face name, in the element type in which it was published."""
    bytes: int
    manifest: WeightManifest
    seconds: float
    """Fetching and verifying."""


class WeightReceiver:
    """Follows the versions of one model: start it, poll `staged`, stop it."""

    def __init__(
        self,
        settings: BusSettings,
        model_id: str,
        *,
        shapes: Mapping[str, Sequence[int]],
        client_id: str = "rose-weights",
    ) -> None:
        """`shapes`: of every tensor of the model, as `layout.folder_shapes` reads them."""
        self.refusals: dict[Refusal, int] = dict.fromkeys(Refusal, 0)
        """Versions not taken, by reason."""
        self._settings = settings
        self._model_id = model_id
        self._shapes = shapes
        self._client_id = client_id
        self._changed = Condition()
        self._staged: StagedVersion | None = None
        self._version = -1
        self._handled_offset = -1
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=client_id, daemon=True)

    def start(self) -> None:
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
            except RoseError as error:
                log.warning("fetching anew", model=self._model_id, reason=str(error))
            except Exception:  # whatever it is, the engine must go on serving and later versions must still arrive
                log.exception("receiving failed", model=self._model_id)
            if not self._stopping.is_set():
                RETRIES.inc()
                self._stopping.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        found, begin = newest_manifest(self._settings, self._model_id)
        with (
            closing(Reader(self._settings, self._client_id, group="weights")) as manifests,
            closing(Reader(self._settings, self._client_id, group="weights", ends=True)) as chunks,
        ):
            manifests.assign({PLACE: begin})
            while not self._stopping.is_set():
                if found is not None and self._is_news(found):
                    self._take(found, chunks)
                read = manifests.read(MANIFEST_BATCH, LOOK_SECONDS)
                found = newest([item for item in read if isinstance(item, Envelope)], self._model_id)

    def _is_news(self, found: PlacedManifest) -> bool:
        return found.manifest.version > self._version and found.offset > self._handled_offset

    def _take(self, found: PlacedManifest, chunks: Reader) -> None:
        manifest = found.manifest
        started = perf_counter()
        try:
            check_manifest(manifest, self._shapes)
            tensors = self._fetch(manifest, chunks)
        except VersionRefused as refused:
            self._handled_offset = found.offset
            self._refuse(manifest, refused)
            return
        if tensors is None:
            return
        seconds = perf_counter() - started
        size = sum(ref.bytes for ref in manifest.chunks)
        RECEIVED_BYTES.inc(size)
        RECEIVE_SECONDS.observe(seconds)
        STAGED_VERSION.set(manifest.version)
        self._handled_offset, self._version = found.offset, manifest.version
        log.info("staged", model=self._model_id, version=manifest.version, bytes=size, seconds=seconds)
        with self._changed:
            self._staged = StagedVersion(manifest.version, tensors, size, manifest, seconds)
            self._changed.notify_all()

    def _refuse(self, manifest: WeightManifest, refused: VersionRefused) -> None:
        reason = refused.refusal.value
        REFUSED.labels(reason).inc()
        log.error("version refused", version=manifest.version, model=self._model_id, reason=reason, detail=str(refused))
        with self._changed:
            self.refusals[refused.refusal] += 1
            self._changed.notify_all()

    def _fetch(self, manifest: WeightManifest, chunks: Reader) -> dict[str, Tensor] | None:
        """The verified tensors; None when stopped meanwhile. Raises VersionRefused, BusError or FetchStalled."""
        specs = {spec.name: spec for spec in manifest.tensors}
        tensors = {name: empty(spec) for name, spec in specs.items()}
        views = {name: bytes_of(tensor) for name, tensor in tensors.items()}
        missing = list(manifest.chunks)
        for attempt in range(FETCH_ATTEMPTS):
            if attempt:
                self._stopping.wait(RETRY_SECONDS)
            fetch = ChunkFetch(chunks, missing, self._stopping)
            for ref, chunk in fetch:
                check_chunk(chunk, ref, manifest)
                begin = ref.row_start * row_bytes(specs[ref.tensor])
                views[ref.tensor][begin : begin + ref.bytes] = chunk.payload
            if self._stopping.is_set():
                return None
            missing = fetch.missing
            if not missing:
                _check_whole(views, manifest)
                return tensors
        where = f"partition {missing[0].partition} offset {missing[0].offset}"
        raise VersionRefused(Refusal.MISSING_CHUNK, f"{len(missing)} chunks are not there, the first at {where}")


def _check_whole(views: Mapping[str, memoryview], manifest: WeightManifest) -> None:
    digest = WholeDigest()
    for name, view in views.items():
        digest.add(name, view)
    if digest.digest() != manifest.digest:
        raise VersionRefused(Refusal.WRONG_DIGEST, "the tensors together are not those of the manifest")
