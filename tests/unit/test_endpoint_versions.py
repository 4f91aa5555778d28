"""Files that an endpoint lender leaves on the disk shared with its endpoint."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rose.workers.executor.vllm.types import SwapRefused
from rose.workers.lender.endpoint import versions as room
from rose.workers.lender.endpoint.server_interface import EndpointInfo
from rose.workers.lender.endpoint.versions import EndpointVersions

TENSORS = {"model.norm.weight": torch.zeros(4)}


def versions(folder: Path, *, sees: bool = True) -> EndpointVersions:
    async def answer(_: Path) -> bool:
        return sees

    api: Any = SimpleNamespace(url="http://endpoint", can_read=answer)
    info = EndpointInfo(model_folder=folder / "own", dtype="float32", max_logprobs=20, kv_tokens=0)
    return EndpointVersions(api, info, 48, SimpleNamespace(), folder / "versions")  # type: ignore[arg-type]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "versions").glob("version-*"))


def test_version_invisible_to_the_endpoint_is_refused_and_removed(tmp_path: Path) -> None:
    """The folder may have another path there: each step of the trainer would leave a whole model."""
    blind = versions(tmp_path, sees=False)
    for number in range(3):
        with pytest.raises(SwapRefused, match="cannot read"):
            asyncio.run(blind.stage(number, TENSORS))
    assert left(tmp_path) == []


def test_version_too_large_for_the_disk_is_refused_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treated as a broken endpoint, it would restart and fetch all versions again and again."""

    def full(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        if file.parent.name.startswith("version"):
            file.write_bytes(b"its beginning")
            raise SafetensorError("Error while serializing: I/O error: No space left on device")
        save_file(tensors, file, metadata)

    monkeypatch.setattr(room, "save_file", full)
    with pytest.raises(SwapRefused, match="No space left"):
        asyncio.run(versions(tmp_path).stage(1, TENSORS))
    assert left(tmp_path) == []


def test_only_the_newest_staged_version_is_kept(tmp_path: Path) -> None:
    patient = versions(tmp_path)
    for number in range(3):
        asyncio.run(patient.stage(number, TENSORS))
    assert left(tmp_path) == ["version-2"]
