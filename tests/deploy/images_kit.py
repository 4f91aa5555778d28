"""Images built and run by buildah without a container engine: the image's files, this machine's network and processes.

Keeps true
- What this machine's pip and uv know of their registry goes into a build as a secret and as mounts, into no layer.
- What runs from an image is another user, in the image's own file system.
"""

import os
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.generate import CHART

ROOT = CHART.parents[1]
VERSION = "0.1.0"
USER = "10001:10001"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"

OF_A_REGISTRY = ("PIP_", "UV_", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def need_builder() -> None:
    """Skips the test that calls where nothing is there to build with."""
    for program in ("buildah", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install buildah mmdebstrap")
    if os.geteuid() != 0:
        pytest.skip("buildah builds in a chroot here, which takes root")


@dataclass(slots=True)
class Builder:
    """A store of images of its own, in a folder."""

    folder: Path

    def buildah(self, *arguments: str | Path) -> str:
        store = ("--storage-driver", "vfs", "--root", self.folder / "root", "--runroot", self.folder / "run")
        done = subprocess.run(
            ["buildah", *map(str, store), *map(str, arguments)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"buildah {arguments}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def make_base(self) -> None:
        """What stands for the public image of Python, which cannot be had everywhere: Debian with its own Python."""
        archive = self.folder / "base.tar"
        slim = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "man", "locale", "info")]
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", *slim, SUITE, archive], check=True
        )
        container = self.buildah("from", "scratch")
        self.buildah("add", container, archive, "/")
        self.buildah("commit", "--quiet", container, "localhost/base")
        self.buildah("rm", container)
        archive.unlink()

    def make_context(self) -> Path:
        """What a build is given: the wheel, and what locks and installs it."""
        context = self.folder / "context"
        (context / "deploy").mkdir(parents=True)
        uv = [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--out-dir", str(context / "dist"), str(ROOT)]
        subprocess.run(uv, check=True)
        for name in ("pyproject.toml", "requirements.txt"):
            shutil.copy(ROOT / name, context / name)
        shutil.copytree(ROOT / "deploy" / "images", context / "deploy" / "images")
        return context

    def registry(self) -> list[str]:
        """Flags that tell a build of this machine's registry."""
        known = {name: value for name, value in os.environ.items() if name.upper().startswith(OF_A_REGISTRY)}
        links = known.get("PIP_FIND_LINKS")
        if links:
            known.setdefault("UV_FIND_LINKS", links)
        files = {*(value for value in known.values() if value.startswith("/") and Path(value).exists())}
        files |= {urllib.parse.urlparse(value).path for value in known.values() if value.startswith("file:///")}
        secret = self.folder / "registry"
        secret.write_text("".join(f"{name}='{value}'\n" for name, value in known.items()))
        mounts = [f"--volume={path}:{path}:ro" for path in sorted(files)]
        return [f"--secret=id=registry,src={secret}", *mounts]

    def build(self, containerfile: Path, context: Path, tag: str, **arguments: str) -> None:
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        how = ("--isolation", "chroot", "--format", "docker", "--pull=never", "--layers=false")
        self.buildah("bud", *how, *self.registry(), *given, "--file", containerfile, "--tag", tag, context)

    def family(self, family: str, context: Path, **arguments: str) -> str:
        """Build the image of a family; returns its name."""
        tag = f"rose-{family}:{VERSION}"
        file = context / "deploy" / "images" / f"{family}.Containerfile"
        self.build(file, context, tag, BASE="localhost/base", VERSION=VERSION, REVISION="0" * 40, **arguments)
        return tag

    def container(self, image: str) -> "Container":
        name = self.buildah("from", "--pull=never", image)
        return Container(self, name, Path(self.buildah("mount", name)))


@dataclass(frozen=True, slots=True)
class Container:
    """An image's files, to run programs in."""

    builder: Builder
    name: str
    root: Path

    def command(self, *words: str, environment: Mapping[str, str] = {}, volumes: Mapping[Path, str] = {}) -> list[str]:
        """What runs the words in it as the image's user. `volumes`: this machine's folders, where they are there."""
        store = ("--storage-driver", "vfs", "--root", self.builder.folder / "root")
        runroot = ("--runroot", self.builder.folder / "run")
        said = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        mounts = [f"--volume={path}:{where}" for path, where in volumes.items()]
        run = ("run", "--isolation", "chroot", "--user", USER, *said, *mounts, self.name, "--", *words)
        return [str(word) for word in ("buildah", *store, *runroot, *run)]

    def run(
        self, *words: str, environment: Mapping[str, str] = {}, volumes: Mapping[Path, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        line = self.command(*words, environment=environment, volumes=volumes)
        return subprocess.run(line, capture_output=True, text=True, check=False)

    def answers(self, *words: str, **environment: str) -> str:
        """What it prints, having ended well."""
        done = self.run(*words, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def megabytes(self, *folders: str) -> float:
        """Of the files in it, or in some of its folders: what an image is said to take, unpacked."""
        found = [str(self.root / each.lstrip("/")) for each in folders or ("",)]
        told = subprocess.run(
            ["du", "-xsc", "--apparent-size", "-B1", *found], capture_output=True, text=True, check=True
        ).stdout
        return int(told.splitlines()[-1].split()[0]) / 1e6

    def written(self) -> list[Path]:
        """What its user has left behind outside of /tmp and of where runs are kept."""
        owner = USER.partition(":")[0]
        found = subprocess.run(
            ["find", self.root, "-xdev", "-uid", owner, "-not", "-path", f"{self.root}/tmp*"],
            capture_output=True,
            text=True,
            check=True,
        )
        return [Path(line).relative_to(self.root) for line in found.stdout.splitlines()]
