"""`rose evaluate` checks that its output is writable before a task runs, and loses no figure."""

import os
from pathlib import Path

import msgspec
import pytest

from rose.pipeline.cli import run_commands
from rose.pipeline.cli.run_commands import NotWritten, evaluate_folder
from rose.pipeline.config.options import Common
from rose.schemas.errors import UsageError
from rose.workers.evaluate import Evaluation

FOUND = Evaluation(tasks=4, solved=3, turns=8, seconds=1.0)


@pytest.mark.parametrize(
    "name", ["none/figures.json", "file/figures.json", "folder", ".", "x" * 300, "astray", "round"]
)
def test_unwritable_file_is_refused_before_a_task_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "astray").symlink_to(tmp_path / "none" / "figures.json")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    monkeypatch.setattr(run_commands, "held_out", lambda *_: pytest.fail("played"))
    with pytest.raises(UsageError, match="cannot be written: name a file") as refused:
        evaluate_folder(Common(), None, tmp_path / name)
    assert "\n" not in str(refused.value)


def test_file_without_write_permission_is_refused_before_a_task_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modes mean nothing to root, as whom tests may run."""
    monkeypatch.setattr(run_commands, "held_out", lambda *_: pytest.fail("played"))
    (tmp_path / "kept.json").touch()
    for file, denied in ((tmp_path / "new.json", tmp_path), (tmp_path / "kept.json", tmp_path / "kept.json")):
        monkeypatch.setattr(os, "access", lambda path, _, denied=denied: path != denied)
        with pytest.raises(UsageError, match="cannot be written"):
            evaluate_folder(Common(), None, file)


@pytest.mark.parametrize("there", [False, True])
def test_result_file_is_unchanged_until_the_figures_are_complete(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    if there:
        file.write_text("before")

    def play(*_: object) -> Evaluation:
        assert (file.read_text() == "before") if there else not file.exists()
        return FOUND

    monkeypatch.setattr(run_commands, "held_out", play)
    evaluate_folder(Common(), None, file)
    assert msgspec.json.decode(file.read_bytes(), type=Evaluation) == FOUND
    assert capsys.readouterr().out.startswith("0.7500 of 4 held-out tasks solved")


def test_figures_that_cannot_be_written_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def play(*_: object) -> Evaluation:
        folder.rmdir()
        return FOUND

    monkeypatch.setattr(run_commands, "held_out", play)
    with pytest.raises(NotWritten, match="the figures are above"):
        evaluate_folder(Common(), None, folder / "figures.json")
    assert capsys.readouterr().out.startswith("0.7500 of 4 held-out tasks solved")
