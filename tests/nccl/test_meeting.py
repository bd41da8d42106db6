"""How ranks find each other, and how a process ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import comm_core
from comm_core import Communicator, nccl_connect
from tests.gpu_double import Double
from tests.harness import ROOT


def _meet(
    gpu: Double, monkeypatch: pytest.MonkeyPatch, others: dict[int, dict[str, str]], device: int = 0
) -> Communicator:
    monkeypatch.setenv("COMM_CORE_NCCL", str(gpu.path))
    monkeypatch.setenv("COMM_CORE_CUDA", str(gpu.path))
    monkeypatch.setattr(nccl_connect, "watch_exit", lambda size: None)

    def exchange(mine: bytes) -> list[bytes]:
        said = json.loads(mine)
        return [mine, *(json.dumps({**said, **others[rank]}).encode() for rank in sorted(others))]

    comm = comm_core.nccl(0, 1 + len(others), device, exchange)
    gpu._open.append(comm)
    return comm


def test_ranks_meet_through_what_they_exchange(gpu: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = _meet(gpu, monkeypatch, {1: {}})
    assert (comm.rank, comm.size, comm.device, comm.backend) == (0, 2, 0, "nccl")
    assert comm_core._C.describe("nccl")["nccl_version"] == "22907"
    with pytest.raises(comm_core.Unsupported, match=r"because of rank 0: there is no CUDA device 8; 8 can be seen"):
        _meet(gpu, monkeypatch, {1: {}}, device=8)
    with pytest.raises(comm_core.Unsupported, match=r"because of rank 2: no driver"):
        _meet(gpu, monkeypatch, {1: {}, 2: {"trouble": "no driver"}})
    with pytest.raises(comm_core.Unsupported, match=r"rank 0 2\.29\.7 \(.*rank 1 2\.20\.5 \(/old\)"):
        _meet(gpu, monkeypatch, {1: {"version": "2.20.5", "path": "/old"}})
    gpu.fail("ncclCommInitRank", 3)
    with pytest.raises(comm_core.NcclError, match="ncclCommInitRank: error"):
        _meet(gpu, monkeypatch, {1: {}})


def test_bytes_are_exchanged_over_a_host_communicator() -> None:
    assert comm_core.exchange_over(comm_core.local())(b"hello") == [b"hello"]


def _run(text: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", text]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False)


@pytest.mark.parametrize("issued", [False, True])
def test_a_process_ends(issued: bool, gpu: Double) -> None:
    """With everything left open; and with an operation that no peer will ever answer."""
    text = f"""
import numpy as np
import comm_core
from comm_core import Buffer, DType
def exchange(mine):
    return [mine, mine]
comm = comm_core.nccl(0, 2, 0, exchange)
a = np.ones(4, np.float32)
if {issued}:
    comm.broadcast_async(Buffer(a.ctypes.data, 4, DType.FLOAT32, owner=a, device=0))
print("reached the end", flush=True)
"""
    env = {"COMM_CORE_NCCL": str(gpu.path), "COMM_CORE_CUDA": str(gpu.path), "COMM_CORE_EXIT_SECONDS": "1"}
    done = _run(text, {"PYTHONPATH": str(ROOT), **env})
    assert "reached the end" in done.stdout, done.stderr
    assert (done.returncode != 0) == issued, done.stderr
    assert ("COMM_CORE_EXIT_SECONDS" in done.stderr) == issued


def test_without_a_library_it_says_so() -> None:
    text = """
import comm_core
try:
    comm_core.nccl(0, 1, 0, lambda mine: [mine])
except comm_core.Unsupported as error:
    print(error)
"""
    done = _run(text, {"COMM_CORE_NCCL": "libm.so.6"})
    assert done.stdout.startswith("NCCL cannot be used, because of rank 0: NCCL at libm.so.6")
