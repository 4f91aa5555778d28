"""Authentication of Faust's Kafka client (aiokafka), translated from librdkafka's settings.

Keeps true: a security setting without an equivalent in Faust is refused by name, so encryption or a check that was
asked for is never left out. Settings that do not concern security apply to librdkafka's clients only.
"""

import ssl
from collections.abc import Mapping
from pathlib import Path

from faust.auth import Credentials, SASLCredentials, SSLCredentials
from faust.types.auth import SASLMechanism

from rose.schemas.errors import UsageError

PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
MECHANISMS = (SASLMechanism.PLAIN, SASLMechanism.SCRAM_SHA_256, SASLMechanism.SCRAM_SHA_512)
ABOUT_SECURITY = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.", "https.")
KNOWN = (
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
    "enable.ssl.certificate.verification",
)


def credentials(properties: Mapping[str, str]) -> Credentials | None:
    """Faust's credentials for these librdkafka settings; None for plaintext without authentication.

    Raises UsageError for a setting or value that Faust's client does not support.
    """
    unknown = [name for name in properties if name.startswith(ABOUT_SECURITY) and name not in KNOWN]
    if unknown:
        raise UsageError(
            f"the control app has no {unknown[0]}: its Kafka client, Faust's, knows of librdkafka's settings of "
            f"security {', '.join(KNOWN)}"
        )
    protocol = properties.get("security.protocol", "plaintext").lower()
    if protocol not in PROTOCOLS:
        raise UsageError(f"security.protocol is one of {', '.join(PROTOCOLS)}, not {protocol!r}")
    context = _context(properties) if protocol.endswith("ssl") else None
    if not protocol.startswith("sasl_"):
        return None if context is None else SSLCredentials(context)
    mechanism = properties.get("sasl.mechanisms", properties.get("sasl.mechanism", "GSSAPI"))
    if mechanism not in [each.value for each in MECHANISMS]:
        known = ", ".join(each.value for each in MECHANISMS)
        raise UsageError(f"sasl.mechanisms is {mechanism!r}: the control app signs in by one of {known}")
    name, password = properties.get("sasl.username"), properties.get("sasl.password")
    return SASLCredentials(username=name, password=password, ssl_context=context, mechanism=mechanism)


def _context(properties: Mapping[str, str]) -> ssl.SSLContext:
    authorities = properties.get("ssl.ca.location", "")
    folder = authorities if Path(authorities).is_dir() and authorities else None
    file = authorities if authorities and authorities != "probe" and folder is None else None
    certificate, key = properties.get("ssl.certificate.location"), properties.get("ssl.key.location")
    try:
        context = ssl.create_default_context(cafile=file, capath=folder, cadata=properties.get("ssl.ca.pem"))
        if certificate:
            context.load_cert_chain(certificate, key, properties.get("ssl.key.password", ""))
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise UsageError(f"ssl.ca or ssl.certificate cannot be used: {error}") from None
    if properties.get("enable.ssl.certificate.verification", "true").lower() == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif properties.get("ssl.endpoint.identification.algorithm", "https").lower() == "none":
        context.check_hostname = False
    return context
