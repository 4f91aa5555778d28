"""Every file that names a version of ROSE names the current version."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

FILES = (
    "docs/getting-started/kubernetes.md",
    "deploy/chart/Chart.yaml",
    "deploy/compose.yaml",
    "deploy/images/environment.Containerfile",
    "deploy/lender-patch.yaml",
    "deploy/values/production.yaml",
)

NAMED = re.compile(
    r"(?:\brose-(?:light|engine|trainer):|^\s*(?:version|appVersion|tag): )(\d+\.\d+\.\d+)", re.MULTILINE
)


@pytest.mark.parametrize("name", FILES)
def test_file_names_the_current_version(name: str) -> None:
    assert set(NAMED.findall((ROOT / name).read_text())) == {VERSION}
