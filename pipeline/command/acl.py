"""`rose topics acl`: what a role's principal must be allowed, for whoever allows it."""

import re
import sys

from pipeline.command.config import load
from pipeline.command.options import Common
from schemas.errors import UsageError
from topics.acl import ROLES, kafka_acls, strimzi_user

USER = "User:"
"""What Kafka's principals begin with, unless a broker has its own kinds."""

OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""What Kubernetes takes as the name of an object."""


def print_acls(common: Common, name: str, principal: str | None, cluster: str | None) -> None:
    """Lines of options for kafka-acls.sh, or a KafkaUser. Raises UsageError."""
    role, namespace = ROLES.get(name), load(common).settings.broker.namespace
    if role is None:
        raise UsageError(f"there is no role {name}; there are {', '.join(ROLES)}")
    principal = principal or f"{USER}rose-{name}"
    kind, colon, user = principal.partition(":")
    if not (kind and colon and user):
        raise UsageError(f"--principal {principal}: write it as User:NAME, as the broker calls it")
    if cluster is None:
        for line in kafka_acls(role, namespace, principal):
            sys.stdout.write(f"{line}\n")
        return
    for value, flag in ((user, "--principal"), (cluster, "--strimzi")):
        if not OBJECT_NAME.fullmatch(value):
            raise UsageError(f"{flag} {value}: Kubernetes takes a-z 0-9 . - in the name of an object")
    sys.stdout.write(strimzi_user(role, namespace, cluster=cluster, name=user))
