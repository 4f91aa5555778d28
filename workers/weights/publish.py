"""Publishing a policy version: chunks first, the manifest last.

Keeps true
- A manifest is made only when every chunk it names is stored: its places come from the broker's delivery reports.
- Nothing is committed here. The caller writes the manifest, in a transaction with what must be true together with it.

Example
    manifest = publisher.publish(model.named_parameters(), version, step=step, published_at=time.time())
    writer.begin()
    writer.write(MANIFESTS, manifest, key=manifest_key(manifest))
    writer.commit()
"""

from collections.abc import Iterable, Iterator
from time import perf_counter

from prometheus_client import Counter, Histogram
from torch import Tensor

from schemas.weights import ChunkRef, TensorSpec, WeightChunk, WeightManifest
from topics.bus import Reader, Writer
from topics.catalog import CHUNKS
from topics.settings import BusSettings
from workers.weights.layout import WholeDigest, digest_of, row_bytes, row_ranges
from workers.weights.tensors import bytes_of, spec_of

PUBLISHED_BYTES = Counter("rose_weights_published_bytes_total", "Payload bytes of the chunks that were published.")
PUBLISH_SECONDS = Histogram(
    "rose_weights_publish_seconds",
    "From the first tensor of a version to the storing of its last chunk.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)


class WeightPublisher:
    """Publishes versions of one model. Not for several threads."""

    def __init__(self, settings: BusSettings, model_id: str) -> None:
        """Raises TopicMissing or BusError."""
        self.model_id = model_id
        reader = Reader(settings, "rose-weights", group="weights")
        try:
            self._partitions = reader.partitions(CHUNKS)
        finally:
            reader.close()
        self._writer = Writer(settings, f"rose-weights-{model_id}")

    def publish(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, *, step: int, published_at: float
    ) -> WeightManifest:
        """Store all tensors as chunks, in their own element type; return the manifest that would commit them.

        Names are Hugging Face's. The tensors must not change meanwhile. Raises BusError, or LayoutError for an element
        type or a row that cannot travel.
        """
        started = perf_counter()
        specs: list[TensorSpec] = []
        refs: dict[int, ChunkRef] = {}
        digest = WholeDigest()
        count = 0
        for name, tensor in named_tensors:
            spec, data = spec_of(name, tensor), bytes_of(tensor)
            specs.append(spec)
            digest.add(name, data)
            for chunk in self._chunks(spec, data, version):
                self._write(chunk, count, refs)
                count += 1
        self._writer.flush()
        chunks = tuple(refs[number] for number in range(count))
        PUBLISHED_BYTES.inc(sum(chunk.bytes for chunk in chunks))
        PUBLISH_SECONDS.observe(perf_counter() - started)
        return WeightManifest(
            model_id=self.model_id,
            version=version,
            step=step,
            tensors=tuple(specs),
            chunks=chunks,
            digest=digest.digest(),
            published_at=published_at,
        )

    def _chunks(self, spec: TensorSpec, data: memoryview, version: int) -> Iterator[WeightChunk]:
        size = row_bytes(spec)
        for row_start, rows in row_ranges(spec):
            yield WeightChunk(
                model_id=self.model_id,
                version=version,
                tensor=spec.name,
                row_start=row_start,
                rows=rows,
                payload=bytes(data[row_start * size : (row_start + rows) * size]),
            )

    def _write(self, chunk: WeightChunk, number: int, refs: dict[int, ChunkRef]) -> None:
        size, digest = len(chunk.payload), digest_of(chunk.payload)
        tensor, row_start, rows = chunk.tensor, chunk.row_start, chunk.rows

        def stored(partition: int, offset: int) -> None:
            refs[number] = ChunkRef(
                tensor=tensor,
                row_start=row_start,
                rows=rows,
                partition=partition,
                offset=offset,
                bytes=size,
                digest=digest,
            )

        place = number % self._partitions  # spread evenly, so that a receiver fetches from all of them at once
        self._writer.write(CHUNKS, chunk, key=tensor, partition=place, on_delivery=stored)
        self._writer.poll()


def tensors_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """What the manifest of a version made of these tensors says as its digest."""
    digest = WholeDigest()
    for name, tensor in named_tensors:
        digest.add(name, bytes_of(tensor))
    return digest.digest()
