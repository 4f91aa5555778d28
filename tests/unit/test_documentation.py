"""The documentation: links, length of paragraphs and sentences, diagrams and snippets.

The tests of the generators compare generated pages with the code; here only links to them are checked.
"""

import ast
import importlib
import re
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.observability.reference import metrics
from tests.deploy.command_lines import parsed

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

GENERATED = frozenset(
    f"docs/reference/{name}.md" for name in ("cli", "configuration", "topics", "metrics", "log-events", "scenarios")
)
"""Pages written by a generator."""

PAGES = ("README.md", *sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")))
WRITTEN = tuple(name for name in PAGES if name not in GENERATED)

FILE_TYPES = ("md", "py", "json", "jsonl", "toml", "properties")
WORDS = {
    word
    for folder in ("pipeline", "workers", "topics", "schemas", "tests", "deploy", "docs/examples")
    for file in (ROOT / folder).rglob("*")
    if file.suffix in (".py", ".yaml", ".in")
    for word in re.findall(r"\b[A-Z]\w+", file.read_text(encoding="utf-8"))
}
"""Capitalized names in the code."""

DIAGRAMS = ("flowchart", "sequenceDiagram", "stateDiagram-v2", "gantt", "classDiagram", "timeline")
MOST_PARAGRAPH_WORDS = 60
MOST_SENTENCE_MEDIAN = 16
MOST_README_WORDS = 700
FENCE = re.compile(r"^ *```([\w-]*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def snippets(name: str, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return [dedent(body) for found, body in FENCE.findall(text_of(name)) if found == language]


def anchors(name: str) -> set[str]:
    """Return the heading anchors of a page, as GitHub builds them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(name)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", each).lower()).replace(" ", "-") for each in headings}


def paragraphs(name: str) -> Iterator[str]:
    """Return paragraphs and list items as plain text, without code blocks, tables, headings and pictures."""
    block: list[str] = []
    for line in [*FENCE.sub("", text_of(name)).splitlines(), ""]:
        line = line.removeprefix("> ").rstrip(">")
        apart = not line.strip() or line.startswith(("|", "#", "!["))
        if (apart or LIST_ITEM.match(line)) and block:
            yield " ".join(block)
            block = []
        if not apart:
            text = re.sub(r"`[^`]*`", "code", LIST_ITEM.sub("", line))
            block.append(LINK.sub(r"\1", text).strip())


def sentences(name: str) -> Iterator[str]:
    for paragraph in paragraphs(name):
        yield from (each for each in re.split(r"(?<=[.!?])\**\s+", paragraph) if len(each.split()) > 1)


@pytest.mark.parametrize("name", WRITTEN)
def test_page_has_short_paragraphs_and_sentences(name: str) -> None:
    too_long = [each for each in paragraphs(name) if len(each.split()) > MOST_PARAGRAPH_WORDS]
    assert too_long == []
    lengths = [len(each.split()) for each in sentences(name)]
    assert statistics.median(lengths) <= MOST_SENTENCE_MEDIAN


@pytest.mark.parametrize("name", WRITTEN)
def test_page_ends_with_links_to_the_next_pages(name: str) -> None:
    last = text_of(name).rstrip().rsplit("\n", 1)[-1]
    assert last.startswith("**Next:** ") and LINK.search(last)


@pytest.mark.parametrize("name", WRITTEN)
def test_page_has_at_most_one_not_run_box(name: str) -> None:
    assert text_of(name).count("> **Not run.**") <= 1


def test_readme_is_short() -> None:
    assert len(text_of("README.md").split()) <= MOST_README_WORDS


@pytest.mark.parametrize("name", [*WRITTEN, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_a_page_resolve(name: str) -> None:
    folder = (ROOT / name).parent
    broken = []
    for _, target in LINK.findall(FENCE.sub("", text_of(name))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        page = (folder / path).resolve() if path else ROOT / name
        relative = str(page.relative_to(ROOT))
        if relative in GENERATED and not page.exists():
            continue  # the test of its generator checks that the file exists
        if not page.exists() or (anchor and anchor not in anchors(relative)):
            broken.append(target)
    assert broken == []


def test_every_page_is_linked_from_another_page() -> None:
    linked = {
        str(((ROOT / name).parent / target.partition("#")[0]).resolve().relative_to(ROOT))
        for name in PAGES
        for _, target in LINK.findall(text_of(name))
        if not re.match(r"[a-z]+:|#", target)
    }
    assert set(PAGES) - linked <= {"README.md"}


@pytest.mark.parametrize("name", WRITTEN)
def test_diagrams_have_a_known_type(name: str) -> None:
    for diagram in snippets(name, "mermaid"):
        assert diagram.split()[0] in DIAGRAMS


@pytest.mark.parametrize("name", WRITTEN)
def test_snippets_are_valid(name: str) -> None:
    for code in snippets(name, "python"):
        ast.parse(code)
    for code in snippets(name, "yaml"):
        list(yaml.safe_load_all(code))


@pytest.mark.parametrize("name", WRITTEN)
def test_toml_snippets_are_configurations(name: str, tmp_path: Path) -> None:
    for code in snippets(name, "toml"):
        (tmp_path / "rose.toml").write_text(code)
        load(Common(config=tmp_path / "rose.toml"))


def rose_commands(script: str) -> Iterator[list[str]]:
    """Return the words after `rose` of each command in a shell script."""
    for line in script.replace("\\\n", " ").splitlines():
        for command in re.split(r"\||&&|;", re.sub(r"'[^']*'", lambda quoted: quoted[0].replace(";", ","), line)):
            if found := re.search(r"(?:^|\s|/bin/)rose(?=\s)(?!\s+\w+=)", command):
                yield shlex.split(command[found.end() :], comments=True)


@pytest.mark.parametrize("name", WRITTEN)
def test_commands_in_shell_snippets_are_known_to_the_command_line(name: str) -> None:
    for script in snippets(name, "sh"):
        for words in rose_commands(script):
            if words and "--help" not in words:
                parsed(words)


@pytest.mark.parametrize("name", WRITTEN)
def test_python_snippets_import_what_exists(name: str) -> None:
    for code in snippets(name, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rose."):
                module = importlib.import_module(str(node.module))
                assert [each.name for each in node.names if not hasattr(module, each.name)] == []


def code_spans(name: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(name))))


BENCHES = {file.stem for file in (ROOT / "bench").glob("*.py")} | {
    file.parent.name for file in (ROOT / "bench").glob("*/__main__.py")
}


@pytest.mark.parametrize("name", WRITTEN)
def test_named_files_exist(name: str) -> None:
    folders = ("pipeline/", "workers/", "topics/", "schemas/", "tests/", "deploy/", "bench/", "docs/")
    tests = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    spans = code_spans(name)
    missing = [span for span in spans if span.startswith(folders) and not (ROOT / span).exists()]
    missing += [span for span in spans if re.fullmatch(r"test_\w+\.py", span) and span not in tests]
    modules = re.findall(r"\bbench\.(\w+)", text_of(name))
    missing += [module for module in modules if module not in BENCHES]
    assert missing == []


@pytest.mark.parametrize("name", WRITTEN)
def test_named_settings_exist(name: str) -> None:
    settings, chart = load(Common()).settings, yaml.safe_load((ROOT / "deploy" / "chart" / "values.yaml").read_text())
    unknown = []
    for span in code_spans(name):
        section, dot, rest = span.partition(" ")[0].partition("=")[0].partition(".")
        setting = rest.partition(".")[0]
        if dot and hasattr(settings, section) and re.fullmatch(r"[a-z_]+", setting) and setting not in FILE_TYPES:
            known = hasattr(getattr(settings, section), setting) or setting in chart.get(section, {})
            unknown += [] if known else [span]
    assert unknown == []


@pytest.mark.parametrize("name", WRITTEN)
def test_named_classes_exist(name: str) -> None:
    named = {span for span in code_spans(name) if re.fullmatch(r"[A-Z]+[a-z]+[A-Za-z]*[A-Z][A-Za-z]*", span)}
    assert named - WORDS == set()


@pytest.mark.parametrize("name", WRITTEN)
def test_named_metrics_exist(name: str) -> None:
    known = {metric.name for metric in metrics()}
    named = {span for span in code_spans(name) if re.fullmatch(r"rose_(?!rollouts)[a-z_]+", span)}
    assert [each for each in named if not any(metric.startswith(each) for metric in known)] == []


def test_troubleshooting_table_has_the_messages_of_the_code() -> None:
    code = "".join(
        file.read_text(encoding="utf-8")
        for folder in ("pipeline/monitor", "topics", "workers/environments")
        for file in sorted((ROOT / folder).glob("*.py"))
    )
    tables = text_of("docs/operations/troubleshooting.md").partition("### Executors")[2].partition("## Health")[0]
    quoted = [
        span for row in re.findall(r"^\|([^|]+)\|", tables, re.MULTILINE) for span in re.findall(r"`([^`]+)`", row)
    ]
    assert len(quoted) > 25
    for sentence in quoted:
        words = [word for word in sentence.split() if re.search("[a-z]", word)]
        size = min(3, len(words))
        windows = [" ".join(words[start : start + size]) for start in range(len(words) - size + 1)]
        assert any(window.rstrip(":.,") in code for window in windows), sentence
