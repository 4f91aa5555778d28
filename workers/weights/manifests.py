"""Manifests on the log: their key and signature, and what a run has there.

Keeps true
- What is signed is what travels: the bytes are made once.
- What a run has on the log is told by manifests that are believed, and by nothing else.
- Of a manifest that names files nothing takes the place: compaction, too, drops it only after its tombstone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from schemas.weights import SIGNATURE_HEADER, WeightManifest
from schemas.wire import encode
from topics.catalog import MANIFESTS
from topics.log_reader import read_to_end
from topics.queries import noop
from topics.records import Envelope
from topics.settings import BusSettings
from topics.writer import Writer
from workers.weights.trust import Trust

PLACE = (MANIFESTS, 0)
"""Manifests lie in one partition, so versions have an order."""


def manifest_key(manifest: WeightManifest) -> str:
    """Runs that share a topic do not replace each other's manifests, nor a version its own that names other files."""
    version = f"{run_keys(manifest.model_id, manifest.run)}{manifest.version}"
    return "/".join((version, *manifest.files[:1]))


def run_keys(model_id: str, run: str) -> str:
    """What the keys of a run's manifests, and of no other's, begin with."""
    return f"{model_id}/{run}/"


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest as it is to be written."""

    manifest: WeightManifest
    wire: bytes
    headers: Mapping[str, bytes]

    def write(self, writer: Writer) -> None:
        """Hand it to the writer, in whose transaction it may be."""
        writer.write_encoded(
            MANIFESTS, self.manifest, self.wire, key=manifest_key(self.manifest), partition=0, headers=self.headers
        )


def signed(manifest: WeightManifest, key: Ed25519PrivateKey | None) -> SignedManifest:
    """Signed over the bytes that will travel; without a key as it is. Raises RecordError."""
    wire = encode(manifest)
    return SignedManifest(manifest, wire, {} if key is None else {SIGNATURE_HEADER: key.sign(wire)})


def read_manifests(settings: BusSettings, *, meanwhile: Callable[[], None] = noop) -> Iterator[Envelope]:
    """All that is on the topic, believed or not. `meanwhile`: see `read_to_end`. Raises TopicMissing or BusError."""
    yield from read_to_end(settings, {PLACE: 0}, client_id="rose-weights", on_wait=meanwhile)


def newest_manifest(settings: BusSettings, trust: Trust) -> WeightManifest | None:
    """The newest manifest that is believed. Raises TopicMissing or BusError."""
    found = filter(None, map(trust.believes, read_manifests(settings)))
    return max(found, key=lambda manifest: manifest.order, default=None)
