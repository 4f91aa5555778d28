"""A secured Apache Kafka node on loopback: TLS, SCRAM-SHA-512 authentication, and access by ACLs only.

The node serves tests and measurements of rights. A production cluster has its own certificates.

Keeps true
- Every listener is encrypted. Clients authenticate with SCRAM; the node authenticates to its controller with its
  certificate.
- Only the node's own user has all rights. Another user has the rights that `allow` has given.
- A right that was given or taken away is in effect when the call returns.

Example:
    with start_secured(folder, kafka_home=home) as node:
        create_topics(node.settings(), Partitions())
        router = node.settings_of("rose-router")
        node.allow("rose-router", acls(ROUTER))
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from rose.topics.acl import Acl, Operation, Resource
from rose.topics.admin import ADMIN_SECONDS
from rose.topics.local_broker import HOST, LONE_JAVA, Addition, Broker, BrokerFailed, free_ports, lone_node
from rose.topics.settings import BusSettings

ADMIN_USER = "admin"
"""The node's own user."""

NODE_NAME = "node"
"""The common name of the node's certificate."""

VALID_DAYS = 30
"""Validity of the certificates."""

ITERATIONS = 4096
"""SCRAM iterations: the fewest that Kafka accepts. Random passwords gain nothing from more."""

COUNTS_SECONDS = 30.0
"""Time that a changed right may take to be in effect."""

LOOK_SECONDS = 0.02

_OPERATIONS = {operation: AclOperation[operation.name] for operation in Operation}

_RESOURCES = {
    Resource.TOPIC: ResourceType.TOPIC,
    Resource.GROUP: ResourceType.GROUP,
    Resource.TRANSACTIONAL_ID: ResourceType.TRANSACTIONAL_ID,
    Resource.CLUSTER: ResourceType.BROKER,
}


class SecuredNode:
    """A running node, made by `start_secured`. As a context manager it stops the node."""

    def __init__(self, broker: Broker, ca: Path) -> None:
        self.broker = broker
        self.ca = ca
        """PEM file of the certificate authority that clients trust."""
        self._admin = AdminClient(broker.settings().client("rose-secured"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.broker.stop()

    def settings(self, namespace: str = "") -> BusSettings:
        """Settings for clients of the node's own user, which has all rights."""
        return self.broker.settings(namespace)

    def settings_of(self, user: str, namespace: str = "") -> BusSettings:
        """Settings for clients of this user. Each call sets a new password."""
        password = secrets.token_hex(16)
        credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, ITERATIONS)
        requested = [UserScramCredentialUpsertion(user, credential, password.encode())]
        for changed in self._admin.alter_user_scram_credentials(requested, request_timeout=ADMIN_SECONDS).values():
            changed.result()
        return self.broker.settings(namespace, _signed_in(user, password, self.ca))

    def allow(self, user: str, rights: Iterable[Acl]) -> None:
        """Give a user these rights. Raises BrokerFailed."""
        given = [_binding(user, acl) for acl in rights]
        for created in self._admin.create_acls(given, request_timeout=ADMIN_SECONDS).values():
            created.result()
        self._await(user, lambda found: found.issuperset(given))

    def forbid(self, user: str, acl: Acl) -> None:
        """Take a right away from a user. Raises BrokerFailed."""
        taken = _binding(user, acl)
        requested = AclBindingFilter(
            taken.restype,
            taken.name,
            taken.resource_pattern_type,
            taken.principal,
            taken.host,
            taken.operation,
            taken.permission_type,
        )
        for deleted in self._admin.delete_acls([requested], request_timeout=ADMIN_SECONDS).values():
            deleted.result()
        self._await(user, lambda found: taken not in found)

    def _await(self, user: str, done: Callable[[set[AclBinding]], bool]) -> None:
        """Wait until the node has the user's rights from its controller. Raises BrokerFailed after COUNTS_SECONDS."""
        of_user = AclBindingFilter(
            ResourceType.ANY,
            None,
            ResourcePatternType.ANY,
            f"User:{user}",
            None,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        deadline = time.monotonic() + COUNTS_SECONDS
        while not done(set(self._admin.describe_acls(of_user, request_timeout=ADMIN_SECONDS).result())):
            if time.monotonic() > deadline:
                raise BrokerFailed(f"{self.broker.name} does not go by the rights of {user}")
            time.sleep(LOOK_SECONDS)


def start_secured(
    data_folder: Path, *, kafka_home: Path, audit: bool = False, java: Sequence[str] = LONE_JAVA
) -> SecuredNode:
    """Start a node with its data, keys and log in `data_folder`, and wait until it answers.

    `audit`: whether the node logs the requests that it allows, and not only those that it refuses. While the node is
    formatted, its user's password is among the arguments of a process, because Kafka's tool has no other input for it.
    Call this from a thread that lives as long as the node should. Raises BrokerFailed.
    """
    data_folder = data_folder.resolve()
    keys = data_folder / "keys"
    keys.mkdir(parents=True)
    data_folder.chmod(0o700)  # the node's settings contain its user's password
    _make_certificates(keys)
    password = secrets.token_hex(16)
    settings = Path(__file__).with_name("secured.properties.in").read_text(encoding="utf-8")
    words = {"KEYS": str(keys), "ADMIN": ADMIN_USER, "PASSWORD": password, "NODE_NAME": NODE_NAME}
    for word, value in words.items():
        settings = settings.replace(f"@{word}@", value)
    addition = Addition(
        settings=settings,
        logging=f"      - name: kafka.authorizer.logger\n        level: {'DEBUG' if audit else 'INFO'}\n",
        format_options=("--add-scram", f"SCRAM-SHA-512=[name={ADMIN_USER},password={password}]"),
        client=_signed_in(ADMIN_USER, password, keys / "ca.pem"),
    )
    [port] = free_ports(1)
    broker = Broker(lone_node(data_folder, port, kafka_home, java, addition), data_folder, port)
    broker.launch()
    broker.await_ready()
    return SecuredNode(broker, keys / "ca.pem")


def _signed_in(user: str, password: str, ca: Path) -> dict[str, str]:
    """Return librdkafka settings with which a client authenticates as this user."""
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": user,
        "sasl.password": password,
        "ssl.ca.location": str(ca),
    }


def _binding(user: str, acl: Acl) -> AclBinding:
    return AclBinding(
        _RESOURCES[acl.resource],
        acl.name,
        ResourcePatternType.PREFIXED if acl.prefixed else ResourcePatternType.LITERAL,
        f"User:{user}",
        "*",
        _OPERATIONS[acl.operation],
        AclPermissionType.ALLOW,
    )


def _make_certificates(folder: Path) -> None:
    """Write ca.pem, a certificate authority whose key is not kept, and node.pem, the node's certificate and key."""
    authority, own = generate_private_key(SECP256R1()), generate_private_key(SECP256R1())
    issuer = _name("rose-test-ca")
    root = _certificate(issuer, issuer, authority).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    node = _certificate(_name(NODE_NAME), issuer, own).add_extension(
        x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address(HOST))]), False
    )
    (folder / "ca.pem").write_bytes(root.sign(authority, SHA256()).public_bytes(Encoding.PEM))
    key = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "node.pem").touch(mode=0o600)
    (folder / "node.pem").write_bytes(key + node.sign(authority, SHA256()).public_bytes(Encoding.PEM))


def _certificate(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=VALID_DAYS))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
