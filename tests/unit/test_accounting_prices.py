"""The section `prices` of the configuration."""

from pathlib import Path

import pytest

from rose.pipeline.accounting.prices import DeviceClass, Prices
from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from tests.support.config_fixtures import in_file, refusal

COMPLETE = '[prices]\ncurrency = "USD"\ndedicated = 2.0\nborrowed = 0.5\ntrainer = 3\n'


def test_prices_of_a_file_are_those_of_device_hours(tmp_path: Path) -> None:
    prices = load(in_file(tmp_path, COMPLETE + 'borrowed_by_device = { "NVIDIA H20" = 0.25 }\n')).settings.prices
    assert prices.cost(DeviceClass.DEDICATED, "cpu", 1800.0) == 1.0
    assert prices.cost(DeviceClass.BORROWED, "NVIDIA H20", 3600.0) == 0.25
    assert prices.cost(DeviceClass.TRAINER, "", 7200.0) == 6.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[prices]\ncurrency = "USD"\ndedicated = 2.0\n', "a price is missing: borrowed, trainer; set dedicated"),
        ('[prices]\ncurrency = "USD"\n', "a price is missing: dedicated, borrowed, trainer"),
        ("[prices]\ndedicated_by_device = { H20 = 1.0 }\n", "a price is missing: dedicated, borrowed, trainer"),
        (COMPLETE.replace('"USD"', '""'), "currency ('') must be 1 to 16 printable characters"),
        (COMPLETE.replace("0.5", "-1"), "borrowed (-1.0) must be from 0 to"),
        (COMPLETE.replace("0.5", "nan"), "borrowed (nan) must be from 0 to"),
        (COMPLETE.replace("0.5", "1e10"), "borrowed (10000000000.0) must be from 0 to"),
        (COMPLETE + "dedicated_by_device = { H20 = -1.0 }\n", "the price of 'H20' (-1.0) must be from 0 to 1000000000"),
        (COMPLETE + "dedicated_by_device = { H20 = inf }\n", "the price of 'H20' (inf) must be from 0 to 1000000000"),
    ],
)
def test_incomplete_or_impossible_prices_are_refused_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    found = refusal(in_file(tmp_path, text))
    assert sentence in found
    assert "prices" in found


def test_prices_are_left_out_by_default() -> None:
    assert load(Common()).settings.prices == Prices()
