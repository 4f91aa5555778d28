"""Images built and run by buildah without a container engine: with the files of the image, and the network and
processes of this machine.

Keeps true
- The registry settings of pip and uv on this machine enter a build as a secret and as mounts, and no layer.
- Programs run from an image as another user in the file system of the image.
- Only the base and the packages fetched by uv are kept for later runs.
- If the kernel supports overlay file systems no tree is copied: a base exists once.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
import pytest

from deploy.generate import CHART

ROOT = CHART.parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
USER = "10001:10001"
BASE = "localhost/base"
SUITE = "bookworm"
CERTIFICATES = 'cat "$1"/usr/share/ca-certificates/mozilla/*.crt > "$1/etc/ssl/certs/ca-certificates.crt"'
"""Replaces the set-up of the certificates package."""
PYTHON = "/opt/rose/bin/python"
LEAVE_SECONDS = 60.0
"""Grace period of a role, in seconds."""

UV_CACHE = "/uv-cache"
"""Folder in a build with the packages that uv has fetched before."""

OF_A_REGISTRY = ("PIP_", "UV_", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")

HAS_NO_COMPILER = "for each in cc gcc g++ clang ld make cargo go nvcc uv; do if command -v $each; then exit 1; fi; done"
INSTALLED = "import importlib.metadata as m; print(*(f'{each.name}=={each.version}' for each in m.distributions()))"


@dataclass(frozen=True, slots=True)
class Debian:
    """The base of an image, as mmdebstrap makes it."""

    name: str
    options: tuple[str, ...]


PYTHON_PACKAGES = "python3,python3-venv,ca-certificates"
WHOLE = Debian("whole", ("--variant=minbase", f"--include={PYTHON_PACKAGES}"))
"""A base to which packages can be added."""
UNPACKED = Debian(
    "unpacked",
    (
        "--variant=extract",
        f"--include=base-files,dash,coreutils,sed,util-linux,libstdc++6,{PYTHON_PACKAGES}",
        f"--customize-hook={CERTIFICATES}",
    ),
)
"""A base with packages that are not set up: dpkg takes half of the time of a Debian."""


def need_builder() -> None:
    """Skip the calling test if no image builder is installed."""
    for program in ("buildah", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install buildah mmdebstrap")
    if os.geteuid() != 0:
        pytest.skip("buildah builds in a chroot here, which takes root")


def _buildah(*arguments: str | Path) -> str:
    done = subprocess.run(["buildah", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"buildah {arguments}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


@dataclass(slots=True)
class Builder:
    """An image store in its own folder."""

    folder: Path
    kept: Path
    """Folder of the data kept for later runs."""
    debian: Debian
    driver: str = field(init=False)
    """Storage driver: overlay, or copies of the layers."""

    def __post_init__(self) -> None:
        buildah_command = ["buildah", *map(str, self._stored("overlay", "root")), "info"]
        laid = subprocess.run(buildah_command, capture_output=True, check=False).returncode == 0
        self.driver = "overlay" if laid else "vfs"

    def _stored(self, driver: str, root: str | Path) -> tuple[str | Path, ...]:
        return "--storage-driver", driver, "--root", self.folder / root, "--runroot", self.folder / "run"

    @property
    def _base(self) -> Path:
        return self.kept / f"{self.debian.name}-{self.driver}"

    @property
    def store(self) -> tuple[str | Path, ...]:
        """Return the buildah options for the store and for the store of the base."""
        return *self._stored(self.driver, "root"), "--storage-opt", f"{self.driver}.imagestore={self._base}"

    def buildah(self, *arguments: str | Path) -> str:
        return _buildah(*self.store, *arguments)

    def make_base(self) -> None:
        """Build a replacement of the public Python image, which is not always reachable: Debian with its own Python."""
        made = self._base.with_suffix(".made")
        if made.exists():
            return
        shutil.rmtree(self._base, ignore_errors=True)
        store = self._stored(self.driver, self._base)
        container = _buildah(*store, "from", "scratch")
        root = _buildah(*store, "mount", container)
        slim = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "man", "locale", "info")]
        how = ["mmdebstrap", "--quiet", *self.debian.options, *slim, "--format=directory", SUITE, root]
        done = subprocess.run(how, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no Debian can be had: {done.stderr.strip()[-200:]}")
        _buildah(*store, "commit", "--quiet", "--rm", container, BASE)
        made.touch()

    @property
    def context(self) -> Path:
        return self.folder / "context"

    def make_context(self) -> None:
        """Write the build context: the wheel, the lock files and the installer."""
        context = self.context
        (context / "deploy").mkdir(parents=True)
        uv = [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--out-dir", str(context / "dist"), str(ROOT)]
        subprocess.run(uv, check=True)
        for name in ("pyproject.toml", "requirements.txt"):
            shutil.copy(ROOT / name, context / name)
        shutil.copytree(ROOT / "deploy" / "images", context / "deploy" / "images")

    def registry(self, *, keeps: bool) -> list[str]:
        """Return the options that give a build the registry of this machine. If `keeps`, the packages that uv fetches
        are kept."""
        known = {name: value for name, value in os.environ.items() if name.upper().startswith(OF_A_REGISTRY)}
        links = known.get("PIP_FIND_LINKS")
        if links:
            known.setdefault("UV_FIND_LINKS", links)
        known.pop("UV_CACHE_DIR", None)
        if keeps:
            known |= {"UV_CACHE_DIR": UV_CACHE, "UV_LINK_MODE": "copy"}
        files = {*(value for value in known.values() if value.startswith("/") and Path(value).exists())}
        files |= {urllib.parse.urlparse(value).path for value in known.values() if value.startswith("file:///")}
        secret = self.folder / "registry"
        secret.write_text("".join(f"{name}='{value}'\n" for name, value in known.items()))
        mounts = [f"--volume={path}:{path}:ro" for path in sorted(files)]
        if keeps:
            (self.kept / "uv").mkdir(exist_ok=True)
            mounts.append(f"--volume={self.kept / 'uv'}:{UV_CACHE}")
        return [f"--secret=id=registry,src={secret}", *mounts]

    def build(self, containerfile: Path, context: Path, tag: str, *, keeps: bool = False, **arguments: str) -> None:
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        how = ("--isolation", "chroot", "--format", "docker", "--pull=never", "--layers=false")
        self.buildah("bud", *how, *self.registry(keeps=keeps), *given, "--file", containerfile, "--tag", tag, context)

    def family(self, family: str) -> str:
        """Build the image of a family; return its name."""
        tag = f"rose-{family}:{VERSION}"
        file = self.context / "deploy" / "images" / f"{family}.Containerfile"
        build_arguments = {"BASE": BASE, "VERSION": VERSION, "REVISION": "0" * 40}
        self.build(
            file, self.context, tag, keeps=family == "light", **build_arguments
        )  # the packages of the other families are large
        return tag

    def close(self) -> None:
        """Remove the store."""
        self.buildah("rm", "--all")
        shutil.rmtree(self.folder)

    def container(self, image: str) -> "Container":
        name = self.buildah("from", "--pull=never", image)
        return Container(self, name, Path(self.buildah("mount", name)))


class Images:
    """Images that are built at their first use."""

    @classmethod
    @contextmanager
    def on(cls, debian: Debian, folder: Path, kept: Path) -> Iterator["Images"]:
        """Return images on this Debian in this folder. Skip the test if no builder is installed."""
        need_builder()
        builder = Builder(folder, kept, debian)
        try:
            builder.make_base()
            builder.make_context()
            yield cls(builder)
        finally:
            builder.close()

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.container = cache(self._container)

    def _container(self, family: str) -> "Container":
        return self.builder.container(self.builder.family(family))


def look_into(images: Images, family: str) -> float:
    """Return the size in megabytes, after checks of everything else that an image promises."""
    found = images.container(family)
    size = found.megabytes()
    print(f"rose-{family}: {size:.0f} MB, of them /opt/rose {found.megabytes('/opt/rose'):.0f} MB")
    found.answers("sh", "-ec", HAS_NO_COMPILER)
    found.answers("python", "-c", "import opentelemetry.exporter.otlp.proto.http.trace_exporter")
    inspected = images.builder.buildah("inspect", "--type", "image", f"rose-{family}:{VERSION}")
    config = json.loads(inspected)["Docker"]["config"]
    assert config["User"] == USER
    assert config["Entrypoint"] == ["rose"] and config["Healthcheck"]["Test"] == ["CMD", "rose", "health", "--live"]
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items()}
    assert labels["title"] == f"rose-{family}" and labels["version"] == VERSION and labels["licenses"] == "Apache-2.0"
    bill_of_materials = json.loads((found.root / "opt/rose/sbom.cdx.json").read_text())
    listed = {(each["name"], each["version"]) for each in bill_of_materials["components"]}
    there = {tuple(each.split("==")) for each in found.answers("python", "-c", INSTALLED).split()}
    assert bill_of_materials["bomFormat"] == "CycloneDX" and ("rose-rollouts", VERSION) in listed and there == listed
    return size


@dataclass(frozen=True, slots=True)
class Container:
    """The files of an image, in which programs can run."""

    builder: Builder
    name: str
    root: Path

    def command(self, *words: str, environment: Mapping[str, str] = {}, volumes: Mapping[Path, str] = {}) -> list[str]:
        """Return the command that runs the words in the image as its user. `volumes` maps folders of this machine to
        their mount points."""
        variables = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        mounts = [f"--volume={path}:{where}" for path, where in volumes.items()]
        run = ("run", "--isolation", "chroot", "--user", USER, *variables, *mounts, self.name, "--", *words)
        return [str(word) for word in ("buildah", *self.builder.store, *run)]

    def run(
        self, *words: str, environment: Mapping[str, str] = {}, volumes: Mapping[Path, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        line = self.command(*words, environment=environment, volumes=volumes)
        return subprocess.run(line, capture_output=True, text=True, check=False)

    def answers(self, *words: str, **environment: str) -> str:
        """Return the output of a program that exits with status 0."""
        done = self.run(*words, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def megabytes(self, *folders: str) -> float:
        """Return the unpacked size of the image, or of some of its folders."""
        found = [str(self.root / each.lstrip("/")) for each in folders or ("",)]
        finished = subprocess.run(
            ["du", "-xsc", "--apparent-size", "-B1", *found], capture_output=True, text=True, check=True
        ).stdout
        return int(finished.splitlines()[-1].split()[0]) / 1e6

    def written(self) -> list[Path]:
        """Return the files that the user has written outside of /tmp and the run folder."""
        owner = USER.partition(":")[0]
        found = subprocess.run(
            ["find", self.root, "-xdev", "-uid", owner, "-not", "-path", f"{self.root}/tmp*"],
            capture_output=True,
            text=True,
            check=True,
        )
        return [Path(line).relative_to(self.root) for line in found.stdout.splitlines()]


@contextmanager
def running(found: Container, port: int, *words: str, log: Path, **more: str) -> Iterator[psutil.Process]:
    """Run a role in its image. It stops within its grace period."""
    environment = {"ROSE_METRICS__PORT": str(port), "OMP_NUM_THREADS": "1", **more}
    volumes = {log.parent: "/runs"}
    with log.open("wb") as sink:
        line = found.command("rose", *words, environment=environment, volumes=volumes)
        process = psutil.Popen(line, stdout=sink, stderr=sink)
    try:
        yield process
        if process.is_running():
            role_of(process).send_signal(signal.SIGTERM)
            assert process.wait(LEAVE_SECONDS) == 0, log.read_text()[-3000:]
    finally:
        for child in [*process.children(recursive=True), process] if process.is_running() else []:
            child.kill()


def role_of(process: psutil.Process) -> psutil.Process:
    """Return the process in the image. The innermost process of buildah kills it when stopped itself."""
    return next(child for child in process.children(recursive=True) if child.cmdline()[:1] == [PYTHON])


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
