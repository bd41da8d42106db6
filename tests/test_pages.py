"""What pages point to is there: links, their headings, and files that are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]
CODE = {"comm_core", "overlap", "dearrun", "dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "oss", "co2", "bench"}
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
