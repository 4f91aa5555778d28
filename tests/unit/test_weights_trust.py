"""Trust in manifests: the bytes on the wire, signed by the trusted key, for this run and model."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.errors import UsageError
from rose.schemas.record import Record
from rose.schemas.weights import SIGNATURE_HEADER, WeightChunk, WeightManifest
from rose.schemas.wire import EncodedRecord, decode, encode, headers_of
from rose.topics.catalog import MANIFESTS
from rose.topics.records import Envelope, RawMessage
from rose.workers.weights.manifests import SignedManifest, manifest_key, sign_manifest
from rose.workers.weights.trust import Trust, UntrustedReason, run_id
from tests.support.weights_fixtures import RUN
from tests.unit.test_weights_version_numbers import manifest

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
TRUST = Trust("m", RUN, KEY.public_key())
SIGNED = sign_manifest(manifest(7), KEY)


def as_read(
    written: SignedManifest, *, wire: bytes | None = None, signature: bytes | None = None, offset: int = 0
) -> Envelope:
    """Return the manifest as a reader returns it, optionally with other bytes or another signature."""
    wire = written.encoded.wire if wire is None else wire
    headers = tuple(headers_of(written.encoded.record)) + tuple(written.headers.items())
    if signature is not None:
        headers = (*headers, (SIGNATURE_HEADER, signature))
    record = decode(WeightManifest, wire, headers)
    key = manifest_key(written.encoded.record)
    return Envelope(record, MANIFESTS, 0, offset, key, 0.0, RawMessage(key.encode(), wire, headers))


def plain(record: Record | None) -> Envelope:
    wire = None if record is None else encode(record)
    return Envelope(record, MANIFESTS, 0, 0, "key", 0.0, RawMessage(b"key", wire))


def test_manifest_signed_by_the_trusted_key_is_accepted() -> None:
    assert TRUST.verify(as_read(SIGNED)) == manifest(7)
    assert TRUST.verified(as_read(SIGNED)) == manifest(7)
    assert len(SIGNED.headers[SIGNATURE_HEADER]) == 64


def test_manifest_without_a_trusted_signature_is_refused() -> None:
    assert TRUST.verify(as_read(sign_manifest(manifest(7), None))) is UntrustedReason.UNSIGNED
    assert TRUST.verify(as_read(sign_manifest(manifest(7), OTHER_KEY))) is UntrustedReason.FORGED
    assert TRUST.verified(as_read(sign_manifest(manifest(2**50), None))) is None


def test_manifest_of_another_run_is_foreign_despite_the_same_key() -> None:
    for run in ("", "run", "other.:run", ":run2"):
        if run:
            foreign_manifest = as_read(sign_manifest(manifest(9, run=run), KEY))
            assert TRUST.verify(foreign_manifest) is UntrustedReason.STRANGER
            assert TRUST.verified_of_any_run(foreign_manifest) == manifest(9, run=run)
    assert TRUST.verify(as_read(sign_manifest(manifest(9, run="other.:run"), None))) is UntrustedReason.UNSIGNED
    assert TRUST.verified_of_any_run(as_read(sign_manifest(manifest(9), OTHER_KEY))) is None


def test_run_name_decides_without_a_trusted_key() -> None:
    anybody = Trust("m", RUN)
    for key in (None, KEY, OTHER_KEY):
        assert anybody.verified(as_read(sign_manifest(manifest(7), key))) == manifest(7)
    assert anybody.verify(as_read(sign_manifest(manifest(7, run="x"), None))) is UntrustedReason.STRANGER


def test_manifest_of_another_model_or_invalid_manifest_is_ignored() -> None:
    other = msgspec.structs.replace(manifest(7), model_id="n")
    chunk = WeightChunk(model_id="m", version=9, tensor="a", part=0, payload=b"")
    assert [TRUST.verify(each) for each in (as_read(sign_manifest(other, None)), plain(chunk), plain(None))] == [
        None
    ] * 3


def test_later_added_field_breaks_no_signature() -> None:
    """A newer trainer signs its bytes; an older receiver ignores the field and checks the bytes."""
    fields = msgspec.msgpack.decode(SIGNED.encoded.wire)
    wire = msgspec.msgpack.encode({**fields, "field_from_the_future": [1, 2]})
    newer = SignedManifest(EncodedRecord(SIGNED.encoded.record, wire), {SIGNATURE_HEADER: KEY.sign(wire)})
    assert TRUST.verified(as_read(newer)) == manifest(7)


@given(st.integers(0, 8 * len(SIGNED.encoded.wire) - 1))
def test_manifest_with_one_flipped_bit_is_refused(bit: int) -> None:
    wire = bytearray(SIGNED.encoded.wire)
    wire[bit // 8] ^= 1 << bit % 8
    # The decoded value does not matter: the signature is over the bytes.
    raw = RawMessage(b"", bytes(wire), tuple(SIGNED.headers.items()))
    assert TRUST.verify(Envelope(manifest(7), MANIFESTS, 0, 0, "", 0.0, raw)) is UntrustedReason.FORGED


@settings(max_examples=200)
@given(st.binary(min_size=1, max_size=80).filter(lambda signature: signature != SIGNED.headers[SIGNATURE_HEADER]))
def test_other_signatures_are_refused(signature: bytes) -> None:
    assert TRUST.verify(as_read(SIGNED, signature=signature)) is UntrustedReason.FORGED


def test_run_names_are_unique() -> None:
    assert run_id("", "demo") == ":demo"
    assert run_id("team.", "demo") == "team.:demo"
    assert len({run_id("a", "b"), run_id("", "a:b"), run_id("", "b"), run_id("a:", "b")}) == 4


@pytest.mark.parametrize("name", ["", "white space", "r" * 128, "a/b"])
def test_run_name_invalid_in_a_manifest_is_reported_in_one_sentence(name: str) -> None:
    if name:
        with pytest.raises(UsageError, match="together they may have 127 characters"):
            run_id("", name)


def test_manifest_key_depends_on_run_and_files() -> None:
    assert manifest_key(manifest(7)) == "m/:run/7"
    assert manifest_key(manifest(7)) != manifest_key(manifest(7, run="other.:run"))
    stored = [msgspec.structs.replace(manifest(7), files=files) for files in (("anchor-a", "anchor-b"), ("anchor-c",))]
    assert [manifest_key(each) for each in stored] == ["m/:run/7/anchor-a", "m/:run/7/anchor-c"]
