"""The exported folder is complete and writable by its owner, for any permissions of the initial folder."""

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rose.schemas.errors import UsageError
from rose.workers.trainer.checkpoint import Checkpoints
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.export import export_newest, export_policy
from rose.workers.trainer.learner import Learner
from rose.workers.trainer.policy import load_policy
from rose.workers.weights.folder_names import FolderTensors
from tests.support.model_families import tiny_policy
from tests.support.trainer_fixtures import save_first_version

OWNERS = stat.S_IRUSR | stat.S_IWUSR


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A read-only model folder."""
    folder = tmp_path / "kept"
    tiny_policy("qwen3", folder)
    (folder / "deep").mkdir()
    for name in ("merges.txt", "generation_config.json", "deep/template.jinja", "deep/pytorch_model.bin"):
        (folder / name).write_text(f"{name} as it was")
    everything = [folder, *folder.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    for path in everything:
        path.chmod(0o755)


@pytest.fixture
def tensors(kept: Path) -> FolderTensors:
    return FolderTensors(load_policy(kept), kept)


def test_read_only_model_can_be_exported_repeatedly(kept: Path, tensors: FolderTensors, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    for step in (1, 2):
        with torch.no_grad():
            dict(tensors)["model.norm.weight"].fill_(step)
        export_policy(tensors, target)
        found = {str(path.relative_to(target)): path for path in target.rglob("*")}
        files = {name for name, path in found.items() if path.is_file()}
        as_it_was = {"config.json", "merges.txt", "generation_config.json", "deep/template.jinja"}
        assert files == as_it_was | {"model.safetensors"}
        assert all((target / name).read_bytes() == (kept / name).read_bytes() for name in as_it_was)
        assert load_file(target / "model.safetensors")["model.norm.weight"].eq(step).all()
        for path in (target, *found.values()):  # root, as whom tests may run, may write at any mode
            assert path.stat().st_mode & OWNERS == OWNERS, path
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "exported"}


def test_run_inside_its_model_folder_is_exported(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_policy("qwen3", folder)
    (folder / "runs" / "first" / "checkpoints").mkdir(parents=True)
    export_policy(FolderTensors(load_policy(folder), folder), folder / "runs" / "first" / "model")
    exported = {path.name for path in (folder / "runs" / "first" / "model").iterdir()}
    assert exported == {path.name for path in folder.iterdir()} - {"runs"}


def test_remains_of_an_interrupted_export_are_replaced(tensors: FolderTensors, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    (tmp_path / "exported.partial").mkdir()
    (tmp_path / "exported.partial" / "half").touch()
    export_policy(tensors, target)
    assert not (target / "half").exists()


def test_foreign_files_and_links_neither_fail_an_export_nor_are_exported(tmp_path: Path) -> None:
    folder, elsewhere, target = tmp_path / "model", tmp_path / "elsewhere", tmp_path / "exported"
    tiny_policy("qwen3", folder)
    tensors = FolderTensors(load_policy(folder), folder)
    elsewhere.mkdir()
    for file in (elsewhere / "blob", elsewhere / "other"):
        file.write_text(file.name)
    (folder / ".git" / "objects").mkdir(parents=True)
    (folder / ".git" / "objects" / "weights").touch()
    os.mkfifo(folder / "pipe")
    links = {"merges.txt": elsewhere / "blob", "loop": folder, "aside": elsewhere, "device": Path("/dev/zero")}
    for name, to in {**links, "gone": tmp_path / "nothing", ".#config.json": Path("user@host.1")}.items():
        (folder / name).symlink_to(to)
    export_policy(tensors, target)
    found = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert found == {"config.json", "generation_config.json", "model.safetensors", "merges.txt"}
    assert (target / "merges.txt").read_text() == "blob" and not (target / "merges.txt").is_symlink()


def test_checkpoint_is_not_exported_with_the_files_of_another_model_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    tiny_policy("qwen3", first)
    tiny_policy("qwen3", second, rope_theta=5000.0)
    config = TrainerConfig(model_folder=first, run_folder=tmp_path / "run")
    learner, tensors = Learner(config), FolderTensors(load_policy(first), first)
    tensors.check_values()
    save_first_version(learner, Checkpoints(config.checkpoints, None), folder_digest=tensors.folder_digest)
    with pytest.raises(UsageError, match="second has other weights or another config"):
        export_newest(replace(config, model_folder=second), tmp_path / "newest")
    assert not (tmp_path / "newest").exists()
    assert export_newest(config, tmp_path / "newest") == 1
