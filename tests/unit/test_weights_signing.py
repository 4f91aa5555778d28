"""Signed manifests: only what the key's owner signed is taken, and key files that are none are one sentence."""

import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import UsageError
from schemas.weights import WeightManifest
from schemas.wire import decode, encode
from tests.unit.weights_world import Shelf, random_tensors, with_slice
from workers.weights.publish import merge
from workers.weights.refusals import Refusal, VersionRefused
from workers.weights.signing import check_signature, make_keys, private_key, public_key, sign

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


def manifest() -> WeightManifest:
    tensors = random_tensors({"a": (4, 4), "b": (3,)}, torch.bfloat16, np.random.default_rng(1))
    return Shelf().store(tensors, 3)


SIGNED = sign(manifest(), KEY)


def is_taken(candidate: WeightManifest, key: Ed25519PrivateKey = KEY) -> bool:
    try:
        check_signature(candidate, key.public_key())
    except VersionRefused as refused:
        assert refused.refusal is Refusal.BAD_SIGNATURE
        return False
    return True


def test_what_was_signed_is_taken_after_it_travelled() -> None:
    assert is_taken(SIGNED)
    assert is_taken(decode(WeightManifest, encode(SIGNED)))
    assert is_taken(sign(SIGNED, KEY))
    assert is_taken(sign(merge([manifest()]), KEY))
    assert msgspec.structs.replace(SIGNED, signature=b"") == manifest()


def test_another_key_or_none_is_refused_and_the_reason_says_which() -> None:
    assert not is_taken(SIGNED, OTHER_KEY)
    assert not is_taken(sign(manifest(), OTHER_KEY))
    assert is_taken(sign(sign(manifest(), OTHER_KEY), KEY))
    with pytest.raises(VersionRefused, match="signed by nobody"):
        check_signature(manifest(), KEY.public_key())
    with pytest.raises(VersionRefused, match="another key, or changed"):
        check_signature(SIGNED, OTHER_KEY.public_key())


@pytest.mark.parametrize(
    "changed",
    [
        msgspec.structs.replace(SIGNED, model_id="n"),
        msgspec.structs.replace(SIGNED, version=4),
        msgspec.structs.replace(SIGNED, base_version=2),
        msgspec.structs.replace(SIGNED, step=4),
        msgspec.structs.replace(SIGNED, tensors=SIGNED.tensors[::-1]),
        msgspec.structs.replace(SIGNED, slices=SIGNED.slices[1:]),
        msgspec.structs.replace(SIGNED, digest=bytes(16)),
        msgspec.structs.replace(SIGNED, published_at=1.0),
        msgspec.structs.replace(SIGNED, files=("anchor-m.3.0",)),
        with_slice(SIGNED, 0, digest=bytes(16)),
        with_slice(SIGNED, 0, base_digest=bytes(15) + b"x"),
        with_slice(SIGNED, 0, chunks=(msgspec.structs.replace(SIGNED.slices[0].chunks[0], offset=9),)),
        with_slice(SIGNED, 0, chunks=(msgspec.structs.replace(SIGNED.slices[0].chunks[0], digest=bytes(16)),)),
    ],
)
def test_a_change_of_any_field_is_refused(changed: WeightManifest) -> None:
    assert changed != SIGNED
    assert not is_taken(changed)


@settings(max_examples=200)
@given(st.binary(max_size=64).filter(lambda signature: signature != SIGNED.signature))
def test_no_other_signature_is_taken(signature: bytes) -> None:
    assert not is_taken(msgspec.structs.replace(SIGNED, signature=signature))


@given(st.integers(0, 511))
def test_a_signature_with_one_other_bit_is_refused(bit: int) -> None:
    signature = bytearray(SIGNED.signature)
    signature[bit // 8] ^= 1 << bit % 8
    assert not is_taken(msgspec.structs.replace(SIGNED, signature=bytes(signature)))


def test_keys_that_were_made_sign_and_check(tmp_path: Path) -> None:
    file = tmp_path / "trainer.pem"
    public = make_keys(file)
    assert public == tmp_path / "trainer.pem.pub"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    check_signature(sign(manifest(), private_key(file)), public_key(public))
    assert b"PRIVATE" not in public.read_bytes()


@pytest.mark.parametrize("there", ["trainer.pem", "trainer.pem.pub"])
def test_no_key_is_ever_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_bytes(b"precious")
    with pytest.raises(UsageError, match="cannot write keys"):
        make_keys(tmp_path / "trainer.pem")
    assert (tmp_path / there).read_bytes() == b"precious"


def test_where_keys_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write keys"):
        make_keys(tmp_path / "no" / "folder" / "trainer.pem")


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
def test_a_file_that_is_no_key_is_one_sentence_with_the_fix(
    load: object, content: bytes | None, tmp_path: Path
) -> None:
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
