"""A network interface that a host does not have is named, with those that it has."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.emulation.cluster import Cluster
from dearrun.errors import LaunchError
from dearrun.hosts import Host
from dearrun.interfaces import of_all, remote_shell, require_interfaces
from tests.dearrun.test_worker import environ


def test_the_error_names_the_host_and_its_interfaces() -> None:
    there = {"a": ["eth0", "lo"], "b": ["ib0", "lo"]}
    require_interfaces("lo", there)
    require_interfaces("lo,10.0.0.0/24,fe80::1", there)  # MPI takes addresses, too
    with pytest.raises(LaunchError, match=r"names 'eth0', and b has no such interface: it has ib0, lo$"):
        require_interfaces("lo, eth0", there)


def test_other_hosts_are_asked_as_mpirun_reaches_them(tmp_path: Path) -> None:
    assert remote_shell({"PRTE_MCA_plm_ssh_agent": "/bin/agent -q : ssh"}, None, None) == ["/bin/agent", "-q"]
    assert remote_shell({}, 22, "key")[-4:] == ["-p", "22", "-i", "key"]
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" = b ] && [ "$2" = "ls /sys/class/net" ] && echo ib0 lo\n')
    agent.chmod(0o755)
    found = of_all([Host("here"), Host("b"), Host("mute")], "here", [str(agent)])
    assert found == {"here": sorted(name for _, name in socket.if_nameindex()), "b": ["ib0", "lo"]}
    assert set(of_all([Host("b")], "here", ["/no/such/program"])) == {"here"}


def test_dearrun_says_so_in_one_line() -> None:
    command = [sys.executable, "-m", "dearrun", "-np", "1", "--network-interface", "eth77", "true"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ(), check=False)
    assert said.returncode == 1
    begins = f"dearrun: --network-interfaces names 'eth77', and {socket.gethostname()} has no such interface: it has "
    assert said.stderr.startswith(begins)
    assert "lo" in said.stderr
    assert len(said.stderr.splitlines()) == 1


@pytest.mark.needs_root
def test_of_two_hosts_the_one_that_lacks_it_is_named() -> None:
    with Cluster(2) as cluster:
        hosts = ",".join(f"{cluster.address(host)}:1" for host in range(2))
        agents = dict.fromkeys(("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"), cluster.agent)
        options = ["-H", hosts, "--network-interface", "only0"]
        subprocess.run(cluster.enter(0, ["ip", "link", "add", "only0", "type", "bridge"]), check=True)
        command = cluster.enter(0, [sys.executable, "-m", "dearrun", *options, "true"])
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ(**agents), check=False)
        other = cluster.address(1)
    assert said.returncode == 1
    assert re.fullmatch(rf"dearrun: .* names 'only0', and {other} has no such .*: it has .*lo.*\n", said.stderr), (
        said.stderr
    )
