"""Checks that pages agree with their sources, and that measured numbers name one (reads results, else pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from bench.claims.views import render

__all__ = ["MEASURED", "passages", "problems", "unsourced", "written"]

# Pages, and the heading of the section in which numbers need a source; None: all of the page.
MEASURED = {"README.md": "What was measured", "docs/performance.md": None}

_BEGIN, _END = "<!-- results:", "<!-- end -->"
_SOURCED = re.compile(r"<!-- results: (?P<source>[^\n]*?) -->(?P<text>(?:(?!<!-- ).)*?)<!-- end -->", re.DOTALL)
_NUMBER = r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)"
_FREE = re.compile(  # what holds no claim: fenced and indented code, code font, limits, targets of links
    r"^```.*?^```$|^ {4,}.*?$|`(?:[^`\n]|\n(?!\n))*`|≤ [\d.]+(?: (?:×|MB|s|ms|%|L)(?!\w))?|\]\([^)\n]*\)",
    re.DOTALL | re.MULTILINE,
)
_MEASURED = re.compile(
    rf"× ?{_NUMBER}|{_NUMBER} ?(?:×|%|°|(?:x|times|s|ms|µs|ns|L|KB|MB|MiB|GB|GiB|seconds|minutes|min)(?!\w))"
    r"|(?<![\w.])\d+\.\d+(?![\w]|\.\d)"
)
_COUNT = "two|three|four|five|six|seven|eight|nine|ten"
_PART = "third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|twentieth|hundredth"
_WORD = re.compile(  # numbers in words that look measured: in_words gives them a source
    rf"\b(?:twice|thrice|half|halves|(?:an?|one|{_COUNT})\s+(?:{_PART})s?|(?:{_COUNT})\s+(?:times|of\s+(?:these|them)))\b",
    re.IGNORECASE,
)
_ROW = re.compile(r"^\|.*$", re.MULTILINE)


def _blank(text: str) -> str:
    """As many lines of nothing."""
    return re.sub(r"[^\n]", " ", text)


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _section(text: str, heading: str | None) -> str:
    """The page with all but one section blanked out; a section ends at the next heading of its rank or a higher one."""
    if heading is None:
        return text
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    if found is None:
        raise ValueError(
            f"there is no section {heading!r}, whose numbers need sources; see MEASURED in bench/claims/pages.py"
        )
    after = re.compile(rf"^#{{1,{len(found[1])}}} ", re.MULTILINE).search(text, found.end())
    end = len(text) if after is None else after.start()
    return _blank(text[: found.start()]) + text[found.start() : end]


def unsourced(text: str, heading: str | None) -> Iterator[tuple[int, str]]:
    """Numbers in a page, in digits or words, that look measured and name no source, by line."""
    bare = _SOURCED.sub(lambda found: _blank(found[0]), _section(text, heading))
    bare = _FREE.sub(lambda found: _blank(found[0]), bare)
    in_tables = [
        (row.start() + found.start(), found[0]) for row in _ROW.finditer(bare) for found in re.finditer(_NUMBER, row[0])
    ]
    in_sentences = [
        (found.start(), found[0]) for found in _MEASURED.finditer(_ROW.sub(lambda row: _blank(row[0]), bare))
    ]
    in_words = [(found.start(), found[0]) for found in _WORD.finditer(bare)]
    for place, number in sorted(in_tables + in_sentences + in_words):
        yield _line(bare, place), " ".join(number.split())


def passages(text: str) -> Iterator[tuple[int, str, str]]:
    """The sourced passages of a page: the line, the source, and what the page says."""
    for found in _SOURCED.finditer(text):
        yield _line(text, found.start()), found["source"], found["text"].strip("\n")


def _rendered(found: re.Match[str], view: Callable[[str], str]) -> str:
    """The sourced passage as it should be: tables on lines of their own, numbers within theirs."""
    text = view(found["source"])
    alone = found["text"].startswith("\n")
    if not alone and "\n" in text:
        raise ValueError(f"{found['source']!r} gives a table: put {_END} on a line of its own")
    inside = f"\n{text}\n" if alone else text
    return f"{_BEGIN} {found['source']} -->{inside}{_END}"


def written(text: str, view: Callable[[str], str] = render) -> str:
    """The page with its sourced passages rewritten from the results.

    Raises ``ValueError`` for a source that gives nothing.
    """
    return _SOURCED.sub(lambda found: _rendered(found, view), text)


def problems(text: str, view: Callable[[str], str] = render) -> Iterator[tuple[int, str]]:
    """The problems of a page's sourced passages, by line."""
    passages = list(_SOURCED.finditer(text))
    marks = {mark: text.count(mark) for mark in (_BEGIN, _END)}
    if set(marks.values()) != {len(passages)}:
        yield 1, " and ".join(f"{count} times {mark}" for mark, count in marks.items()) + ": each begin needs its end"
    for found in passages:
        line = _line(text, found.start())
        if not found["text"].startswith("\n") and text[: found.start()].rpartition("\n")[2].strip(" *->") == "":
            yield line, "begins with a source, which makes Markdown take the line for HTML: begin it with a word"
        try:
            wanted = _rendered(found, view)
        except ValueError as error:
            yield line, str(error)
            continue
        pairs = zip(found[0].split("\n"), wanted.split("\n"), strict=False)
        if found[0] != wanted:
            said, is_so = next(((a, b) for a, b in pairs if a != b), (found[0], wanted))
            yield line, f"says\n    {said}\nand the results say\n    {is_so}"
