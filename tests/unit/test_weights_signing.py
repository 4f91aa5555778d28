"""Key files: a private key and its public key; invalid files are reported in one sentence."""

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from rose.schemas.errors import UsageError
from rose.topics.settings import BusSettings
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.trust import Trust, load_signing_key, make_keys, make_trust, private_key, public_key

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def test_generated_keys_sign_and_verify(tmp_path: Path) -> None:
    file = tmp_path / "trainer.pem"
    public = make_keys(file)
    assert public == tmp_path / "trainer.pem.pub"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert private_key(file).public_key() == public_key(public)
    assert b"PRIVATE" not in public.read_bytes()


@pytest.mark.parametrize("there", ["trainer.pem", "trainer.pem.pub"])
def test_no_key_is_ever_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_bytes(b"precious")
    with pytest.raises(UsageError, match="cannot write keys"):
        make_keys(tmp_path / "trainer.pem")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(there, b"precious")], (
        "half a pair, or one that does not match, was left"
    )


def test_unwritable_key_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write keys"):
        make_keys(tmp_path / "no" / "folder" / "trainer.pem")


@pytest.mark.parametrize("name", [".", "/", ""])
def test_folder_is_refused_as_a_key_file(name: str) -> None:
    with pytest.raises(UsageError, match="is a folder: `rose keys FILE` writes"):
        make_keys(Path(name))


def test_configuration_names_the_signing_key_and_the_trusted_key(tmp_path: Path) -> None:
    private, public = tmp_path / "a", make_keys(tmp_path / "a")
    others = make_keys(tmp_path / "b")
    signer = load_signing_key(WeightsConfig(signing_key=private, trusted_key=public))
    assert signer is not None
    trust = make_trust(BusSettings("", "team."), "m", WeightsConfig(run="r", trusted_key=public))
    assert trust == Trust("m", "team.:r", signer.public_key())
    assert load_signing_key(WeightsConfig()) is None
    assert make_trust(BusSettings(""), "m", WeightsConfig()) == Trust("m", ":run", None)
    with pytest.raises(UsageError, match="is not the public key of"):
        load_signing_key(WeightsConfig(signing_key=private, trusted_key=others))


PRIVATE_PEM = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
PUBLIC_PEM = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
CURVE = generate_private_key(SECP256R1())

BAD_PRIVATE = {
    "empty": b"",
    "text": b"nothing",
    "noise": bytes(range(256)),
    "cut short": PRIVATE_PEM[:-40],
    "no key inside": b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    "public": PUBLIC_PEM,
    "with a password": KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")),
    "not Ed25519": CURVE.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    "not there": None,
}
BAD_PUBLIC = {
    "empty": b"",
    "text": b"nothing",
    "noise": bytes(range(256)),
    "cut short": PUBLIC_PEM[:-40],
    "private": PRIVATE_PEM,
    "not Ed25519": CURVE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    "not there": None,
}


@pytest.mark.parametrize(
    ("load", "content"),
    [pytest.param(private_key, content, id=f"private, {how}") for how, content in BAD_PRIVATE.items()]
    + [pytest.param(public_key, content, id=f"public, {how}") for how, content in BAD_PUBLIC.items()],
)
def test_invalid_key_file_is_reported_with_the_fix(load: object, content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    assert callable(load)
    with pytest.raises(UsageError) as raised:
        load(file)
    sentence = str(raised.value)
    assert sentence.startswith(str(file))
    assert "rose keys" in sentence
    assert "\n" not in sentence
    assert ". " not in sentence
