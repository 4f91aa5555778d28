"""librdkafka settings that ROSE relies on, which a user must not change.

Keeps true: a setting that would lose records, read uncommitted records, stop progress or end in a traceback is refused
with a sentence before a client is made. Any other setting is passed to librdkafka and overrides ROSE's own.

Pure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rose.schemas.errors import UsageError
from rose.topics.catalog import MAX_DEAD_LETTER_BYTES

MAX_IN_FLIGHT = 5
"""Most requests in flight that librdkafka allows for an idempotent producer."""


MAX_TRANSACTION_MILLISECONDS = 60_000
"""Longest transaction timeout: as long as a reader waits for the end of a transaction."""

MIN_DELIVERY_MILLISECONDS = 1_000
"""Least delivery timeout: a running broker may take this long to store a record."""

ADDRESS = ("bootstrap.servers", "metadata.broker.list")
"""librdkafka's names for the address of a broker."""


@dataclass(frozen=True, slots=True)
class RequiredSetting:
    """The values that a setting may have."""

    names: tuple[str, ...]
    """All of librdkafka's names for the setting."""
    fits: Callable[[str], bool]
    """Whether a value, in lower case, is allowed."""
    requirement: str
    """The requirement with its reason, for the message."""


def _one_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


def _number(minimum: int, maximum: int) -> Callable[[str], bool]:
    return lambda value: value.isdecimal() and len(value) < 20 and minimum <= int(value) <= maximum


_TRUE, _FALSE, _NEVER = _one_of("true", "t", "1"), _one_of("false", "f", "0"), _one_of()

REQUIRED_SETTINGS = (
    RequiredSetting(("enable.idempotence",), _TRUE, "must be true: records would be lost or doubled"),
    RequiredSetting(("acks", "request.required.acks"), _one_of("all", "-1"), "must be all: records would be lost"),
    RequiredSetting(
        ("max.in.flight", "max.in.flight.requests.per.connection"),
        _number(1, MAX_IN_FLIGHT),
        f"must be from 1 to {MAX_IN_FLIGHT}: producers are idempotent",
    ),
    RequiredSetting(
        ("message.max.bytes",),
        _number(MAX_DEAD_LETTER_BYTES, 10**9),
        f"must be from {MAX_DEAD_LETTER_BYTES} to {10**9}: ROSE's records would be refused",
    ),
    RequiredSetting(
        ("enable.auto.commit",), _FALSE, "must be false: offsets are committed with what was made of the records"
    ),
    RequiredSetting(
        ("isolation.level",), _one_of("read_committed"), "must be read_committed: work would be counted twice"
    ),
    RequiredSetting(
        ("auto.offset.reset",),
        _one_of("earliest", "smallest", "beginning"),
        "must be earliest: records would be passed over",
    ),
    RequiredSetting(
        ("partition.assignment.strategy",), _one_of("range"), "must be range: a home's topics belong to one worker"
    ),
    RequiredSetting(("group.protocol",), _one_of("classic"), "must be classic"),
    RequiredSetting(("allow.auto.create.topics",), _FALSE, "must be false: only `rose topics create` makes topics"),
    RequiredSetting(
        ("message.timeout.ms", "delivery.timeout.ms"),
        lambda value: value == "0" or _number(MIN_DELIVERY_MILLISECONDS, 2**31 - 1)(value),
        f"must be 0 or at least {MIN_DELIVERY_MILLISECONDS}: records would be given up before they are stored",
    ),
    RequiredSetting(("delivery.report.only.error",), _FALSE, "must be false: nobody would hear what is stored"),
    RequiredSetting(
        ("transaction.timeout.ms",),
        _number(1, MAX_TRANSACTION_MILLISECONDS),
        f"must be at most {MAX_TRANSACTION_MILLISECONDS}: that of a dead worker holds up all who read behind it",
    ),
    RequiredSetting(
        ("group.id", "group.instance.id"), _NEVER, "is what ROSE itself says: groups are told apart by --namespace"
    ),
    RequiredSetting(("transactional.id",), _NEVER, "is what ROSE itself says: writers are told apart by --namespace"),
    RequiredSetting(
        ("on_commit", "on_delivery", "logger", "default.topic.config", "interceptors", "opaque"),
        _NEVER,
        "cannot be said in text",
    ),
)
"""The requirements, one for each setting."""

CALLBACK_SUFFIX = "_cb"
"""Suffix of librdkafka's callback settings."""


def check_required_settings(properties: Mapping[str, str], address: str) -> None:
    """Raise UsageError for the first setting that is not allowed, or that names a broker other than `address`."""
    for name, value in properties.items():
        if name in ADDRESS and value != address:
            raise UsageError(f"broker.properties: {name} names a broker: do that by --bootstrap-server alone")
        if name.endswith(CALLBACK_SUFFIX):
            raise UsageError(f"broker.properties: {name} cannot be said in text")
        for relied in REQUIRED_SETTINGS:
            if name in relied.names and not relied.fits(value.lower()):
                raise UsageError(f"broker.properties: {name} {relied.requirement}")
