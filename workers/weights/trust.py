"""Whose manifests are believed: receivers, retention and the trainer ask here before they learn anything.

Keeps true
- Where a key is set, nothing is learned from a manifest that its owner did not sign: the signature is over the value's
  bytes as they travel, so that fields which are added later change nothing for older readers.
- A manifest of another run or namespace is a stranger, also if the same key signed it.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from schemas.errors import UsageError
from schemas.limits import Id
from schemas.weights import SIGNATURE_HEADER, WeightManifest
from topics.records import Envelope, RawMessage


class Doubt(Enum):
    """Why a manifest of the model is not believed."""

    UNSIGNED = "unsigned"
    FORGED = "forged"
    """Signed by another key, or changed since."""
    STRANGER = "stranger"
    """Of another run."""


@dataclass(frozen=True, slots=True)
class Trust:
    """Who is believed about the versions of one model."""

    model_id: str
    run: str
    """As `run_id` makes it."""
    key: Ed25519PublicKey | None = None
    """Of whoever signs; None believes unsigned manifests too."""

    def judge(self, envelope: Envelope) -> WeightManifest | Doubt | None:
        """The manifest, or why it is not believed; None for a tombstone, another record or another model."""
        manifest = envelope.record
        if not isinstance(manifest, WeightManifest) or manifest.model_id != self.model_id:
            return None
        if (doubt := self._doubt_of_signature(envelope.raw)) is not None:
            return doubt
        return manifest if manifest.run == self.run else Doubt.STRANGER

    def believes(self, envelope: Envelope) -> WeightManifest | None:
        """The manifest, if it is believed."""
        judged = self.judge(envelope)
        return judged if isinstance(judged, WeightManifest) else None

    def of_any_run(self, envelope: Envelope) -> WeightManifest | None:
        """The manifest, if the key's owner signed it for this model, whatever its run."""
        judged, manifest = self.judge(envelope), envelope.record
        known = isinstance(judged, WeightManifest) or judged is Doubt.STRANGER
        return manifest if known and isinstance(manifest, WeightManifest) else None

    def _doubt_of_signature(self, raw: RawMessage) -> Doubt | None:
        if self.key is None:
            return None
        signature = raw.header(SIGNATURE_HEADER)
        if not signature:
            return Doubt.UNSIGNED
        try:
            self.key.verify(signature, raw.value or b"")
        except InvalidSignature:
            return Doubt.FORGED
        return None


def run_id(namespace: str, run: str) -> str:
    """What manifests call a run. Raises UsageError for a name that cannot be written there.

    No namespace has a colon, so two runs never have the same one.
    """
    name = f"{namespace}:{run}"
    try:
        return msgspec.convert(name, Id)
    except msgspec.ValidationError:
        raise UsageError(
            f"run {run!r} in namespace {namespace!r}: together they may have 127 characters, of A-Z a-z 0-9 . _ : -"
        ) from None
