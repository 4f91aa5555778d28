"""A secured node, a user per role with only the rights of that role, and the audit log of the node."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rose.topics.acl import ROLES, Acl, Operation, Resource, Role, acls
from rose.topics.settings import BusSettings
from tests.support.brokers import KAFKA, home_of
from tests.support.secured_node import SecuredNode, start_secured

_SAID = re.compile(
    r"Principal = User:(?P<user>\S+) is (?P<verdict>Allowed|Denied) operation = (?P<operation>\w+) "
    r"from host = \S+ on resource = (?P<kind>\w+):LITERAL:(?P<name>\S+) for request = (?P<request>\w+)"
)
"""Pattern of the node's audit log for each checked right."""

KINDS = {
    "Topic": Resource.TOPIC,
    "Group": Resource.GROUP,
    "TransactionalId": Resource.TRANSACTIONAL_ID,
    "Cluster": Resource.CLUSTER,
}
OPERATIONS = {operation.name: operation for operation in Operation}


@dataclass(frozen=True, slots=True)
class AuditedRight:
    """A right that a user exercised or was refused."""

    user: str
    allowed: bool
    operation: str
    resource: Resource
    name: str
    request: str


@dataclass(slots=True)
class Users:
    """The users of one namespace. Each role's user gets its rights at its first use."""

    node: SecuredNode
    namespace: str
    folder: Path
    """Folder of the password files."""
    _known: dict[str, BusSettings] = field(default_factory=dict)

    def name(self, role: Role) -> str:
        return f"{self.namespace}{role.name}"

    def settings(self, role: Role) -> BusSettings:
        """Return the settings with which a role reaches the node."""
        if role.name not in self._known:
            self._known[role.name] = self.node.settings_of(self.name(role), self.namespace)
            self.node.allow(self.name(role), acls(role, self.namespace))
        return self._known[role.name]

    def flags(self, role: Role) -> tuple[str, ...]:
        """Return the same settings as `rose` options."""
        settings, file = self.settings(role), self.folder / f"{role.name}.properties"
        file.touch(mode=0o600)
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.properties.items()))
        options = ("--bootstrap-server", settings.bootstrap, "--namespace", self.namespace)
        return (*options, "--command-config", str(file))

    def seen(self) -> Iterator[AuditedRight]:
        """Return the audited rights of the users of this namespace."""
        for match in _SAID.finditer(self.node.broker.log.read_text(errors="replace")):
            if match["user"].startswith(self.namespace):
                verdict, kind = match["verdict"] == "Allowed", KINDS[match["kind"]]
                yield AuditedRight(match["user"], verdict, match["operation"], kind, match["name"], match["request"])

    def unused(self) -> dict[str, set[str]]:
        """Return the unexercised rights of each role."""
        used: dict[str, set[AuditedRight]] = {}
        for seen in self.seen():
            used.setdefault(seen.user, set()).add(seen)
        return {
            role.name: idle
            for role in ROLES.values()
            if (
                idle := {
                    str(acl)
                    for acl in acls(role, self.namespace)
                    if not any(_uses(seen, acl) for seen in used.get(self.name(role), ()))
                }
            )
        }


def _uses(seen: AuditedRight, acl: Acl) -> bool:
    named = seen.name.startswith(acl.name) if acl.prefixed else seen.name == acl.name
    return seen.allowed and OPERATIONS.get(seen.operation) is acl.operation and seen.resource is acl.resource and named


def start_audited(folder: Path) -> SecuredNode:
    """Start a node that logs allowed requests. Skip the test if there is none to start."""
    home = home_of(KAFKA)
    assert home is not None
    return start_secured(folder, kafka_home=home, audit=True)


def rose(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder."""
    command = [sys.executable, "-P", "-m", "rose.pipeline.cli.main", *arguments]
    wide = os.environ | {"COLUMNS": "300"}
    return subprocess.run(command, cwd=folder, env=wide, capture_output=True, text=True, timeout=300, check=False)
