"""Who may publish: Ed25519 signatures of manifests.

Keeps true: once a receiver has a public key, nothing that is not signed by it is taken. A manifest names every chunk by
its digest, so a signed manifest speaks for all bytes of a version.
"""

from collections.abc import Callable
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

from schemas.errors import UsageError
from schemas.weights import WeightManifest
from schemas.wire import encode
from workers.weights.refusals import Refusal, VersionRefused

_ADVICE = "`rose keys FILE` writes a private key to FILE and its public one to FILE.pub"


def sign(manifest: WeightManifest, key: Ed25519PrivateKey) -> WeightManifest:
    """The manifest with its signature."""
    return msgspec.structs.replace(manifest, signature=key.sign(_signed_bytes(manifest)))


def check_signature(manifest: WeightManifest, key: Ed25519PublicKey) -> None:
    """Raises VersionRefused for a manifest that is not signed by the key's owner."""
    try:
        key.verify(manifest.signature, _signed_bytes(manifest))
    except InvalidSignature:
        how = "by another key, or changed since" if manifest.signature else "by nobody"
        raise VersionRefused(Refusal.BAD_SIGNATURE, f"it was signed {how}") from None


def private_key(file: Path) -> Ed25519PrivateKey:
    """Of a PEM file without a password. Raises UsageError."""
    key = _load(file, lambda pem: load_pem_private_key(pem, password=None), "private key without a password")
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{file} holds a private key that is not Ed25519: {_ADVICE}")
    return key


def public_key(file: Path) -> Ed25519PublicKey:
    """Of a PEM file. Raises UsageError."""
    key = _load(file, load_pem_public_key, "public key")
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{file} holds a public key that is not Ed25519: {_ADVICE}")
    return key


def _load(file: Path, parse: Callable[[bytes], object], what: str) -> object:
    try:
        return parse(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror}): {_ADVICE}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(f"{file} holds no {what}: {_ADVICE}") from None


def make_keys(file: Path) -> Path:
    """Write a new private key to `file`, readable by its owner alone, and the public one to `file`.pub.

    Returns the second. Raises UsageError when either is there already or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    public = file.with_name(f"{file.name}.pub")
    private_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public_bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        with public.open("xb") as opened:
            opened.write(public_bytes)
        file.touch(mode=0o600, exist_ok=False)
        file.write_bytes(private_bytes)
    except OSError as error:
        raise UsageError(f"cannot write keys: {error}") from None
    return public


def _signed_bytes(manifest: WeightManifest) -> bytes:
    return encode(msgspec.structs.replace(manifest, signature=b""))
