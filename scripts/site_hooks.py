"""What mkdocs does with a page beside its plugins: roles of docstrings (``:class:``) are not shown."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r":(?:class|meth|func|attr|mod|data):(?=<code>)", "", html)
