"""Writes what of the chart follows from the code: `values.schema.json` and `files/topics.json`.

Keeps true: a value that the chart does not know is refused by its name, and so is a section or field of `config` that
no role has, or that the chart says itself. `python -m deploy.generate` writes; a test compares.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rose.pipeline.config.settings import SHARED, section_types
from rose.topics.catalog import (
    CATALOG,
    Partitions,
    PartitionSetting,
    Retention,
)

CHART = Path(__file__).parent / "chart"

SECTIONS = (
    "run",
    "topics",
    "model",
    "environment",
    "executor",
    "lender",
    "router",
    "control",
    "trainer",
    "evaluation",
    "weights",
    "tracing",
)
"""Sections of rose.toml that roles on a cluster read and that the chart does not write itself."""

OF_THE_CHART = {
    "run.folder",
    "run.environment_workers",
    "run.executors",
    "run.lenders",
    "topics.replication_factor",
    "executor.name",
    "executor.slot",
    "control.page_host",
    "control.page_port",
    "weights.signing_key",
    "weights.trusted_key",
}
"""Fields that other values say."""

REACHING = ("router", "control", "environment", "executor", "trainer", "evaluator", "lenders")
"""Roles that may be let reach more."""

CONFIDENTIAL = r"password|passphrase|secret|key\.pem|oauthbearer\.config"
"""In the names of librdkafka's settings that belong into a Secret."""

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "array", "items": TEXT}
ANYTHING: Schema = {"type": "object"}
"""Kubernetes' own: it refuses what is wrong in it."""

ANYTHINGS: Schema = {"type": "array", "items": ANYTHING}

JSON_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    list: "array",
    tuple: "array",
    dict: "object",
}


def closed(**properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def at_least(least: int) -> Schema:
    """Return the schema of an integer of at least `least`."""
    return {"type": "integer", "minimum": least}


def one_of(*words: str) -> Schema:
    """Return the schema of one of these words."""
    return {"enum": list(words)}


def role(**own: Schema) -> Schema:
    """The values of a role: its own, and those that every pod has."""
    return closed(
        **own,
        resources={"$ref": "#/$defs/resources"},
        gracePeriodSeconds=at_least(30),
        kafkaSecret=TEXT,
        nodeSelector=ANYTHING,
        tolerations=ANYTHINGS,
        affinity=ANYTHING,
        priorityClassName=TEXT,
        runtimeClassName=TEXT,
        podAnnotations=ANYTHING,
        extraEnv=ANYTHINGS,
    )


def of_field(annotation: Any) -> Schema:
    """Return the JSON Schema of a field of a section."""
    if isinstance(annotation, types.UnionType):
        annotation = next(each for each in typing.get_args(annotation) if each is not types.NoneType)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return of_section("", annotation)
    return {"type": JSON_TYPES[typing.get_origin(annotation) or annotation]}


def of_section(name: str, section: type) -> Schema:
    """Return the schema of a section, without the fields that the chart writes and those that follow other fields."""
    hints = typing.get_type_hints(section)
    fields = [field.name for field in dataclasses.fields(section)]
    left = {each for each in fields if f"{name}.{each}" in OF_THE_CHART or f"{name}.{each}" in SHARED}
    return closed(**{each: of_field(hints[each]) for each in fields if each not in left})


def values_schema() -> Schema:
    """Return the schema of the chart's values."""
    sections = section_types()
    values = closed(
        **{"global": ANYTHING},
        images=closed(
            repository=TEXT, tag=TEXT, pullPolicy=one_of("Always", "IfNotPresent", "Never"), pullSecrets=TEXTS
        ),
        kafka=closed(
            bootstrapServer={
                "type": "string",
                "pattern": r"^[^,\s]+:\d+(,[^,\s]+:\d+)*$",
                "description": "host:port[,host:port] of the brokers; has to be given",
            },
            namespace={"type": "string", "pattern": r"^[A-Za-z0-9._-]{0,100}$"},
            properties={
                "type": "object",
                "description": "no secrets: they would lie in the pods' arguments",
                "propertyNames": {"not": {"pattern": CONFIDENTIAL}},
                "additionalProperties": {"type": ["string", "number", "boolean"]},
            },
            secret=TEXT,
        ),
        topics=closed(
            create=one_of("hook", "strimzi", "none"),
            replicationFactor=at_least(1),
            strimziCluster=TEXT,
            strimziNamespace=TEXT,
        ),
        config=closed(**{name: of_section(name, sections[name]) for name in SECTIONS}),
        model=closed(mountPath=TEXT, volume=ANYTHING),
        weightKeys=closed(signingSecret=TEXT, trustedSecret=TEXT),
        router=role(replicas=at_least(1)),
        control=role(enabled=FLAG, pagePort=at_least(1)),
        environment=role(replicas=at_least(1), image=TEXT),
        executor=role(replicas=at_least(0), image=TEXT),
        trainer=role(enabled=FLAG, image=TEXT, ranks=at_least(1), storage=closed(size=TEXT, className=TEXT)),
        evaluator=role(enabled=FLAG, promptsVolume=ANYTHING),
        lenders=role(
            replicas=at_least(0),
            image=TEXT,
            python=TEXT,
            model=TEXT,
            flags={
                "type": "array",
                "description": "no keys: VLLM_API_KEY and HF_TOKEN, from a Secret, are extraEnv",
                "items": {**TEXT, "not": {"pattern": "^--(api[-_]key|hf[-_]token)"}},
            },
            port=at_least(1),
            startSeconds=at_least(10),
            drainSeconds=at_least(1),
            updateStrategy=one_of("OnDelete", "RollingUpdate"),
        ),
        metrics=closed(port=at_least(1), podMonitor=closed(enabled=FLAG, labels=ANYTHING, interval=TEXT)),
        networkPolicy=closed(
            enabled=FLAG,
            kafkaPorts={"type": "array", "items": at_least(1), "minItems": 1},
            metricsFrom=ANYTHINGS,
            usersFrom=ANYTHINGS,
            pageFrom=ANYTHINGS,
            egress=closed(**dict.fromkeys(REACHING, ANYTHINGS)),
        ),
        disruptionBudgets=FLAG,
        autoscaling=closed(
            enabled=FLAG,
            prometheus=TEXT,
            matchers=TEXT,
            minReplicas=at_least(1),
            maxReplicas=at_least(1),
            waitingTurnsPerExecutor=at_least(1),
            cooldownSeconds={**at_least(0), "maximum": 3600},
        ),
    )
    resources = closed(requests=ANYTHING, limits=ANYTHING, claims=ANYTHINGS)
    return {"$schema": "http://json-schema.org/draft-07/schema#", **values, "$defs": {"resources": resources}}


def topics() -> list[Schema]:
    """Every topic of the catalog, as the template of Strimzi's resources reads it."""
    partitions, retention = Partitions(), Retention()
    return [
        {
            "name": topic.name,
            "setting": "" if topic.partition_setting is PartitionSetting.ONE else topic.partition_setting.value,
            "partitions": partitions.count_of(topic.partition_setting),
            "retention": topic.retention_setting.value
            if topic.retention_setting is not None and topic.is_deleted_by_broker
            else "",
            "config": {
                **topic.config_with(retention),
                "max.message.bytes": str(topic.message_bytes),
            },
        }
        for topic in CATALOG
    ]


def generated() -> dict[Path, str]:
    """Return the content of each file."""
    made = {CHART / "values.schema.json": values_schema(), CHART / "files" / "topics.json": topics()}
    return {path: json.dumps(value, indent=1) + "\n" for path, value in made.items()}


if __name__ == "__main__":
    for path, text in generated().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
