"""Recordings of an observed server: rows are differences, files survive restarts, and other files are refused."""

import resource
from pathlib import Path

import pytest

from rose.schemas.errors import RoseError, UsageError
from rose.workers.executor.ipc.messages import ObservationReport
from rose.workers.lender.recording import HEADER, Recording, Row, Rows, encode_row, read_recording

BEGAN = 1_800_000_000.0


def report(seconds: float, idle: float, *, most: int = 0, running: int = 0, held: int = 0) -> ObservationReport:
    return ObservationReport(
        seconds=seconds,
        idle_seconds=idle,
        stretches=(),
        stretch_seconds=0.0,
        running=running,
        waiting=0,
        kv_bytes_total=1000,
        kv_bytes_held=held,
        kv_bytes_most=most,
    )


def record(file: Path, *reports: ObservationReport) -> None:
    """Record as one process; the clock shows the seconds of the report."""
    at = iter(each.seconds for each in reports)
    recording = Recording(file, clock=lambda: BEGAN + next(at))
    for each in reports:
        recording.on_report(each)


def test_rows_hold_differences_and_the_most_memory_of_their_interval() -> None:
    rows = Rows()
    assert rows.on_report(report(100.0, 60.0, most=900), 1.0) is None, "what was before is not of this recording"
    assert rows.on_report(report(104.0, 61.0, most=700), 5.0) is None
    assert rows.on_report(report(110.0, 62.5, most=50, running=2, held=40), 11.0) == Row(
        11.0, 10.0, 2.5, running=2, waiting=0, kv_bytes_held=40, kv_bytes_most=700, kv_bytes_total=1000
    )
    row = rows.on_report(report(120.5, 70.0, most=60), 21.5)
    assert row is not None and (row.seconds, row.idle_seconds, row.kv_bytes_most) == (10.5, 7.5, 60)


def test_restarted_server_begins_a_new_row_without_the_time_in_between() -> None:
    rows = Rows()
    rows.on_report(report(500.0, 100.0), 0.0)
    assert rows.on_report(report(3.0, 1.0), 60.0) is None
    row = rows.on_report(report(13.0, 5.0), 70.0)
    assert row is not None and (row.seconds, row.idle_seconds) == (10.0, 4.0)


def test_recording_goes_on_after_a_restart_with_one_header_and_whole_rows(tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    record(file, report(0.0, 0.0), report(10.0, 5.0))
    with file.open("a") as opened:
        opened.write("1800000020.000,10.0")  # the process was killed in a write
    record(file, report(40.0, 20.0), report(50.0, 21.0))
    assert file.read_text().count(HEADER) == 1
    assert [(row.unix_seconds - BEGAN, row.seconds, row.idle_seconds) for row in read_recording(file)] == [
        (10.0, 10.0, 5.0),
        (50.0, 10.0, 1.0),
    ]


@pytest.mark.parametrize("left", ["", "unix_sec", HEADER])
def test_recording_begins_again_after_an_interrupted_header(left: str, tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    file.write_text(left)
    record(file, report(0.0, 0.0), report(10.0, 5.0))
    assert len(read_recording(file)) == 1


@pytest.mark.parametrize("content", ["time,load\n1,2\n", "unix\n", "unix_seconds,busy", f"{HEADER},more\n1\n"])
def test_file_of_another_kind_is_refused_and_kept(content: str, tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text(content)
    with pytest.raises(UsageError, match="another kind"):
        Recording(file)
    assert file.read_text() == content


def test_recording_that_can_no_longer_be_written_ends_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    recording = Recording(file)
    recording.on_report(report(0.0, 0.0))
    file.unlink()
    file.mkdir()
    with pytest.raises(RoseError, match="cannot be written: Is a directory"):
        recording.on_report(report(10.0, 0.0))


def test_row_of_which_a_part_was_written_ends_the_recording_and_is_cut_off_later(tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    recording = Recording(file)
    recording.on_report(report(0.0, 0.0))
    recording.on_report(report(10.0, 1.0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 8, hard))
    try:
        with pytest.raises(RoseError, match="cannot be written: No space left"):
            recording.on_report(report(20.0, 2.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    record(file, report(40.0, 20.0), report(50.0, 21.0))
    assert [row.idle_seconds for row in read_recording(file)] == [1.0, 1.0]


def test_file_that_is_moved_away_is_followed_by_a_recording_with_a_header(tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    recording = Recording(file)
    recording.on_report(report(0.0, 0.0))
    file.rename(tmp_path / "yesterday.csv")
    recording.on_report(report(10.0, 1.0))
    assert len(read_recording(file)) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1,2,3", "eight numbers"),
        ("1800000020.0,10.0,ten,0,0,0,0,1000", "eight numbers"),
        ("1800000020.0,10.0,1.0,0.5,0,0,0,1000", "eight numbers"),
        ("1800000020.0,0.0,0.0,0,0,0,0,1000", "seconds is 0"),
        ("1800000020.0,nan,0.0,0,0,0,0,1000", "seconds is nan"),
        ("1800000020.0,10.0,11.0,0,0,0,0,1000", "idle_seconds is 11"),
        ("1800000020.0,10.0,1.0,-1,0,0,0,1000", "negative"),
        ("1800000020.0,10.0,1.0,0,0,0,2000,1000", "kv_bytes_most"),
        ("inf,10.0,1.0,0,0,0,0,1000", "unix_seconds"),
        ("", "eight numbers"),
    ],
)
def test_malformed_row_is_refused_with_its_line(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    good = encode_row(Row(BEGAN, 10.0, 5.0, 1, 0, 10, 20, 1000))
    file.write_text(f"{HEADER}\n{good}{line}\n{good}")
    with pytest.raises(UsageError, match=f"line 3: .*{words}"):
        read_recording(file)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("", "line 1"), (f"{HEADER}\n", "no row"), ("a,b\n", "line 1")]
)
def test_file_without_rows_is_refused(content: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=words):
        read_recording(file)
