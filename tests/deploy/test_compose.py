"""Compose file tests: its commands exist in the images, `rose` understands them, and roles have minimal rights.

No container engine was available: the file has not been run.
"""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest

from deploy.generate import CHART
from rose.pipeline.local.submit import read_prompts
from tests.deploy.command_lines import configured, parsed

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'rose-rollouts[chart]'")

ROOT = CHART.parents[1]
FILE = ROOT / "deploy" / "compose.yaml"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

OF_OTHERS = {"kafka", "prometheus", "grafana"}
ROOTS_OWN = {"runs"}
"""Services that give a volume to the user of the other services, and end."""

Service = dict[str, Any]


def compose() -> dict[str, Any]:
    return cast(dict[str, Any], yaml.safe_load(FILE.read_text()))


def services() -> dict[str, Service]:
    return cast(dict[str, Service], compose()["services"])


def roles() -> dict[str, Service]:
    return {name: each for name, each in services().items() if name not in OF_OTHERS | ROOTS_OWN}


def test_compose_file_has_every_role_with_built_or_pinned_images() -> None:
    found = services()
    assert {
        "router",
        "control",
        "environment",
        "executor",
        "lender",
        "trainer",
        "topics",
        "prompts",
        *OF_OTHERS,
    } <= set(found)
    families = {
        path.name.removesuffix(".Containerfile") for path in (ROOT / "deploy" / "images").glob("*.Containerfile")
    }
    for name, each in found.items():
        repository, _, tag = each["image"].rpartition(":")
        if name in OF_OTHERS:
            assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), each["image"]
        else:
            assert tag == VERSION and repository.removeprefix("rose-") in families


def test_every_command_line_is_known_to_rose_and_fits_the_configuration(tmp_path: Path) -> None:
    toml, names = compose()["configs"]["rose.toml"]["content"], {}
    for name, each in roles().items():
        line = each["command"]
        if name == "prompts":
            (_, submit) = line[0].strip().splitlines()
            line = submit.split()[1:]
        config = configured(line, each["environment"], toml, tmp_path)
        if line[0] == "lend":  # its stop file has to outlive the container
            assert any(config.run_folder.is_relative_to(volume.split(":")[1]) for volume in each["volumes"])
        assert config.bus().bootstrap == "kafka:9092"
        if not each["healthcheck"].get("disable"):
            kind, *words = each["healthcheck"]["test"]
            assert (kind, words[0]) == ("CMD", "rose") and parsed(words[1:])[0] == "health"
        if line[0] in ("executor", "lend"):
            names[line[0]] = parsed(line)[1]["name"]
    assert names == {"executor": None, "lend": "lender"}, "the first may be several, by their containers' names"


def test_prompts_made_by_the_compose_shell_are_valid(tmp_path: Path) -> None:
    make = roles()["prompts"]["command"][0].strip().splitlines()[0].replace("/tmp/", f"{tmp_path}/")
    subprocess.run(["sh", "-ec", make.replace("$$", "$")], check=True)
    prompts = read_prompts(tmp_path / "prompts.jsonl", ("calculator",))
    total = tomllib.loads(compose()["configs"]["rose.toml"]["content"])["trainer"]["total_groups"]
    assert len({prompt.group_id for prompt in prompts}) == total


def test_roles_run_unprivileged_and_write_only_to_allowed_paths() -> None:
    for name, each in roles().items():
        assert each["read_only"] and each["user"] == "10001:10001" and each["cap_drop"] == ["ALL"], name
        assert {volume.split(":")[0] for volume in each.get("volumes", [])} <= set(compose()["volumes"])
    for each in services().values():
        assert all(port.startswith("127.0.0.1:") for port in each.get("ports", []))
        for volume in each.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (FILE.parent / source).exists()


def test_prometheus_scrapes_every_role_at_its_port() -> None:
    scraped = yaml.safe_load(compose()["configs"]["prometheus.yml"]["content"])
    (scrape,) = scraped["scrape_configs"]
    (targets, serving), (_, of_servers) = zip(
        *((each["targets"], each.get("labels")) for each in scrape["static_configs"]), strict=True
    )
    assert of_servers == {"endpoint": "http"}, "a server that loads is no role that is down"
    running = {name for name, each in roles().items() if each["restart"] != "no"}
    assert {target.partition(":")[0] for target in targets} == running
    assert {target.partition(":")[2] for target in targets} == {"9464"}
    lender = services()["lender"]["command"]
    assert serving == [f"lender:{lender[lender.index('--port') + 1]}"], "vLLM's own metrics, in the run's one job"
