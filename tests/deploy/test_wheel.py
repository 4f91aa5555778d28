"""The wheel, installed into an environment with other packages that have the names of ROSE's folders."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.installed_versions import build

ROOT = Path(__file__).parents[2]

FOLDERS = ("pipeline", "schemas", "topics", "workers")

OTHERS = {
    f"{folder}/{name}": f"NAME = '{folder} of another project'\n"
    for folder in FOLDERS
    for name in ("__init__.py", "metrics.py", "config.py")
}
"""Files of other packages in the environment before ROSE: path below site-packages to text."""

LOADS_THE_PLUGIN = f"""
import importlib, os
others = [importlib.import_module(name) for name in {FOLDERS!r}]
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins", name="rose")
plugin.load()()
import rose.workers.executor.config, rose.workers.lender.config, rose.pipeline.cli.roles
print(rose.__file__)
for each in others:
    assert each is importlib.import_module(each.__name__) and each.NAME == f"{{each.__name__}} of another project"
    print(importlib.import_module(f"{{each.__name__}}.metrics").NAME)
"""
"""vLLM loads the plugin in this way, here in a server that uses the other packages."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the other packages and then ROSE. Dependencies come from the current environment."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False)
    site = site_of(folder)
    for name, text in OTHERS.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    (site / "present.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--python", str(python_of(folder))]
    subprocess.run([*uv, str(wheel)], check=True)
    return folder


def site_of(environment: Path) -> Path:
    [site] = environment.glob("lib/python3.*/site-packages")
    return site


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def ran(*command: str | Path, folder: Path) -> str:
    """Return the output of a command that runs in this folder, outside of the checkout. Raises CalledProcessError."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ROSE_LEND")}
    return subprocess.run(command, cwd=folder, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_wheel_installs_only_rose(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rose"}
    files = {file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()}
    assert {f"rose/{file.relative_to(ROOT)}" for file in files if "__pycache__" not in file.parts} <= names


def test_wheel_has_the_model_of_the_compose_file(wheel: Path) -> None:
    compose = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    [folder] = re.findall(r"site-packages/([\w/]+)", compose)
    with zipfile.ZipFile(wheel) as archive:
        assert f"{folder}/config.json" in archive.namelist()


def test_command_runs_beside_packages_of_the_same_names(environment: Path, tmp_path: Path) -> None:
    rose = environment / "bin" / "rose"
    assert "Usage: rose" in ran(rose, "--help", folder=tmp_path)
    contract = (ROOT / "docs" / "asyncapi.json").read_text(encoding="utf-8")
    assert ran(rose, "topics", "asyncapi", folder=tmp_path) == contract


def test_plugin_loads_beside_packages_of_the_same_names(environment: Path, tmp_path: Path) -> None:
    rose, *others = ran(python_of(environment), "-c", LOADS_THE_PLUGIN, folder=tmp_path).splitlines()
    assert Path(rose).is_relative_to(environment)
    assert others == [f"{folder} of another project" for folder in FOLDERS]


def test_packages_of_the_same_names_are_unchanged(environment: Path) -> None:
    site = site_of(environment)
    found = {
        str(file.relative_to(site)): file.read_text(encoding="utf-8")
        for folder in FOLDERS
        for file in (site / folder).rglob("*.py")
    }
    assert found == OTHERS
