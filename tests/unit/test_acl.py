"""Rights of each role, and their form for administrators."""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import KafkaError
from typer.main import get_group

from rose.pipeline.cli.topics import topics as commands
from rose.schemas.errors import UsageError
from rose.topics.acl import (
    CLUSTER_NAME,
    PRODUCER,
    ROLES,
    Acl,
    Operation,
    Resource,
    Role,
    acls,
    kafka_acls,
    strimzi_user,
)
from rose.topics.catalog import MANIFESTS, OUTCOMES, PROMPTS
from rose.topics.errors import BusError, RightsMissing
from rose.topics.settings import BusSettings
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.receive import WeightReceiver
from rose.workers.weights.trust import make_keys, make_trust, require_signing_key

EVERY_ROLE = pytest.mark.parametrize("role", ROLES.values(), ids=list(ROLES))


@EVERY_ROLE
def test_acls_of_a_role_stay_within_the_namespace(role: Role) -> None:
    for acl in acls(role, "team."):
        assert acl.name.startswith("team.rose.") or (acl.resource, acl.name) == (Resource.CLUSTER, CLUSTER_NAME)
    assert len(set(acls(role))) == len(acls(role))


def test_producer_may_write_prompts_and_nothing_else() -> None:
    assert acls(PRODUCER) == [Acl(Operation.WRITE, Resource.TOPIC, PROMPTS.name)]


@pytest.mark.parametrize(
    ("operation", "topic", "may"),
    [
        (Operation.WRITE, MANIFESTS.name, {"trainer"}),
        (Operation.WRITE, OUTCOMES.name, {"trainer", "evaluator"}),
        (Operation.WRITE, PROMPTS.name, {"environment", "producer", "operator"}),
    ],
)
def test_deciding_topics_are_written_only_by_the_roles_named_here(
    operation: Operation, topic: str, may: set[str]
) -> None:
    assert {name for name, role in ROLES.items() if Acl(operation, Resource.TOPIC, topic) in acls(role)} == may


@EVERY_ROLE
def test_kafka_acl_commands_grant_the_acls_of_the_role(role: Role) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--add", action="store_true", required=True)
    parser.add_argument("--allow-principal", required=True)
    parser.add_argument("--operation", action="append", required=True)
    parser.add_argument("--resource-pattern-type", default="literal", choices=["literal", "prefixed"])
    parser.add_argument("--cluster", dest="cluster", action="append_const", const=CLUSTER_NAME)
    for resource in (Resource.TOPIC, Resource.GROUP, Resource.TRANSACTIONAL_ID):
        parser.add_argument(resource.flag, dest=resource.value, action="append")
    found = []
    for line in kafka_acls(role, "team.", "User:CN=one two"):
        parsed = parser.parse_args(shlex.split(line))
        assert parsed.allow_principal == "User:CN=one two"
        found += [
            Acl(Operation(operation), resource, name, prefixed=parsed.resource_pattern_type == "prefixed")
            for resource in Resource
            for name in getattr(parsed, resource.value) or ()
            for operation in parsed.operation
        ]
    assert sorted(map(str, found)) == sorted(map(str, acls(role, "team.")))
    assert set(found) == set(acls(role, "team."))


@EVERY_ROLE
def test_strimzi_user_grants_the_acls_of_the_role(role: Role) -> None:
    user: Any = yaml.safe_load(strimzi_user(role, "team.", cluster="kafka", name="rose-x"))
    assert (user["apiVersion"], user["kind"]) == ("kafka.strimzi.io/v1", "KafkaUser")
    assert user["metadata"] == {"name": "rose-x", "labels": {"strimzi.io/cluster": "kafka"}}
    assert user["spec"]["authentication"] == {"type": "scram-sha-512"}
    assert user["spec"]["authorization"]["type"] == "simple"
    found = set()
    for rule in user["spec"]["authorization"]["acls"]:
        assert set(rule) == {"resource", "operations"}
        resource = Resource(rule["resource"]["type"])
        name = rule["resource"].get("name", CLUSTER_NAME)
        prefixed = rule["resource"].get("patternType") == "prefix"
        found |= {Acl(Operation(operation), resource, name, prefixed) for operation in rule["operations"]}
    assert found == set(acls(role, "team."))


def test_missing_right_is_reported_in_one_sentence() -> None:
    write = str(Acl(Operation.WRITE, Resource.TOPIC, "rose.turns.completed.v1"))
    assert str(RightsMissing("executor", [write, write])) == (
        "this client has no right to Write on topic rose.turns.completed.v1 (and 1 more): "
        "`rose topics acl --role executor` prints the ACLs that a role needs"
    )
    rights = write, "Read on group rose.environment"
    for code, named in (
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, write),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, "Read on group rose.environment"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "some right to a transactional id"),
    ):
        error = BusError("storing a record", KafkaError(code), *rights)
        assert f"storing a record failed: this client has no right to {named}: `rose topics acl" in str(error)
        assert error.is_permanent


@pytest.mark.parametrize(
    ("properties", "authenticated"),
    [
        ({}, False),
        ({"security.protocol": "ssl"}, False),
        ({"security.protocol": "SSL", "ssl.certificate.location": "me.pem"}, True),
        ({"security.protocol": "SASL_SSL"}, True),
        ({"security.protocol": "sasl_plaintext"}, True),
    ],
)
def test_versions_are_signed_where_clients_authenticate(
    properties: dict[str, str], authenticated: bool, tmp_path: Path
) -> None:
    settings = BusSettings("127.0.0.1:1", "", properties)
    assert settings.authenticated == authenticated
    require_signing_key(settings, make_keys(tmp_path / "key"), "signing_key")
    if not authenticated:
        require_signing_key(settings, None, "signing_key")
        return
    with pytest.raises(UsageError, match=r"set weights\.signing_key; `rose keys FILE`"):
        require_signing_key(settings, None, "signing_key")
    with pytest.raises(UsageError, match=r"set weights\.trusted_key"):
        WeightReceiver(settings, make_trust(settings, "policy", WeightsConfig()), shapes={})


def test_help_of_the_command_names_exactly_the_roles() -> None:
    (option,) = (each for each in get_group(commands).commands["acl"].params if each.name == "role")
    words = set(re.findall(r"[a-z]+", str(getattr(option, "help", ""))))
    assert words - {"or", "also", "lenders"} == set(ROLES)
