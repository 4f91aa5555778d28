"""Reports of a receiver about refused versions, and their order; no broker is queried."""

from types import SimpleNamespace
from typing import cast

import pytest

from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
from rose.workers.weights import receive
from rose.workers.weights.checks import Refusal
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.receive import WeightReceiver
from rose.workers.weights.trust import make_trust
from tests.support.weights_fixtures import bare

NO_READER = cast(Reader, None)
"""A missing chunk reader: a version that is refused for its values is not fetched."""


def test_refused_versions_come_with_the_reason_of_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BusSettings("127.0.0.1:1", "", {})
    receiver = WeightReceiver(settings, make_trust(settings, "m", WeightsConfig()), shapes={"w": (2, 2)})
    refusals: list[tuple[int, str] | None] = []
    counts = receiver._count

    def count(refusal: Refusal) -> None:
        refusals.append(receiver.refused_newest)
        counts(refusal)

    monkeypatch.setattr(receiver, "_count", count)
    for version in (1, 2):
        receiver._lineage.on_manifest(bare(version), version)
    for _ in range(2):
        receiver._catch_up(NO_READER)
    assert sum(receiver.refusals.values()) == 2, "each once"
    assert refusals == [receiver.refused_newest] * 2
    assert receiver.refused_newest is not None and receiver.refused_newest[0] == 2


def test_fetch_settings_of_the_user_apply_to_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_sizes: list[object] = []

    def reader(settings: BusSettings, client_id: str, **other: object) -> SimpleNamespace:
        fetch_sizes.append({**settings.consumer(client_id, "log"), **other}.get("fetch.max.bytes"))
        return SimpleNamespace(assign=lambda _: None, close=lambda: None)

    monkeypatch.setattr(receive, "Reader", reader)
    for properties in ({}, {"fetch.max.bytes": "8000000"}):
        settings = BusSettings("127.0.0.1:1", "", properties)
        receiver = WeightReceiver(settings, make_trust(settings, "m", WeightsConfig()), shapes={"w": (2, 2)})
        receiver._stopping.set()
        receiver._follow()
    assert fetch_sizes == [None, receive.SMALL_FETCHES["fetch.max.bytes"], "8000000", "8000000"]
