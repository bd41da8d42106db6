"""Over what the bytes of ranks go that MPI has connected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.emulation.cluster import Cluster
from overlap.job.connecting import Host, tcp_suffices
from overlap.job.fabric import devices

HERE, THERE = ("boot", "net:[1]"), ("boot", "net:[2]")

JOB = """
import logging, torch, dear
from overlap.job import session
logging.basicConfig(level=logging.WARNING)
FIRST
dear.init(torch_distributed=False)
total = dear.allreduce(torch.full((100_000,), dear.rank() + 1.0), op=dear.Sum)
assert total[0] == total[-1] == 3.0
assert dear.mpi_enabled() and dear.mpi_threads_supported()
print(f"rank {dear.rank()}: {session.current().comm.backend}", flush=True)
dear.shutdown()
"""


def test_tcp_suffices_between_hosts_that_have_nothing_faster() -> None:
    assert tcp_suffices([Host("auto", HERE, []), Host("auto", THERE, [])])
    assert not tcp_suffices([Host("auto", HERE, []), Host("auto", HERE, [])])
    assert not tcp_suffices([Host("auto", HERE, []), Host("auto", THERE, ["infiniband/uverbs0"])])


def test_devices_of_faster_networks_are_found(tmp_path: Path) -> None:
    assert devices(tmp_path) == []
    for name in ("infiniband/rdma_cm", "infiniband/uverbs0", "hfi1_0", "hfi1_gsi", "cxi0", "null"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert devices(tmp_path) == ["cxi0", "hfi1_0", "infiniband/uverbs0"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


UNREACHABLE = """
import comm_core

def tcp(*rest, **options):
    raise comm_core.TransportError("rank 1: a firewall")

comm_core.tcp = tcp
"""


@pytest.mark.needs_root
@pytest.mark.parametrize(
    ("first", "chosen", "backend"),
    [("", "", "tcp"), ("", "mpi", "mpi"), (UNREACHABLE, "", "mpi")],
    ids=["", "mpi", "not reached"],
)
def test_between_hosts(
    first: str, chosen: str, backend: str, hosts: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(JOB.replace("FIRST", first))
    hosts.run_mpi([str(script)], env={"DEAR_TRANSPORT": chosen}, timeout=300)
    output, told = capfd.readouterr()
    assert sorted(re.findall(r"rank \d: \w+", output)) == [f"rank 0: {backend}", f"rank 1: {backend}"]
    assert (
        "MPI moves the bytes, since ranks do not reach each other over TCP: rank 1: a firewall" in output + told
    ) is bool(first)
