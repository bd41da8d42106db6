"""Sets environment variables for a while, for libraries and for processes that a rank starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["Variables"]


class Variables:
    """Environment variables that are set until :meth:`restore`."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)

    def restore(self) -> None:
        """Put back what was there, except where the script has set another value since."""
        for name, value in self._values.items():
            if os.environ.get(name) != value:
                continue
            before = self._before[name]
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
        self._values = {}
