"""The catalog's keys are the keys of written records."""

import re

import msgspec
import pytest

from rose.schemas.grants import CapacityGrant, GrantSource, grant_key
from rose.schemas.turns import TurnDispatch, TurnRequest
from rose.schemas.weights import WeightManifest
from rose.topics.catalog import (
    CATALOG,
    DEAD_LETTERS,
    DEFAULT_RETENTION,
    GRANTS,
    MANIFESTS,
    OUTCOMES,
    RECORD_TOPICS,
    SAMPLES,
    Retention,
    Topic,
)
from rose.topics.dead_letters import HEADER_PREFIX, ORIGIN
from rose.workers.weights.manifests import manifest_key
from tests.golden.contract import keys_of
from tests.golden.examples import EXAMPLES


def fields_of(topic: Topic) -> set[str]:
    if topic.record is None:
        return {name.removeprefix(HEADER_PREFIX) for name in ORIGIN}
    request_fields = TurnRequest.__struct_fields__ if topic.record is TurnDispatch else ()
    file = ["file"] if topic.record is WeightManifest else []
    return {*topic.record.__struct_fields__, *request_fields, *file}


@pytest.mark.parametrize("topic", [*RECORD_TOPICS, DEAD_LETTERS[0]], ids=lambda topic: topic.name)
def test_record_keys_are_built_from_record_fields(topic: Topic) -> None:
    forms = keys_of(topic)
    assert set(re.findall(r"{(.*?)}", " ".join(forms))) <= fields_of(topic)
    assert len(set(forms)) == len(forms) and not re.search(r"[\[\]|]", "".join(forms))


def test_grant_has_one_key_per_source() -> None:
    (grant,) = (each for each in EXAMPLES if isinstance(each, CapacityGrant))
    keys = {form.format(worker=grant.worker) for form in keys_of(GRANTS)}
    assert keys == {grant_key(grant.worker, source) for source in GrantSource}


def test_manifest_has_one_key_with_its_anchor_file_and_one_without() -> None:
    (manifest,) = (each for each in EXAMPLES if isinstance(each, WeightManifest))
    plain, filed = keys_of(MANIFESTS)
    fields = msgspec.structs.asdict(manifest)
    for files, form in (((), plain), (("anchor-a", "anchor-b"), filed)):
        key = manifest_key(msgspec.structs.replace(manifest, files=files))
        assert key == form.format(**fields, file="anchor-a")


@pytest.mark.parametrize("topic", CATALOG, ids=lambda topic: topic.name)
def test_topic_is_compacted_or_has_a_retention(topic: Topic) -> None:
    config = topic.config_with(DEFAULT_RETENTION)
    assert ("retention.ms" in config) == (topic.retention_setting is not None) == ("delete" in config["cleanup.policy"])
    assert topic.is_deleted_by_broker == (config.get("retention.ms", "-1") != "-1")


def test_retention_setting_changes_only_topics_deleted_by_age() -> None:
    shorter = Retention(outcomes=4 * 3600.0, samples=3600.0)
    changed = {topic for topic in CATALOG if topic.config_with(shorter) != topic.config_with(DEFAULT_RETENTION)}
    assert changed == {OUTCOMES}, "ROSE deletes samples itself"
    assert OUTCOMES.config_with(shorter)["retention.ms"] == "14400000"
    assert OUTCOMES.config_with(shorter)["segment.ms"] == "1800000", "a segment closes before its records may go"
    assert SAMPLES.config_with(shorter)["retention.ms"] == "-1"
