"""The estimate of a fleet: figures follow the recordings, scale to a day, and stand on the page and the terminal."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from rose.pipeline.simulation.estimate import Assumptions, Estimate, estimate
from rose.pipeline.simulation.estimate_page import assumptions, estimate_page, headline, tiles, users, verdict
from tests.support.recording_fixtures import BEGAN, write_recording

ROOT = Path(__file__).parents[2]

PROFILE = "qwen3-8b-h100-tp1"

ASSUMED = Assumptions(
    serving_profile=PROFILE,
    guest_profile=PROFILE,
    prompt_tokens=1020,
    new_tokens=129,
    ttft_seconds=0.5,
    tpot_seconds=0.15,
)


def estimated(*files: Path) -> Estimate:
    return estimate(files, ASSUMED, lambda *_: nullcontext())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Estimate:
    """Two servers: a calm one, and a busier one that was recorded for the last minutes only."""
    folder = tmp_path_factory.mktemp("fleet")
    calm = write_recording(folder / "calm.csv", [0.0, 0.1, 0.1, 0.1])
    return estimated(calm, write_recording(folder / "busy.csv", [0.6, 0.6], first_minute=2))


def test_minutes_of_the_servers_are_aligned_by_the_clock(found: Estimate) -> None:
    assert [each.minute - BEGAN // 60 for each in found.minutes] == [0, 1, 2, 3]
    assert [each.servers for each in found.minutes] == [1, 1, 2, 2]
    assert [each.busy for each in found.minutes] == pytest.approx([0.0, 0.1, 0.35, 0.35])
    assert found.recorded_hours == pytest.approx(0.1)
    assert (found.busy, found.kv_most) == (pytest.approx((0.075 + 0.6) / 2), pytest.approx(0.3))


def test_guest_computes_in_the_idle_time_and_never_more(found: Estimate) -> None:
    """The first minute has the wake of the guest, and its last steps end a little after their minute."""
    for each in found.minutes[1:]:
        assert 0.4 * (1 - each.busy) < each.lent < 1.0
    assert 0.0 < found.lent_share < 1 - min(found.busy, found.simulated_busy) + 0.02
    assert found.lent_gpu_hours_per_day == pytest.approx(24 * found.gpus * found.lent_share)
    assert found.simulated_busy == pytest.approx(found.busy, abs=0.12)


def test_figures_of_a_day_scale_the_recorded_time_of_each_server(tmp_path: Path) -> None:
    one = estimated(write_recording(tmp_path / "one.csv", [0.0, 0.0, 0.0]))
    tokens = sum(each.tokens for each in one.minutes)
    assert one.tokens_per_day == pytest.approx(tokens * 1440 / 3) and tokens > 0
    (row, *_) = one.minutes
    longer = estimated(tmp_path / "one.csv", write_recording(tmp_path / "two.csv", [0.0]))
    assert longer.minutes[0].servers == 2 and longer.minutes[0].tokens > row.tokens
    second = longer.minutes[0].tokens - row.tokens
    assert longer.tokens_per_day == pytest.approx(tokens * 1440 / 3 + second * 1440)


def test_idle_fleet_has_no_figures_of_users(tmp_path: Path) -> None:
    idle = estimated(write_recording(tmp_path / "idle.csv", [0.0]))
    assert idle.lending is None and idle.alone is None
    assert "nothing is known of the promise" in estimate_page(idle)


def test_same_users_are_served_alone_and_while_lending(found: Estimate) -> None:
    assert found.alone is not None and found.lending is not None
    assert abs(found.alone.requests - found.lending.requests) <= 2, "requests that end at the very end"
    assert found.lending.ttft_p99 >= found.alone.ttft_p99 > 0


def test_page_holds_the_figures_and_loads_nothing(found: Estimate) -> None:
    page = estimate_page(found).replace("&#39;", "'")
    body = page[page.index("<body>") :]
    shown = [headline(found), verdict(found), *(text for tile in tiles(found) for text in tile)]
    shown += [text for row in (*users(found), *assumptions(found)) for text in row]
    for text in shown:
        assert text in body, text
    assert PROFILE in body and 'id="shares"' in body
    assert "<link" not in page and "src=" not in body


def rose(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rose.pipeline.cli.main", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)


def test_command_prints_and_writes_the_same_figures_twice(tmp_path: Path) -> None:
    file = write_recording(tmp_path / "day.csv", [0.2])
    written = []
    for run in ("1", "2"):
        ran = rose("estimate", file, "--serving-profile", PROFILE, "--json", tmp_path / run)
        assert ran.returncode == 0, ran.stderr
        written.append((tmp_path / run).read_bytes())
    figures = json.loads(written[0])
    assert written[0] == written[1]
    assert f"{figures['tokens_per_day'] / 1e6:,.1f} million tokens a day" in ran.stdout
    assert figures["assumed"]["guest_profile"] == PROFILE in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("estimate", "day.csv"), "--serving-profile"),
        (("estimate", "--serving-profile", PROFILE), "RECORDING"),
        (("estimate", "none.csv", "--serving-profile", PROFILE), "none.csv cannot be read"),
        (("estimate", "wrong.csv", "--serving-profile", PROFILE), "wrong.csv, line 8"),
        (("estimate", "day.csv", "--serving-profile", "qwen4"), "qwen4"),
        (("estimate", "day.csv", "--serving-profile", PROFILE, "--report", "none/page.html"), "--report"),
        (("lend", "--model", "folder", "--record", "day.csv"), "--observe"),
        (("lend", "--model", "folder", "--observe", "--record", "none/day.csv"), "--record"),
        (("lend", "--model", "folder", "--observe", "--record", "other.csv"), "another kind"),
    ],
)
def test_wrong_argument_is_refused_in_one_sentence(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    day = write_recording(tmp_path / "day.csv", [0.2])
    (tmp_path / "wrong.csv").write_text(day.read_text() + "1,2\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    ran = rose(*(tmp_path / each if each.endswith((".csv", ".html")) else each for each in arguments))
    assert ran.returncode == 2 and words in ran.stderr and "Traceback" not in ran.stderr, ran.stderr
