"""Users that follow recordings: engines are as busy as recorded, minute by minute, and contradictions are refused."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.recorded_load import offered_load, recorded_minutes
from rose.pipeline.simulation.scenario import Elastic, Lending, Pool, Scenario, Tasks, Users, load_scenario
from rose.schemas.errors import UsageError
from tests.support.recording_fixtures import BEGAN, write_recording
from tests.support.simulated_scenario import TINY, write_scenario

PROFILE = "qwen3-8b-h100-tp1"


def busy_by_minute(recording: Path, *, engines: int, minutes: int, seed: int = 1) -> list[float]:
    """Return the busy share of serving engines in each minute of a simulation without lending."""
    fleet = Fleet(
        Scenario(
            name="recorded",
            seed=seed,
            dedicated=(Pool(profile=PROFILE, count=0),),
            lending=Lending(serving_profile=PROFILE, guest_profile=PROFILE, count=engines),
            users=Users(recording=(str(recording),)),
            tasks=Tasks(groups=1),
            elastic=Elastic(how="none"),
        )
    )
    found = [0.0]
    fleet.events.repeat(60.0, lambda: found.append(sum(each.engine.busy_seconds for each in fleet.serving)), first=60.0)
    fleet.events.run_until(lambda: len(found) > minutes, latest=math.inf)
    return [(after - before) / 60 / engines for before, after in pairwise(found)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(("engines", "minutes", "tolerance"), [(1, 60, 0.06), (20, 5, 0.06)])
def test_engines_are_as_busy_as_recorded(engines: int, minutes: int, tolerance: float, tmp_path: Path) -> None:
    """The first minute of each level is left out: the requests of the minute before end in it."""
    shares = (0.1, 0.7, 0.4)
    file = write_recording(tmp_path / "day.csv", [share for share in shares for _ in range(minutes)])
    found = busy_by_minute(file, engines=engines, minutes=3 * minutes)
    levels = [mean(found[place * minutes + 1 : (place + 1) * minutes]) for place in range(3)]
    print(levels)
    assert levels == pytest.approx(shares, abs=tolerance)


def test_recording_begins_again_after_its_last_minute(tmp_path: Path) -> None:
    file = write_recording(tmp_path / "day.csv", [0.0, 0.0, 0.8, 0.8])
    found = busy_by_minute(file, engines=20, minutes=8)
    assert max(found[1], found[5]) < 0.05 and min(found[3], found[7]) > 0.6


def test_minutes_of_several_servers_are_those_of_the_clock(tmp_path: Path) -> None:
    first = write_recording(tmp_path / "first.csv", [0.2, 0.4])
    second = write_recording(tmp_path / "second.csv", [0.6, 0.8], first_minute=1)
    later = write_recording(tmp_path / "later.csv", [0.1], first_minute=90)
    minutes = recorded_minutes(list(map(str, (first, second, later))))
    assert [each.minute - BEGAN // 60 for each in minutes] == [0, 1, 2, 90]
    assert [each.busy for each in minutes] == pytest.approx([0.2, 0.5, 0.8, 0.1])


def test_number_of_requests_tells_the_load_of_a_minute_without_idle_time(tmp_path: Path) -> None:
    (full,) = recorded_minutes([str(write_recording(tmp_path / "full.csv", [1.0], running=12))])
    assert full.load(1) == full.load(16) == 12.0
    (few,) = recorded_minutes([str(write_recording(tmp_path / "few.csv", [1.0], running=1))])
    assert few.load(1) == offered_load(0.98, 1)


def test_one_engine_is_busy_as_in_the_formula_and_many_need_less_than_that() -> None:
    assert offered_load(0.5, 1) == pytest.approx(math.log(2))
    loads = [offered_load(0.5, engines) for engines in (1, 2, 8, 64)]
    assert loads == sorted(loads, reverse=True) and loads[-1] == pytest.approx(0.5, abs=1e-3)


def scenario(folder: Path, users: str) -> Path:
    return write_scenario(folder, text=TINY.replace("busy = 0.2", users))


def test_paths_of_recordings_are_relative_to_the_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recording(tmp_path / "one.csv", [0.5])
    write_recording(tmp_path / "two.csv", [0.5])
    monkeypatch.chdir("/")
    one = load_scenario(scenario(tmp_path, 'recording = "one.csv"'))["rose"]
    assert one.users is not None and one.users.recording == (str(tmp_path / "one.csv"),)
    both = load_scenario(scenario(tmp_path, 'recording = ["one.csv", "two.csv"]'))["rose"]
    assert both.users is not None and len(both.users.recording) == 2


@pytest.mark.parametrize(
    ("users", "words"),
    [
        ('busy = 0.2\nrecording = "day.csv"', "either `busy` or `recording`"),
        ("prompt_tokens = 100", "either `busy` or `recording`"),
        ("recording = []", "either `busy` or `recording`"),
        ('recording = "day.csv"\nminute_peak = 3', "`minute_peak` contradicts"),
        ('recording = "none.csv"', "none.csv cannot be read"),
        ("recording = 3", "users.recording"),
        ('recording = "wrong.csv"', "wrong.csv, line 8"),
    ],
)
def test_contradictory_or_malformed_recording_is_refused(users: str, words: str, tmp_path: Path) -> None:
    write_recording(tmp_path / "day.csv", [0.5])
    wrong = write_recording(tmp_path / "wrong.csv", [0.5])
    wrong.write_text(wrong.read_text() + "1,2,3\n")
    with pytest.raises(UsageError, match=words):
        load_scenario(scenario(tmp_path, users))
