"""The shell of the control app: authentication of its client, and the content of its page."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from faust.auth import SASLCredentials, SSLCredentials
from prometheus_client import REGISTRY

from rose.pipeline.control.app import credentials
from rose.pipeline.control.elasticity import ElasticityCore
from rose.pipeline.control.metrics import export_metrics
from rose.pipeline.control.page import page_of, state_of
from rose.schemas.errors import UsageError
from rose.schemas.grants import CapacityGrant, GrantSource
from tests.support.control_fixtures import CONFIG, DEDICATED, JOB, fleet, line, summary


def authority(folder: Path) -> Path:
    """A self-signed certificate."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    begins = datetime(2020, 1, 1, tzinfo=UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, begins, begins + timedelta(days=365_00))
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    file = folder / "ca.pem"
    file.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return file


def test_control_app_does_not_authenticate_without_security_settings() -> None:
    assert credentials({"socket.keepalive.enable": "true", "security.protocol": "PLAINTEXT"}) is None


def test_librdkafka_security_settings_map_to_faust_settings(tmp_path: Path) -> None:
    file = str(authority(tmp_path))
    found = credentials(
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanisms": "SCRAM-SHA-512",
            "sasl.username": "rose-control",
            "sasl.password": "hidden",
            "ssl.ca.location": file,
        }
    )
    assert isinstance(found, SASLCredentials) and found.ssl_context is not None
    assert (found.username, found.password, found.mechanism.value) == ("rose-control", "hidden", "SCRAM-SHA-512")
    assert (found.protocol.value, found.ssl_context.verify_mode) == ("SASL_SSL", ssl.CERT_REQUIRED)
    assert found.ssl_context.check_hostname and len(found.ssl_context.get_ca_certs()) == 1
    librdkafka_settings = {"security.protocol": "ssl", "ssl.ca.location": file}
    encrypted = credentials({**librdkafka_settings, "ssl.endpoint.identification.algorithm": "none"})
    assert isinstance(encrypted, SSLCredentials) and not encrypted.context.check_hostname
    assert encrypted.context.verify_mode is ssl.CERT_REQUIRED
    trusting = credentials({**librdkafka_settings, "enable.ssl.certificate.verification": "false"})
    assert isinstance(trusting, SSLCredentials) and trusting.context.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"security.protocol": "SASL_SSL", "sasl.oauthbearer.method": "oidc"}, "no sasl.oauthbearer.method"),
        ({"ssl.crl.location": "revoked.pem"}, "no ssl.crl.location"),
        ({"security.protocol": "TLS"}, "security.protocol is one of"),
        ({"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "GSSAPI"}, "GSSAPI"),
        ({"security.protocol": "ssl", "ssl.ca.location": "/there/is/none"}, "ca.location=/there/is/none.*: .*No such"),
    ],
)
def test_setting_without_a_faust_equivalent_is_refused_by_name(properties: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        credentials(properties)


def test_control_page_shows_decisions_with_reasons_and_escapes_input() -> None:
    simulation = fleet("a", "b")
    simulation.seconds(20, waiting=500)
    by_hand = CapacityGrant(
        worker="b", lend=False, kv_bytes=0, token_budget=0, granted_at=0.0, reason="<script>night</script>"
    )
    simulation.control.on_grant("b", by_hand, simulation.now, source=GrantSource.BY_HAND)
    state = state_of(simulation.control, reversed(simulation.log), simulation.now)
    one, other = state["lenders"]
    assert (one["told"], other["told"]) == ("lends", "by hand: parked")
    assert "turns wait: done in" in one["reason"] and state["cells"][0]["waiting_turns"] == 500
    page = page_of(state)
    assert one["reason"] in page and "&lt;script&gt;night" in page and "<script>" not in page
    assert page_of(state_of(ElasticityCore(CONFIG, JOB), (), 0.0)).count("None.") == 4


def test_exported_metrics_equal_the_core_counts_and_omit_silent_cells() -> None:
    control, now = ElasticityCore(CONFIG, JOB), 0.0

    def of(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"rose_control_{name}", labels)

    with export_metrics(control, lambda: now):
        assert (of("decides"), of("lenders", told="lends")) == (0, None)
        for _ in range(5):
            now += 1.0
            control.on_summary(summary(DEDICATED, line("a"), line("b"), waiting=500), now)
            control.tick(now)
        assert (of("decides"), of("cells"), of("woken_total")) == (1, 1, 2)
        assert (of("lenders", told="lends"), of("lenders", told="parked")) == (2, 0)
        now += 60.0
        assert (of("decides"), of("lenders", told="lends")) == (0, None)
