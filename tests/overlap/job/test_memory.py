"""Memory to spare: the host's, or what a container's limit leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overlap.job.memory.counted import Peak, available_bytes, resident_bytes


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


def test_every_control_group_around_the_process_counts(tmp_path: Path) -> None:
    meminfo, own = tmp_path / "meminfo", tmp_path / "own"
    meminfo.write_text("MemAvailable:   1000 kB\n")
    own.write_text("4:cpu,memory:/job/rank\n0::/slice\n")
    for folder, limit, used in (("memory/job/rank", 90000, 1000), ("memory/job", 70000, 60000)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    assert available_bytes(None, meminfo, tmp_path, own) == 10000
    (tmp_path / "slice").mkdir()
    (tmp_path / "slice" / "memory.max").write_text("5000\n")
    (tmp_path / "slice" / "memory.current").write_text("1000\n")
    assert available_bytes(None, meminfo, tmp_path, own) == 4000


def test_the_limit_of_the_address_space_counts() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**36, -1))\n"
    look = "from overlap.job.memory.counted import available_bytes; print(available_bytes())"
    found = subprocess.run([sys.executable, "-c", limit + look], check=True, capture_output=True, text=True)
    assert 0 < int(found.stdout) < 2**36


def test_the_most_since_it_began_anew() -> None:
    peak = Peak()
    before = peak.read()
    large = bytearray(64 * 2**20)
    assert large is not None
    del large
    assert peak.read() >= before + 60 * 2**20
    assert resident_bytes() <= before + 30 * 2**20
    peak.reset()
    assert peak.read() <= before + 30 * 2**20


def test_a_process_that_cannot_begin_anew_says_so(tmp_path: Path) -> None:
    (tmp_path / "clear_refs").mkdir()
    with pytest.raises(OSError, match="clear_refs"):
        Peak(tmp_path)
    (tmp_path / "status").write_text("Name: x\n")
    with pytest.raises(OSError, match="has no VmRSS"):
        resident_bytes(tmp_path)


def test_of_a_gpu_tensors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    place, reset = torch.device("cuda", 0), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda at: {place: 5}[at])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda at: {place: 7}[at])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    peak = Peak(place=place)
    assert reset == [place]
    assert (peak.read(), resident_bytes(place=place)) == (7, 5)
    peak.reset()
    assert reset == [place, place]
