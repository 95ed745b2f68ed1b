"""The documentation names what is there: files, commands, fields and faults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PAGES = sorted(
    [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *ROOT.glob("docs/**/*.md")]
)
FAULT_ID = r"\b(?:[A-Z]{2}|G)-\d{2}\b"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(page: Path) -> str:
    """Return a page without its code, in which brackets mean something else."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)


def code(page: Path) -> str:
    """Return the code of a page, blocks and spans, each on lines of its own."""
    blocks = re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", page.read_text("utf-8"), flags=re.DOTALL)
    return "\n".join(block or span for block, span in blocks)


def section(page: Path, title: str) -> str:
    _, _, rest = page.read_text("utf-8").partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0]


def links(page: Path) -> list[str]:
    """Return the targets of a page's links that lead to files."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in found if not re.match(r"[a-z]+:|#", target)]


def fields(schema: Any) -> Iterator[str]:
    """Yield the names of all properties in a JSON Schema."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for part in schema.values():
            yield from fields(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from fields(part)


@every_page
def test_no_placeholder_is_left(page: Path):
    """A line of capitals stands where a table was to come."""
    lines = page.read_text("utf-8").splitlines()
    assert [line for line in lines if re.fullmatch(r"\s*[A-Z][A-Z_]+\s*", line)] == []


@every_page
def test_no_link_is_dead(page: Path):
    """A file that was moved or never written."""
    assert [target for target in links(page) if not (page.parent / target.partition("#")[0]).exists()] == []


def test_links_are_found():
    """The check above sees links: the README has some, and one into a folder."""
    assert "docs/results.md" in links(ROOT / "README.md")


def test_every_make_command_is_a_target():
    """A command that the Makefile does not have, or has no longer."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"^make ([a-z-]+)", code(ROOT / name), flags=re.MULTILINE))
        assert named, name
        assert named <= targets, name


def test_every_folder_of_the_readme_exists():
    """The table of folders, and the code that it sends a newcomer to."""
    named = re.findall(r"^\| `([^`]+)/` \|", section(ROOT / "README.md", "Where things are"), flags=re.MULTILINE)
    assert {"specdec_lab", "docs"} <= set(named)
    assert [folder for folder in named if not (ROOT / folder).is_dir()] == []


@pytest.mark.parametrize("kind", ["request", "summary"])
def test_every_field_is_defined(kind: str):
    """A field that a result file has and the page about results does not explain."""
    schema = json.loads((ROOT / "specdec_lab" / "schemas" / f"{kind}.schema.json").read_text("utf-8"))
    words = set(re.findall(r"\w+", code(ROOT / "docs" / "results.md")))
    assert sorted(set(fields(schema)) - words) == []


def test_every_fault_has_a_line_and_every_line_its_tests():
    """An id without an explanation, or a page that claims a guard which is not there."""
    sources = {path: path.read_text("utf-8") for path in TESTS.rglob("*.py") if path != Path(__file__)}
    rows = re.findall(
        rf"^\| ({FAULT_ID}) \|(.*)$", (ROOT / "docs" / "faults.md").read_text("utf-8"), flags=re.MULTILINE
    )
    listed = [fault for fault, _ in rows]
    assert listed == list(dict.fromkeys(listed))
    assert set(listed) == {fault for source in sources.values() for fault in re.findall(FAULT_ID, source)}
    for fault, cells in rows:
        guards = re.findall(r"\(\.\./(tests/[^)]+)\)", cells)
        assert guards, fault
        assert [name for name in guards if fault not in sources.get(ROOT / name, "")] == [], fault


def test_every_decision_is_in_the_index():
    """A page that nobody finds."""
    index = ROOT / "docs" / "decisions" / "README.md"
    pages = {path.name for path in index.parent.glob("[0-9]*.md")}
    assert pages
    assert pages == set(links(index))
