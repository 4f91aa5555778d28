"""Signing keys, and the decision which manifests receivers, retention and the trainer trust.

Keeps true
- If a key is set, nothing is learned from a manifest that the key's owner did not sign. The signature covers the
  encoded bytes, so fields that are added later do not invalidate it for older readers.
- A manifest of another run or namespace is not trusted, even if the same key signed it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from rose.schemas.errors import UsageError
from rose.schemas.limits import Id
from rose.schemas.weights import SIGNATURE_HEADER, WeightManifest
from rose.topics.records import Envelope, RawMessage
from rose.topics.settings import BusSettings
from rose.workers.weights.config import WeightsConfig

_ADVICE = "`rose keys FILE` writes a private key to FILE and its public one to FILE.pub"


def private_key(file: Path) -> Ed25519PrivateKey:
    """Read an Ed25519 private key from a PEM file without a password. Raises UsageError."""
    key = _load(file, lambda pem: load_pem_private_key(pem, password=None), "private key without a password")
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{file} holds a private key that is not Ed25519: {_ADVICE}")
    return key


def public_key(file: Path) -> Ed25519PublicKey:
    """Read an Ed25519 public key from a PEM file. Raises UsageError."""
    key = _load(file, load_pem_public_key, "public key")
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{file} holds a public key that is not Ed25519: {_ADVICE}")
    return key


def _load(file: Path, parse: Callable[[bytes], object], kind: str) -> object:
    try:
        return parse(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror}): {_ADVICE}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(f"{file} holds no {kind}: {_ADVICE}") from None


def make_keys(file: Path) -> Path:
    """Write a new private key to `file`, readable only by its owner, and the public key to `file`.pub.

    Returns the path of the public key. Raises UsageError if either file exists or cannot be written; no file is left
    then.
    """
    if not file.name:
        raise UsageError(f"{file} is a folder: {_ADVICE}")
    key = Ed25519PrivateKey.generate()
    public = file.with_name(f"{file.name}.pub")
    private_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public_bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with ExitStack() as undo:
        try:
            _write_new(file, private_bytes, undo, mode=0o600)
            _write_new(public, public_bytes, undo, mode=0o644)
        except OSError as error:
            raise UsageError(f"cannot write keys: {error}") from None
        undo.pop_all()
    return public


def _write_new(file: Path, content: bytes, undo: ExitStack, *, mode: int) -> None:
    file.touch(mode=mode, exist_ok=False)
    undo.callback(file.unlink, missing_ok=True)
    file.write_bytes(content)


class UntrustedReason(Enum):
    """Why a manifest of the model is not trusted."""

    UNSIGNED = "unsigned"
    FORGED = "forged"
    """The manifest was signed with another key or changed afterwards."""
    STRANGER = "stranger"
    """The manifest is another run's."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The run and key whose manifests of one model are trusted."""

    model_id: str
    run: str
    """Full name of the run, see `run_id`."""
    key: Ed25519PublicKey | None = None
    """Public key of the signer; None trusts unsigned manifests."""

    def verify(self, envelope: Envelope) -> WeightManifest | UntrustedReason | None:
        """The manifest, or why it is not trusted; None for a tombstone, another record or another model."""
        manifest = envelope.record
        if not isinstance(manifest, WeightManifest) or manifest.model_id != self.model_id:
            return None
        if (doubt := self._signature_error(envelope.raw)) is not None:
            return doubt
        return manifest if manifest.run == self.run else UntrustedReason.STRANGER

    def verified(self, envelope: Envelope) -> WeightManifest | None:
        """The manifest if it is trusted, otherwise None."""
        judged = self.verify(envelope)
        return judged if isinstance(judged, WeightManifest) else None

    def verified_of_any_run(self, envelope: Envelope) -> WeightManifest | None:
        """The manifest if the key's owner signed it for this model, whatever its run; otherwise None."""
        judged, manifest = self.verify(envelope), envelope.record
        known = isinstance(judged, WeightManifest) or judged is UntrustedReason.STRANGER
        return manifest if known and isinstance(manifest, WeightManifest) else None

    def _signature_error(self, raw: RawMessage) -> UntrustedReason | None:
        if self.key is None:
            return None
        signature = raw.header(SIGNATURE_HEADER)
        if not signature:
            return UntrustedReason.UNSIGNED
        try:
            self.key.verify(signature, raw.value or b"")
        except InvalidSignature:
            return UntrustedReason.FORGED
        return None


def run_id(namespace: str, run: str) -> str:
    """The name of a run in manifests: namespace and run.

    Raises UsageError if the name is too long or has other characters.

    A namespace has no colon, so two runs never have the same name.
    """
    name = f"{namespace}:{run}"
    try:
        return msgspec.convert(name, Id)
    except msgspec.ValidationError:
        raise UsageError(
            f"run {run!r} in namespace {namespace!r}: together they may have 127 characters, of A-Z a-z 0-9 . _ : -"
        ) from None


def make_trust(settings: BusSettings, model_id: str, config: WeightsConfig) -> Trust:
    """The trust that a configuration describes.

    Raises UsageError if the key file is broken or the run's name is invalid.
    """
    key = public_key(config.trusted_key) if config.trusted_key else None
    return Trust(model_id, run_id(settings.namespace, config.run), key)


def require_signing_key(settings: BusSettings, key: object, field: str) -> None:
    """Raises UsageError if the broker authenticates its clients and `key` is None.

    `field`: the setting to name in the message.

    A right to write manifests may be granted by mistake or stolen; the trainer's private key never leaves the trainer.
    """
    if settings.authenticated and key is None:
        raise UsageError(
            "the clients of this broker prove who they are (security.protocol), and so must policy versions: "
            f"set weights.{field}; `rose keys FILE` makes both keys"
        )


def load_signing_key(config: WeightsConfig) -> Ed25519PrivateKey | None:
    """The private key of a configuration, or None.

    Raises UsageError if the file is broken or not the pair of the trusted key.
    """
    if config.signing_key is None:
        return None
    key = private_key(config.signing_key)
    if config.trusted_key and public_key(config.trusted_key) != key.public_key():
        raise UsageError(f"{config.trusted_key} is not the public key of {config.signing_key}: {_ADVICE}")
    return key
