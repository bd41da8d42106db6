"""The origin of a result, besides its settings: the code that ran, torch, and environment variables."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.program import ROOT

__all__ = ["UNCOMMITTED", "Origin", "commit_of", "origin_of", "today"]

UNCOMMITTED = "-dirty"  # in the commit of a result whose code nobody can get again

# Read by our strategies, by Horovod, and by what they communicate with. OMP_NUM_THREADS is not: the launcher sets it.
_PREFIXES = ("DEAR_", "HOROVOD_", "COMM_CORE_", "OMPI_MCA_", "GLOO_", "NCCL_")
_OURS = "DEAR_BENCH_"  # how the launcher talks to its workers
# What no run reads: a report or a note that is written or committed meanwhile makes no other code.
_UNREAD = (":!docs", ":!tests", ":!configs/sweeps", ":!*.md")


@dataclass(frozen=True)
class Origin:
    """The origin of a result; results of one origin may be compared."""

    commit: str
    torch: str
    environment: Mapping[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        return ", ".join([self.commit, f"torch {self.torch}", *variables])

    def to_dict(self) -> dict[str, Any]:
        return {"commit": self.commit, "torch": self.torch, "environment": self.environment}


def _git(root: Path, *words: str) -> bytes | None:
    try:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def commit_of(root: Path) -> str:
    """The last commit of anything that a run reads, with a hash of what tracked files differ in since.

    Where there is no git: the version of what was installed.
    """
    last = ("log", "-1", "--format=%h", "--abbrev=10", "--", ".", *_UNREAD)
    head = _git(root, *last) if (root / ".git").exists() else None
    changes = None if head is None else _git(root, "diff", "--no-ext-diff", "--binary", "HEAD", "--", ".", *_UNREAD)
    if head is None or changes is None:
        try:
            return f"version {importlib.metadata.version('dear-pytorch')}"
        except importlib.metadata.PackageNotFoundError:
            return "unknown"
    commit = head.decode().strip()
    return f"{commit}{UNCOMMITTED}.{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def today(environ: Mapping[str, str] = os.environ) -> Origin:
    """The origin of a run that begins now."""
    told = {name: value for name, value in environ.items() if name.startswith(_PREFIXES) and not name.startswith(_OURS)}
    return Origin(commit_of(ROOT), torch.__version__, told)


def origin_of(result: Mapping[str, Any]) -> Origin:
    """The origin of a result."""
    return Origin(**result["origin"])
