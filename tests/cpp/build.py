"""The C++ compiler that comm_core was built with, for programs and libraries that only tests need."""

from __future__ import annotations

import os
import shutil

__all__ = ["compiler"]


def compiler() -> str:
    """Its path or name."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert found is not None, "comm_core was built, so there should be a C++ compiler"
    return found
