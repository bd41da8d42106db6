"""What mkdocs does with a page beside its plugins: no roles of docstrings (``:class:``), and search without a network."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r":(?:class|meth|func|attr|mod|data):(?=<code>)", "", html)


def on_post_page(output: str, **_: Any) -> str:
    """The offline plugin's helper for search from a file lies elsewhere; ours is in the site."""
    folder = re.search(r'href="([^"]*)assets/site\.css"', output)
    return output.replace("https://unpkg.com/iframe-worker/shim", f"{folder[1] if folder else ''}assets/worker.js")
