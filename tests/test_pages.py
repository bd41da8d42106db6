"""What pages point to is there: links, their headings, and files that are named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.harness import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]
CODE = {
    "comm_core",
    "overlap",
    "dearrun",
    "dear",
    "wfbp",
    "mgwfbp",
    "bytescheduler_adapter",
    "oss",
    "fsdp",
    "osdp",
    "co2",
    "pipe",
    "model_parallel",
    "bench",
}
FILES = {path.name for top in (*CODE, "tests", "examples", "scripts") for path in (ROOT / top).rglob("*.?*")}
FILES |= {path.name for path in ROOT.iterdir()}
YOURS = {"train.py"}  # scripts of the reader's
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCED.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{target} is not there"
        assert not anchor or anchor in _anchors(place), f"{place.name} has no heading for {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    names = re.findall(r"`(?:[\w./-]*/)?(\w+\.(?:py|cpp|hpp))`", page.read_text())
    assert sorted(set(names) - FILES - YOURS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_is_python(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        ast.parse(block)


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def _text(node: ast.AST) -> str:
    """Of a literal, with an ellipsis for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) if isinstance(value, ast.Constant) else "…" for value in node.values)
    return ""


def test_messages_that_troubleshooting_names_are_said() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sources = [path for top in CODE - {"bench"} for path in (ROOT / top).rglob("*.py")]
    said = [_text(node) for path in sources for node in ast.walk(ast.parse(path.read_text()))]
    said = [re.sub(r"%[rsd.\dg]+", "…", text) for text in said if len(text) > 10]
    named = re.findall(r"^\| `([^`]+)` ", page, re.MULTILINE)
    assert len(named) > 40
    assert [text for text in named if not any(text in one for one in said)] == []
