"""Memory to spare: the host's, or what a container's limit leaves."""

from __future__ import annotations

from pathlib import Path

from overlap.job.memory import available_bytes


def test_the_smaller_of_host_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2000 kB\nMemAvailable:   1000 kB\n")
    assert available_bytes(None, meminfo, tmp_path / "nowhere") == 1024000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_bytes(None, meminfo, tmp_path) == 1024000
    (tmp_path / "memory.max").write_text("51000\n")
    assert available_bytes(None, meminfo, tmp_path) == 50000
    assert available_bytes() > 0
