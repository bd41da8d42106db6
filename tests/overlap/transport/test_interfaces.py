"""Over which network interface ranks connect, on hosts that have several: network namespaces, one link, and a bridge each.

The bridges have the same address on all hosts, as those of containers do, and lead nowhere, as do the hosts' own names.
gloo alone does not connect there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.emulation.cluster import Cluster
from overlap.transport.torch.interfaces import Address, chosen, described, other_host, refusal

JOB = """
import logging, os, torch, dear
import torch.distributed as dist
logging.basicConfig(level=logging.INFO)
before = os.environ.get("GLOO_SOCKET_IFNAME")
dear.init()
found = torch.ones(1)
dist.all_reduce(found)
group = dist.new_group([0, 1])  # a script's own goes the same way
dist.all_reduce(found, group=group)
total = dear.allreduce(torch.ones(1), op=dear.Sum).item()
print(f"rank {dear.rank()} of {total:g} over {os.environ['GLOO_SOCKET_IFNAME']}: {found.item():g}", flush=True)
dear.shutdown()
assert os.environ.get("GLOO_SOCKET_IFNAME") == before
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        for host in range(2):
            for command in (
                "ip link add docker0 type bridge",
                "ip addr add 172.17.0.1/16 dev docker0",
                "ip link set docker0 up",
            ):
                subprocess.run(cluster.enter(host, command.split()), check=True)
        yield cluster


def _torch_job(hosts: Cluster, script: Path, masters: tuple[str, str], interface: str = "") -> str:
    """What both ranks write; their environment is torchrun's. `masters`: what each of them takes for rank 0's address."""
    jobs = []
    for rank, master in enumerate(masters):
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        told |= {
            "MASTER_ADDR": master,
            "MASTER_PORT": "29401",
            "GLOO_SOCKET_IFNAME": interface,
        }
        command = hosts.enter(rank, [sys.executable, str(script)])
        jobs.append(
            subprocess.Popen(
                command, env={**os.environ, **told}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        return "".join(job.communicate(timeout=300)[0] for job in jobs)
    finally:
        for job in jobs:
            job.kill()


@pytest.mark.needs_root
@pytest.mark.parametrize(
    "masters", [pytest.param(("10.77.0.1", "10.77.0.1"), marks=pytest.mark.full), ("127.0.0.1", "10.77.0.1")]
)
def test_under_torchrun_it_is_the_one_that_reaches_the_other_host(
    masters: tuple[str, str], hosts: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(JOB)
    output = _torch_job(hosts, script, masters)
    for rank in range(2):
        assert f"rank {rank} of 2 over eth0: 4" in output, output
        assert f"rank {rank}: gloo's connections go over the interface eth0 (10.77.0.{rank + 1})" in output


@pytest.mark.needs_root
def test_one_that_cannot_connect_is_named_with_the_remedy(hosts: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    sooner = "import datetime, overlap.transport.torch.rendezvous as it\nit._CONNECT = datetime.timedelta(seconds=3)\n"
    script.write_text(sooner + JOB)
    output = _torch_job(hosts, script, ("10.77.0.1", "10.77.0.1"), interface="docker0")
    assert "ranks could not connect to each other over the interface docker0 (172.17.0.1)" in output, output
    assert "name it on each host: GLOO_SOCKET_IFNAME=NAME. This host has lo (127.0.0.1), eth0 (10.77.0." in output


@pytest.mark.needs_root
def test_under_mpi_it_is_the_one_that_reaches_rank_0(
    hosts: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(JOB)
    hosts.run_mpi([str(script)], env={"GLOO_SOCKET_IFNAME": ""}, timeout=300)
    output = capfd.readouterr().out
    for rank in range(2):
        assert f"rank {rank} of 2 over eth0: 4" in output, output


def test_what_other_hosts_can_reach() -> None:
    assert other_host(["127.0.0.1", "", "10.0.0.2", "10.0.0.3"]) == "10.0.0.2"
    assert other_host(["127.0.0.1", "127.0.0.1", "::1"]) is None


def test_it_listens_on_each_interface_that_is_named_once_for_each_family() -> None:
    addresses = [
        Address("127.0.0.1", "lo"),
        *(Address("10.0.0.1", "eth0"), Address("10.0.0.9", "eth0"), Address("fd00::1", "eth0")),
        *(Address("10.1.0.1", "eth1"), Address("fd01::1", "eth1")),
    ]
    assert chosen("eth1,eth0", [], addresses) == ["10.1.0.1", "10.0.0.1", "fd01::1", "fd00::1"]
    assert chosen("eth1", [], addresses) == ["10.1.0.1", "fd01::1"]
    assert chosen("", ["10.1.0.1"], addresses) == ["10.1.0.1", "fd01::1"]
    assert chosen("", [], addresses) == ["10.0.0.1", "fd00::1"]
    assert chosen("ib0", [], addresses) == []


def test_what_is_said_of_interfaces() -> None:
    addresses = [Address("127.0.0.1", "lo"), Address("10.0.0.1", "eth0")]
    assert described("", addresses) == "the interface that this host's own name leads to"
    assert described("eth0", addresses) == "the interface eth0 (10.0.0.1)"
    assert described("ib0", addresses) == "the interface ib0, which has no address here"
    said = refusal("eth0", addresses, "no route")
    assert "over the interface eth0 (10.0.0.1): no route." in said
    assert said.endswith("GLOO_SOCKET_IFNAME=NAME. This host has lo (127.0.0.1), eth0 (10.0.0.1)")
