"""The version, which stands in the metadata of the installed package alone."""

from __future__ import annotations

from importlib import metadata

__all__ = ["__version__"]

try:
    __version__ = metadata.version("dear-pytorch")
except metadata.PackageNotFoundError:  # copied without its metadata, as by some tools that freeze programs
    __version__ = "0+unknown"
