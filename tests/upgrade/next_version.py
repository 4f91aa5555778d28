"""The next version of ROSE, made of this one: every struct that outlives a process has one more field, which is set.

Keeps true
- Every struct on the wire and in the trainer's folder has the field FIELD with a default, behind all others, and every
  record a higher number.
- Whoever makes one, anywhere in the packages, gives the field VALUE, which is not its default: so it travels.
- Nothing else is changed.

    make_next(Path("next"))  # the sources, from which a wheel can be built
"""

import ast
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "topics", "pipeline", "workers")
FIELD, VALUE = "added_next", "set by next"

KEPT = ("workers/trainer/checkpoint.py", "workers/trainer/metrics.py")
"""Modules that declare the structs that a trainer keeps on disk."""

AS_THEY_ARE = ("Record", "Identity", "SampledTokens")
"""Structs without the new field. `Record` has no fields, `Identity` is compared as a whole, and the fields of
`SampledTokens` are fields of records, which have the new field."""

NUMBER = re.compile(r'(SCHEMA: ClassVar\[str\] = "[a-z-]+/)(\d+)"')


def make_next(folder: Path, more: Sequence[str] = ()) -> None:
    """Write the packages and the build files of a wheel into this new folder.

    `more` are other modules with such structs that are not part of the wheel.
    """
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "rose", folder / "rose", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    declaring = [*sorted((folder / "schemas").rglob("*.py")), *(folder / name for name in KEPT)]
    declared = {
        ".".join(("rose", *path.relative_to(folder).with_suffix("").parts)): {
            struct.name for struct in _structs(ast.parse(path.read_text()))
        }
        for path in declaring
    }
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            path.write_text(_changed(path.read_text(), declared, declares=path in declaring))
    for name in more:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(_changed((ROOT / name).read_text(), declared, declares=False))


def _structs(module: ast.Module) -> Iterator[ast.ClassDef]:
    """Return the structs of a module that get the new field."""
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name not in AS_THEY_ARE:
            bases = {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}
            if bases & {"Struct", "Record"}:
                yield node


def _changed(source: str, declared: dict[str, set[str]], *, declares: bool) -> str:
    """Return a module of the next version. `declares`: whether its own structs are among those `declared`, by
    module."""
    module = ast.parse(source)
    own = list(_structs(module)) if declares else []
    names = {*_imported(module, declared), *(struct.name for struct in own)}
    lines = [line.encode() for line in source.splitlines(keepends=True)]  # columns count bytes
    edits: list[tuple[int, int, bytes]] = []
    for struct in own:
        last = [node for node in struct.body if isinstance(node, ast.AnnAssign)][-1]
        line = _end(last)[0]
        edits.append((line, len(lines[line - 1]), f'    {FIELD}: str = ""\n'.encode()))
    defaults = {node.value for struct in own for node in struct.body if isinstance(node, ast.AnnAssign)}
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call) and node not in defaults):
        if isinstance(call.func, ast.Name) and call.func.id in names:
            line, column = _end(call)
            closing = lines[line - 1][: column - 1].rstrip()
            before = closing or lines[line - 2].rstrip()
            comma = "" if before.endswith((b",", b"(")) else ", "
            edits.append((line, column - 1, f"{comma}{FIELD}={VALUE!r}".encode()))
    for line, column, text in sorted(edits, reverse=True):
        lines[line - 1] = lines[line - 1][:column] + text + lines[line - 1][column:]
    made = b"".join(lines).decode()
    return NUMBER.sub(lambda found: f'{found[1]}{int(found[2]) + 1}"', made)


def _imported(module: ast.Module, declared: dict[str, set[str]]) -> Iterator[str]:
    """Return the structs that a module imports from the declaring modules."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.name in declared.get(node.module or "", ()))


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset
