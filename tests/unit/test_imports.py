"""Modules have one name, imports go downward only, and fast-starting modules load neither vLLM nor torch."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PACKAGES = ("schemas", "topics", "pipeline", "workers")
"""The packages of `rose`, which are folders beside it in a checkout."""

BARE = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.\w+|(?= import))")
"""Pattern of a possible module name without `rose.`; a configuration key may match too."""

COMMAND = (
    "rose.pipeline.config",
    "rose.pipeline.asyncapi",
    "rose.pipeline.terminal",
    "rose.pipeline.health_server",
    "rose.pipeline.process_setup",
    "rose.pipeline.monitor",
    "rose.pipeline.report",
    "rose.pipeline.simulation",
    "rose.pipeline.local",
    "rose.pipeline.samples",
    "rose.pipeline.tracking",
    "rose.pipeline.cli",
    "rose.pipeline.observability",
)
"""The parts of the command from the bottom up: a part imports only earlier parts, and nothing else imports a part."""

FLOORS = {
    "rose.schemas": {"schemas"},
    "rose.topics": {"schemas", "topics"},
    "rose.pipeline": {"schemas", "topics", "pipeline"},
    "rose.workers": {"schemas", "topics", "workers"},
    **{part: {"schemas", "topics", "pipeline", "workers"} for part in COMMAND},
}
"""Packages of `rose` that a package may import; the longest name that matches a module counts."""

ENGINES = ("rose.workers.executor.vllm", "rose.workers.lender.vllm")
"""The packages that import vLLM: the rollout engine, and the guest support."""

MAX_FILE_LINES = 550
"""A longer file has more than one idea."""

HEAVY = ("torch", "vllm", "transformers", "faust")


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(("rose", *file.relative_to(ROOT).with_suffix("").parts)), file


def imported(file: Path) -> Iterator[str]:
    """Return every module that a file names in an import, at any depth."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_of(module: str) -> set[str]:
    return FLOORS[max((name for name in FLOORS if f"{module}.".startswith(f"{name}.")), key=len)]


def place_in_command(module: str) -> int:
    """Return the position among COMMAND; -1 for a module outside of the command."""
    return next((place for place, part in enumerate(COMMAND) if f"{module}.".startswith(f"{part}.")), -1)


def test_imports_go_downward_only() -> None:
    upward = [
        f"{module} imports {name}"
        for module, file in modules()
        for name in imported(file)
        if name.startswith(("tests.", "bench.", "docs."))
        or (
            name.startswith("rose.")
            and (name.split(".")[1] not in floor_of(module) or place_in_command(name) > place_in_command(module))
        )
    ]
    assert upward == []


def test_import_graph_has_no_cycle() -> None:
    """Modules of an import cycle can only be read and changed together."""
    files = dict(modules())
    names = {module.removesuffix(".__init__"): module for module in files}
    graph = {
        module: {names[each] for name in imported(file) for each in (name, name.rpartition(".")[0]) if each in names}
        - {module}
        for module, file in files.items()
    }
    TopologicalSorter(graph).prepare()


def test_product_module_is_imported_under_rose_everywhere() -> None:
    """A module imported under two names is two modules: two classes of a record, two registries."""
    bare = [
        f"{file.relative_to(ROOT)} names {name}"
        for folder in (*PACKAGES, "rose", "bench", "deploy", "docs", "tests")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if BARE.search(file.read_text(encoding="utf-8"))
        for name in (*imported(file), *named_in_strings(file))
        if name.partition(".")[0] in PACKAGES
    ]
    assert bare == []


def named_in_strings(file: Path) -> Iterator[str]:
    """Return every module or folder of a package that a string names without `rose.`, except in documentation."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            for name in BARE.findall(node.value):
                place = ROOT / name.replace(".", "/")
                if place.is_dir() or place.with_suffix(".py").is_file():
                    yield name


def test_product_file_has_no_more_lines_than_the_maximum() -> None:
    too_long = [
        f"{file.relative_to(ROOT)}: {lines} lines"
        for _, file in modules()
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]
    assert too_long == []


def test_vllm_is_imported_only_in_two_packages() -> None:
    elsewhere = [
        module
        for module, file in modules()
        if not module.startswith(ENGINES) and any(name.partition(".")[0] == "vllm" for name in imported(file))
    ]
    assert elsewhere == []


@pytest.mark.parametrize(
    "module",
    [
        "rose.pipeline.cli.__main__",
        "rose.pipeline.cli.main",
        "rose.pipeline.config.load",
        "rose.pipeline.routing.service",
        "rose.workers.trainer.groups",
        "rose.workers.trainer.stream",
    ],
)
def test_fast_starting_module_imports_no_heavy_module(module: str) -> None:
    """The modules are the command with its help, the router, and readers of groups."""
    found = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", found], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_parts_of_a_lender_in_every_vllm_process_load_no_kafka_client() -> None:
    """The engine core checks its server before anything else, and the watchdog imports nothing that could hang."""
    modules = "rose.workers.lender.vllm.attach, rose.workers.lender.vllm.observing, rose.workers.lender.watchdog"
    found = f"import sys, {modules}; print('confluent_kafka' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", found], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False"]


def test_plugin_without_its_setting_imports_nothing() -> None:
    """The test counts imports, as in each vLLM process; a duration would measure the load of the machine."""
    load = """
import sys
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins", name="rose")
before = set(sys.modules)
plugin.load()()
print(*sorted(set(sys.modules) - before))
"""
    environment = {name: value for name, value in os.environ.items() if name != "ROSE_LEND"}
    ran = subprocess.run(
        [sys.executable, "-c", load], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["rose", "rose.workers", "rose.workers.lender", "rose.workers.lender.vllm"]


def test_every_text_file_is_opened_with_an_encoding() -> None:
    """Python uses the encoding of the locale if a call names none."""
    said_none = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for package in (*PACKAGES, "rose", "deploy", "bench")
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and opens_text_without_encoding(node)
    ]
    assert said_none == []


def opens_text_without_encoding(call: ast.Call) -> bool:
    what = ast.unparse(call.func)
    opens = what.split(".")[-1] in ("read_text", "write_text", "open") and what not in ("os.open", "tarfile.open")
    binary = any(
        isinstance(each, ast.Constant) and each.value in ("rb", "wb", "ab", "r+b", "a+b") for each in call.args
    )
    return opens and not binary and all(keyword.arg != "encoding" for keyword in call.keywords)
