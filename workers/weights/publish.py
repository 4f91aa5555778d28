"""Publishes policy versions: changed slices in chunks, and the manifest that commits them.

Keeps true
- A version is published once its manifest is on the log; none of its chunks is written after that.
- Versions are committed in the order of the calls. After a failure the publisher is unusable.
- After an anchor, what no version needs any more is deleted. A failure or delay of the deletion delays no version.
- A rank publishes what it owns (the local shard of a DTensor, without gathering); nothing is published twice.
- A version builds on the one that the same publisher made before, otherwise on nothing. An anchor is the first version,
  one after every `anchor_every` versions, and one as soon as the chain since the last anchor has cost as much as an
  anchor or the last anchor is `anchor_max_age_seconds` old.

The whole interface of another trainer to the bus:

    tensors = FolderTensors(model, folder)
    with WeightPublisher(BusSettings("broker:9092"), "policy") as publisher:
        publisher.publish(tensors)
        for step in range(1, steps + 1):
            ...  # an optimizer step
            publisher.publish(tensors, step=step)
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import cached_property
from time import monotonic, perf_counter
from types import TracebackType
from typing import Self

import msgspec
import structlog
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import CollectorRegistry, Counter, Histogram
from torch import Tensor

from rose.schemas.weights import ChunkRef, SliceRef, WeightManifest
from rose.topics.catalog import CHUNKS
from rose.topics.log_reader import await_transactions
from rose.topics.metrics import register
from rose.topics.queries import noop
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.weights.chunk_stores import AnchorStore, ChunkSink, LogChunkSink, StoredChunk, open_store, put_payload
from rose.workers.weights.config import DEFAULT_RUN, WeightsConfig
from rose.workers.weights.encoding import encode_slices, wrongly_collected
from rose.workers.weights.gpu_changes import ChangeCollector
from rose.workers.weights.layout import NO_BASE, Box, LayoutError, slices_of, whole_digest
from rose.workers.weights.manifests import (
    MANIFEST_PARTITION,
    SignedManifest,
    VersionNumbers,
    check_layout,
    read_manifests,
    sign_manifest,
    write_index,
)
from rose.workers.weights.retention import delete_released
from rose.workers.weights.tensors import TORCH_DTYPES, Snapshot, snapshot_of
from rose.workers.weights.trust import Trust, load_signing_key, require_signing_key, run_id

LOOK_SECONDS = 1.0
"""Interval of checking whether a version is on the log. A large version over a slow link takes minutes."""

PUBLISHING = CollectorRegistry()
"""Metrics of publishers, exported once a publisher exists."""

PUBLISHED_BYTES = Counter(
    "rose_weights_published_bytes_total", "Payload bytes of published chunks.", registry=PUBLISHING
)
DENSE_BYTES = Counter(
    "rose_weights_dense_bytes_total", "Bytes of the weights that the published chunks stand for.", registry=PUBLISHING
)
PUBLISH_SECONDS = Histogram(
    "rose_weights_publish_seconds",
    "Time from the first tensor of a version until its last chunk is stored.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
    registry=PUBLISHING,
)


log = structlog.get_logger("weights")


class WeightPublisher:
    """Publishes the versions of one model.

    A context manager that waits for the last version; its methods are for one thread.
    """

    def __init__(
        self,
        settings: BusSettings,
        model_id: str,
        *,
        run: str = DEFAULT_RUN,
        dtype: torch.dtype | None = None,
        anchor_every: int = 20,
        anchor_max_age_seconds: float = math.inf,
        column_parts: int = 1,
        store: AnchorStore | None = None,
        store_above_bytes: int = 0,
        key: Ed25519PrivateKey | None = None,
        collector: ChangeCollector | None = None,
        on_wait: Callable[[], None] = noop,
    ) -> None:
        """Raises TopicMissing, BusError, and UsageError if the run's name is invalid or a required key is missing.

        `run`: name of the run in its namespace. `dtype`: the element type to which more precise weights are rounded;
        None leaves them. `column_parts`: see `layout.slices_of`. `store`: the anchor store for anchors of models larger
        than `store_above_bytes`; None puts all anchors on the log. `key` signs the manifests. `collector` collects the
        changes of tensors on a GPU. `on_wait` is called often while the log is read back: see `log_reader.read_to_end`.
        """
        require_signing_key(settings, key, "signing_key")
        register(PUBLISHING)
        self.trust = Trust(model_id, run_id(settings.namespace, run), None if key is None else key.public_key())
        """Decides which manifests on the log are this run's."""
        self._settings = settings
        self._dtype = dtype
        self._anchor_every = anchor_every
        self._anchor_max_age_seconds = anchor_max_age_seconds
        self._column_parts = column_parts
        self._store = store
        self._store_above_bytes = store_above_bytes
        self._key = key
        self._collector = collector
        self._on_wait = on_wait
        self._writer = Writer(settings, f"rose-weights-{model_id}")
        self._log = LogChunkSink(self._writer, self._writer.partition_count(CHUNKS))
        self._base: Snapshot | None = None
        self._base_version = -1
        self._chain_bytes = self._chain_versions = 0
        self._anchored_at = -math.inf
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rose-publishes")
        self._publishing: Future[WeightManifest] | None = None
        self._cleaner = ThreadPoolExecutor(1, thread_name_prefix="rose-releases")
        self._cleaning: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @cached_property
    def _version_numbers(self) -> VersionNumbers:
        """The numbering, read from the log at first use: an older publisher may have been fenced by then."""
        numbering = VersionNumbers()
        await_transactions(self._settings, [MANIFEST_PARTITION], client_id="rose-weights", on_wait=self._on_wait)
        found = read_manifests(self._settings, on_wait=self._on_wait)
        numbering.learn(filter(None, map(self.trust.verified_of_any_run, found)), self.trust.run)
        return numbering

    @property
    def newest(self) -> WeightManifest | None:
        """The newest trusted version of the run on the log, or None. Raises TopicMissing or BusError."""
        return self._version_numbers.newest

    @property
    def epoch(self) -> int:
        """Epoch of the next version. Raises TopicMissing or BusError."""
        return self._version_numbers.epoch

    @property
    def next_version(self) -> int:
        """The lowest free version number. Raises TopicMissing or BusError."""
        return self._version_numbers.next_version

    def begin_epoch(self, *, epoch: int = -1, version: int = -1) -> int:
        """Begin an epoch: later versions are newer than all earlier ones. Returns the lowest free number.

        For a trainer that resumes from a policy other than the newest on the log. `epoch` and `version` are those of
        that policy, which the log may have lost; -1 if unknown. The first version of an epoch is an anchor. Raises
        TopicMissing or BusError.
        """
        self.wait_until_published()
        self._base = None
        return self._version_numbers.begin_epoch(epoch=epoch, version=version)

    def publish(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None = None, *, step: int | None = None
    ) -> Future[WeightManifest]:
        """Publish a version from a copy: the tensors may change once this returns. One process owns all tensors.

        Waits for the previous version. The result of the future is the manifest, once the manifest is on the log. Names
        are those of the model folder, as in `FolderTensors`. `version`: default is the next free number. `step`:
        default is the version. The newest version may be published again under its number, as an anchor.

        Raises, here or from the future: VersionTaken, BusError, StoreError, and LayoutError if the tensors cannot be
        published. The publisher is unusable then.
        """
        self.wait_until_published()  # before the copy, so that there are at most two copies
        return self.publish_snapshot(
            self.snapshot(named_tensors), self.next_version if version is None else version, step=step
        )

    def publish_snapshot(
        self,
        snapshot: Snapshot,
        version: int,
        commit: Callable[[SignedManifest], None] | None = None,
        *,
        step: int | None = None,
        digest: bytes | None = None,
        anchor: bool | None = None,
        merge: Callable[[WeightManifest], WeightManifest] | None = None,
    ) -> Future[WeightManifest]:
        """Publish a snapshot that was made before.

        `anchor`: as in `put`. With several ranks, `digest` is that of the whole policy, and `merge` merges this rank's
        manifest with those of the others, on the publisher's thread.

        `commit` writes the signed manifest, on the publisher's thread; a caller passes it to write other records in the
        same transaction. The returned manifest has all slices; the written one may have them in an index.
        """
        self.wait_until_published()
        self._version_numbers.check(version, snapshot.digest() if digest is None else digest)
        step = version if step is None else step
        self._publishing = self._thread.submit(
            self._publish, snapshot, version, step, commit or self._write, anchor, merge
        )
        return self._publishing

    def wait_until_published(self, on_wait: Callable[[], None] = noop) -> None:
        """Wait until the last version is on the log; `on_wait` is called every second. Raises what `publish` raises."""
        if self._publishing is not None:
            while not wait([self._publishing], LOOK_SECONDS).done:
                on_wait()
            self._publishing.result()

    def close(self) -> None:
        """Wait until the last version is on the log, then end the threads. Raises what `publish` raises."""
        try:
            self.wait_until_published()
        finally:
            self._thread.shutdown()
            self._cleaner.shutdown()

    def snapshot(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Snapshot:
        """A copy of the tensors that this process owns, in the published element type. Raises LayoutError."""
        return snapshot_of(named_tensors, dtype=self._dtype, column_parts=self._column_parts, collector=self._collector)

    def needs_anchor(self, snapshot: Snapshot, version: int) -> bool:
        """Whether the next version, of this snapshot, has to be an anchor."""
        return self._anchor_due(snapshot) or self._fitting_base(snapshot, version) is None

    def put(
        self,
        snapshot: Snapshot,
        version: int,
        *,
        step: int,
        published_at: float,
        anchor: bool | None = None,
        epoch: int | None = None,
    ) -> WeightManifest:
        """Store a version's chunks, on any thread, and return the manifest that would commit them.

        `published_at`: Unix seconds. `anchor`: whether the version is an anchor; None applies the publisher's own rule.
        Ranks whose manifests are merged must pass the same value. `epoch`: the version's; None for that of this
        publisher. If the manifest is not committed, the publisher must be discarded, since its next version builds on
        this one. Raises what `publish` raises.
        """
        started = perf_counter()
        begins = self.needs_anchor(snapshot, version) if anchor is None else anchor
        base = None if begins else self._fitting_base(snapshot, version)
        boxes = [
            (number, name, box)
            for number, name in enumerate(snapshot.specs)
            if name in snapshot.words
            for box in slices_of(snapshot.boxes[name], column_parts=self._column_parts)
        ]
        check_layout(tuple(snapshot.specs.values()), len(boxes))
        sink = self._log if base is not None else self._anchor_sink(snapshot, version)
        if base is not None:
            self._check_collected(snapshot, base, version)
        with closing(encode_slices(snapshot, base, [(name, box) for _, name, box in boxes])) as payloads:
            pending = [
                (number, name, box, self._put_slice(sink, name, payload, version))
                for (number, name, box), payload in zip(boxes, payloads, strict=True)
            ]
        sink.close()
        snapshot.changes.clear()
        slices = tuple(
            _slice_ref(
                number, box, snapshot.digests[name, box], NO_BASE if base is None else base.digests[name, box], chunks
            )
            for number, name, box, chunks in pending
        )
        manifest = WeightManifest(
            model_id=self.trust.model_id,
            run=self.trust.run,
            epoch=self._version_numbers.epoch if epoch is None else epoch,
            version=version,
            base_version=None if base is None else self._base_version,
            step=step,
            tensors=tuple(snapshot.specs.values()),
            slices=slices,
            digest=NO_BASE,
            files=sink.files,
            published_at=published_at,
        )
        manifest = merge_manifests([manifest])
        sent = manifest.payload_bytes
        self._chain_versions, self._chain_bytes = (
            (0, 0) if base is None else (self._chain_versions + 1, self._chain_bytes + sent)
        )
        if base is None:
            self._anchored_at = monotonic()
        self._base, self._base_version = snapshot, version
        DENSE_BYTES.inc(snapshot.owned_bytes)
        PUBLISHED_BYTES.inc(sent)
        PUBLISH_SECONDS.observe(perf_counter() - started)
        return manifest

    def commit(self, manifest: WeightManifest) -> None:
        """Sign and write the merged manifest of the ranks. Raises VersionTaken, BusError or LayoutError."""
        self._commit(manifest, self._write)

    def _publish(
        self,
        snapshot: Snapshot,
        version: int,
        step: int,
        commit: Callable[[SignedManifest], None],
        anchor: bool | None,
        merge: Callable[[WeightManifest], WeightManifest] | None,
    ) -> WeightManifest:
        manifest = self.put(snapshot, version, step=step, published_at=time.time(), anchor=anchor)
        if merge is not None:
            manifest = merge(manifest)
        self._commit(manifest, commit)
        return manifest

    def _commit(self, manifest: WeightManifest, commit: Callable[[SignedManifest], None]) -> None:
        self._version_numbers.take(manifest)
        commit(sign_manifest(write_index(manifest, self._log), self._key))
        waits = self._cleaning is not None and not self._cleaning.running() and not self._cleaning.done()
        if manifest.base_version is None and not waits:
            self._cleaning = self._cleaner.submit(delete_released, self._settings, self.trust, self._store)

    def _write(self, manifest: SignedManifest) -> None:
        manifest.write(self._writer)
        self._writer.flush()

    def _anchor_due(self, snapshot: Snapshot) -> bool:
        return (
            self._chain_versions >= self._anchor_every
            or self._chain_bytes >= snapshot.owned_bytes
            or monotonic() - self._anchored_at >= self._anchor_max_age_seconds
        )

    def _fitting_base(self, snapshot: Snapshot, version: int) -> Snapshot | None:
        base = self._base
        fits = base is not None and base.specs == snapshot.specs and base.boxes == snapshot.boxes
        return base if fits and version > self._base_version else None

    def _anchor_sink(self, snapshot: Snapshot, version: int) -> ChunkSink:
        if self._store is None or snapshot.model_bytes <= self._store_above_bytes:
            return self._log
        return self._store.create(self.trust.model_id, self.trust.run, version)

    def _check_collected(self, snapshot: Snapshot, base: Snapshot, version: int) -> None:
        """Discard collected changes that would be encoded wrongly, and collect no more."""
        if self._collector is None:
            return
        if not self._collector.stopped and (tensor := wrongly_collected(snapshot, base, version)):
            log.error("gpu_encoding_stopped", reason=f"the changes of {tensor} are not those that the CPU collects")
            self._collector.stop()
        if self._collector.stopped:
            snapshot.changes.clear()

    def _put_slice(self, sink: ChunkSink, name: str, payload: bytes | None, version: int) -> list[StoredChunk]:
        if payload is None:
            return []
        return put_payload(sink, payload, model_id=self.trust.model_id, version=version, tensor=name)


def _slice_ref(number: int, box: Box, digest: bytes, base_digest: bytes, chunks: Sequence[StoredChunk]) -> SliceRef:
    return SliceRef(
        tensor=number,
        row_start=box.row_start,
        rows=box.rows,
        column_start=box.column_start,
        columns=box.columns,
        digest=digest,
        base_digest=base_digest,
        chunks=tuple(chunk.ref() for chunk in chunks),
    )


def merge_manifests(parts: Sequence[WeightManifest]) -> WeightManifest:
    """Merge the manifests that the ranks' `put` returned for one version.

    Raises LayoutError if they differ in version, base version or tensors.
    """
    if len({(part.order, part.base_version, part.tensors) for part in parts}) > 1:
        raise LayoutError("the ranks' parts are not of one version: give `put` the same `version` and `anchor`")
    files = tuple(file for part in parts for file in part.files)
    slices = [piece for part in parts for piece in _renumber_file(part, files)]
    slices.sort(key=lambda piece: (piece.tensor, piece.row_start, piece.column_start))
    sent = sum(chunk.bytes for piece in slices for chunk in piece.chunks)
    manifest = msgspec.structs.replace(parts[0], slices=tuple(slices), files=files, payload_bytes=sent)
    return msgspec.structs.replace(manifest, digest=whole_digest(manifest))


def _renumber_file(part: WeightManifest, files: Sequence[str]) -> Iterator[SliceRef]:
    """The part's slices, with the number of its file among the files of all ranks."""
    if len(files) == len(part.files):
        yield from part.slices
        return
    if len(part.files) != 1:
        raise LayoutError("the ranks' anchors are not all in the store: give all publishers the same store")
    number = files.index(part.files[0])
    for piece in part.slices:
        chunks = tuple(_chunk_in_file(chunk, number) for chunk in piece.chunks)
        yield msgspec.structs.replace(piece, chunks=chunks)


def _chunk_in_file(chunk: ChunkRef, file: int) -> ChunkRef:
    return ChunkRef(partition=file, offset=chunk.offset, bytes=chunk.bytes, digest=chunk.digest)


def make_publisher(
    settings: BusSettings, model_id: str, config: WeightsConfig, *, on_wait: Callable[[], None] = noop
) -> WeightPublisher:
    """Return the publisher that a configuration describes. `on_wait`: see WeightPublisher.

    Raises UsageError if a key file, the store or the run's name is invalid; TopicMissing, BusError.
    """
    return WeightPublisher(
        settings,
        model_id,
        run=config.run,
        dtype=TORCH_DTYPES[config.dtype] if config.dtype else None,
        anchor_every=config.anchor_every,
        anchor_max_age_seconds=config.anchor_max_age_seconds,
        column_parts=config.column_parts,
        store=open_store(config),
        store_above_bytes=config.store_above_bytes,
        key=load_signing_key(config),
        collector=ChangeCollector() if config.encode_on_gpu else None,
        on_wait=on_wait,
    )
