"""Who may publish: the key files of a configuration, and the run that it follows.

Keeps true
- A private key is readable by its owner alone, and the public key beside it is its own.
- A manifest names every chunk by its digest, so its signature speaks for all bytes of a version.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
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
from topics.settings import BusSettings
from workers.weights.config import WeightsConfig
from workers.weights.trust import Trust, run_id

_ADVICE = "`rose keys FILE` writes a private key to FILE and its public one to FILE.pub"


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

    Returns the second. Raises UsageError when either is there already or cannot be written; then neither is left.
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


def trust_of(settings: BusSettings, model_id: str, config: WeightsConfig) -> Trust:
    """Whose versions a configuration takes. Raises UsageError for a broken key file or a run without a proper name."""
    key = public_key(config.trusted_key) if config.trusted_key else None
    return Trust(model_id, run_id(settings.namespace, config.run), key)


def refuse_unsigned(settings: BusSettings, key: object, field: str) -> None:
    """Where clients prove who they are, so do versions. Raises UsageError where this field of the weights names no key.

    A right to write manifests may be given by mistake, or stolen; the trainer's key never leaves the trainer.
    """
    if settings.authenticated and key is None:
        raise UsageError(
            "the clients of this broker prove who they are (security.protocol), and so must policy versions: "
            f"set weights.{field}; `rose keys FILE` makes both keys"
        )


def signer_of(config: WeightsConfig) -> Ed25519PrivateKey | None:
    """The key with which a configuration signs. Raises UsageError for a broken one, or if it is not the trusted one."""
    if config.signing_key is None:
        return None
    key = private_key(config.signing_key)
    if config.trusted_key and public_key(config.trusted_key) != key.public_key():
        raise UsageError(f"{config.trusted_key} is not the public key of {config.signing_key}: {_ADVICE}")
    return key
