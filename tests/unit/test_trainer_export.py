"""The exported folder is whole, and its owner's to write, however the folder which the run began with is kept."""

import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.trainer.export import export_policy

OWNERS = stat.S_IRUSR | stat.S_IWUSR


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A model folder that nobody may write to."""
    folder = tmp_path / "kept"
    (folder / "deep").mkdir(parents=True)
    for name in ("tokenizer.json", "model.safetensors", "deep/template.jinja", "deep/pytorch_model.bin"):
        (folder / name).write_text(f"{name} as it was")
    everything = [folder, *folder.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    for path in everything:
        path.chmod(0o755)


def policy(step: int) -> SimpleNamespace:
    return SimpleNamespace(save_pretrained=lambda folder: (folder / "model.safetensors").write_text(f"step {step}"))


def test_a_model_that_nobody_may_write_to_is_exported_again_and_again(kept: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    for step in (1, 2):
        export_policy(policy(step), kept, target)
        found = {str(path.relative_to(target)): path for path in target.rglob("*")}
        assert {name: path.read_text() for name, path in found.items() if path.is_file()} == {
            "tokenizer.json": "tokenizer.json as it was",
            "deep/template.jinja": "deep/template.jinja as it was",
            "model.safetensors": f"step {step}",
        }
        for path in (target, *found.values()):  # root, as whom tests may run, may write whatever the modes are
            assert path.stat().st_mode & OWNERS == OWNERS, path
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "exported"}


def test_what_an_export_that_was_cut_short_has_left_is_replaced(kept: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    (tmp_path / "exported.partial").mkdir()
    (tmp_path / "exported.partial" / "half").touch()
    export_policy(policy(1), kept, target)
    assert not (target / "half").exists()
