"""Under dearrun: scripts that ask for their rank, or make a group, before ``dear.init()``, and those that never meet."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.emulation.cluster import Cluster
from dearrun import meeting as meetings
from dearrun import worker
from dearrun.addresses import own_toward
from dearrun.hosts import Host
from dearrun.inherited import without_launcher, without_torchrun
from dearrun.meeting import Meeting
from tests import forkserver
from tests.dearrun.test_worker import environ
from tests.harness import ROOT

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# As a torchrun around dearrun leaves it.
OUTER = {
    **dict(zip(NAMES, ("7", "9", "7", "9", "192.0.2.1", "1"), strict=True)),
    "GROUP_RANK": "3",
    "TORCHELASTIC_RUN_ID": "outer",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

ASKS_FIRST = f"""
import os, sys, time, torch
import torch.distributed as dist
told = [os.environ.get(name) for name in {NAMES}]
rank = int(told[0])
assert told[:5] == [str(rank), "2", str(rank), "2", "127.0.0.1"], told
assert "GROUP_RANK" not in os.environ

def total():
    found = torch.ones(1)
    dist.all_reduce(found)
    return found.item()

dist.init_process_group("gloo")
assert (dist.get_rank(), dist.get_world_size(), total()) == (rank, 2, 2)
if sys.argv[1] == "dear":
    import dear
    dear.init()
    assert (dear.rank(), dear.size(), dear.mpi_enabled()) == (rank, 2, True)
    assert dear.allreduce(torch.ones(1), op=dear.Sum) == 2
    dear.shutdown()
    assert total() == 2, "the script's own group is left alone"
    assert [os.environ.get(name) for name in {NAMES}] == told
dist.destroy_process_group()
print("the end", flush=True)
time.sleep(0.2)  # gloo's thread lets go of the last tensor a moment later, and aborts a process that ends meanwhile
"""


def _job(folder: Path, text: str, *argv: str, ranks: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "dearrun", "-np", str(ranks), sys.executable, str(script), *argv]
    told = environ(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), TMPDIR=str(folder), **variables)
    told = forkserver.environment(told)
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=told, cwd=folder, check=False)


@pytest.mark.parametrize("way", ["dear", "torch"])
def test_a_script_that_makes_its_group_first_trains_together(way: str, tmp_path: Path) -> None:
    """Before ``dear.init()``, which takes MPI, or without it. A torchrun around dearrun makes no difference."""
    result = _job(tmp_path, ASKS_FIRST, way, **OUTER)
    assert (result.returncode, result.stdout.count("the end")) == (0, 2), result.stderr
    assert "trained alone" not in result.stderr
    assert list(tmp_path.glob("dearrun*")) == []


INIT = "import dear; dear.init()"
ALONE = "dearrun: 2 processes ran, and none of them called dear.init() or made torch.distributed's group: if they"


@pytest.mark.parametrize(
    ("text", "ranks", "status", "said"),
    [
        ("pass", 2, 0, True),
        ("pass", 1, 0, False),
        (INIT, 2, 0, False),
        # Whether MPI is loaded, dearrun looks for in the process that it has started, which a fork stands behind.
        pytest.param(
            *("import comm_core, time; comm_core.mpi(); time.sleep(0.7)", 2, 0, False), marks=pytest.mark.real_start
        ),
        ("import sys; sys.exit(5)", 2, 5, False),
    ],
)
def test_a_job_whose_ranks_never_met_is_told(text: str, ranks: int, status: int, said: bool, tmp_path: Path) -> None:
    result = _job(tmp_path, text, ranks=ranks)
    assert (result.returncode, result.stderr.count(ALONE)) == (status, int(said)), result.stderr
    assert not said or result.stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["train.py"]


def test_programs_that_are_not_python_need_not_meet_nor_those_that_meet_elsewhere() -> None:
    for command, variables in (("true", {}), (f"{sys.executable} -c pass", {"MASTER_PORT": "29511"})):
        words = [sys.executable, "-m", "dearrun", "-np", "2", *command.split()]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environ(**variables), check=True)
        assert result.stderr == ""


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ({}, [None] * 6),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            ["1", "2", None, None, "host", "7"],
        ),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            ["3", "4", "1", "2", "host", "7"],
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "RANK": "0"},
            ["1", "2", "1", "2", "127.0.0.1", "7"],
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "mine", "MASTER_PORT": "8"},
            ["1", "2", None, None, "mine", "8"],
        ),
    ],
)
def test_what_a_worker_is_told(launcher: Mapping[str, str], expected: list[str | None]) -> None:
    show = f"import json, os; print(json.dumps([os.environ.get(name) for name in {NAMES}]))"
    command = worker.telling([sys.executable, "-S", "-c", show], "host", 7)
    told = without_launcher(environ()) | launcher
    said = subprocess.run(command, capture_output=True, text=True, env=told, timeout=60, check=True)
    assert json.loads(said.stdout) == expected


def test_ranks_that_do_not_know_where_to_meet_are_told_nothing() -> None:
    command = worker.telling(["sh", "-c", "echo ${MASTER_ADDR-none} ${MASTER_PORT-none}"], "", 7)
    told = without_launcher(environ()) | {"PMI_RANK": "0", "PMI_SIZE": "2"}
    assert subprocess.run(command, capture_output=True, text=True, env=told, check=True).stdout == "none none\n"


def test_only_torchruns_own_variables_are_left_out() -> None:
    mine = {"RANK": "0", "MASTER_PORT": "29500", "WORD": "1"}
    assert without_torchrun(mine) == mine
    assert without_torchrun({**mine, **OUTER}) == {"WORD": "1"}


def test_the_port_is_kept_for_who_asks_for_it() -> None:
    meeting = Meeting([], "here")
    assert meeting.missed()
    for _ in range(2):  # rank 0's store, and the next one
        with socket.create_server(("", meeting.port)):
            meeting.look()
    assert not meeting.missed()


def test_the_port_is_kept_by_the_program_that_dearrun_becomes() -> None:
    """A process that inherits files stands for it; here nobody keeps the port."""
    meeting = Meeting([], "here")
    meeting.outlast()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as program:
        assert meeting._kept is not None
        meeting._kept.close()
        with contextlib.closing(socket.socket()) as other, pytest.raises(OSError, match="in use"):
            other.bind(("", meeting.port))
        program.communicate()


def test_a_port_that_others_have_just_left_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux may give it: the side that hung up first is remembered for a minute, and its peer's port is free."""
    with socket.create_server(("", 0)) as server:
        left = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", left)):
            other = server.accept()[0]
        other.close()
    given, bound = iter([left]), meetings._bound
    monkeypatch.setattr(meetings, "_bound", lambda port: bound(port or next(given, 0)))
    meeting = Meeting([], "here")
    assert meeting.port != left
    assert meeting.missed()


def test_a_group_that_lasted_no_longer_than_a_look_has_met() -> None:
    meeting = Meeting([], "here")
    with socket.create_server(("", meeting.port)) as server, socket.create_connection(("127.0.0.1", meeting.port)):
        server.accept()[0].close()
    assert not meeting.missed()


@pytest.mark.parametrize(
    ("hosts", "address", "kept"),
    [
        ([], "", True),
        ([Host("localhost", 2)], "localhost", True),
        ([Host("here"), Host("127.0.0.2")], "127.0.0.1", True),
        ([Host("127.0.0.2"), Host("192.0.2.7")], "127.0.0.2", True),  # an address of this host, not its name
        ([Host("192.0.2.7"), Host("here")], "192.0.2.7", False),
    ],
)
def test_ranks_meet_on_the_first_host(hosts: list[Host], address: str, kept: bool) -> None:
    meeting = Meeting(hosts, "here")
    assert meeting.address == address
    with contextlib.closing(socket.socket()) as other:
        taken = False
        try:
            other.bind(("", meeting.port))
        except OSError:
            taken = True
        assert taken is kept


def test_a_host_is_known_by_an_address_that_the_others_reach() -> None:
    assert own_toward(["127.0.0.1"]) == ["127.0.0.1", socket.gethostname()]


@pytest.mark.needs_root
def test_two_hosts_meet_on_rank_0s_which_may_be_another(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "found = torch.ones(1)\n"
        "dist.all_reduce(found)\n"
        "assert found == 2\n"
        "dist.destroy_process_group()\n"
        "print('the end', flush=True)\n"
    )
    with Cluster(2) as cluster:
        agents = dict.fromkeys(("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"), cluster.agent)
        told = environ(**agents, GLOO_SOCKET_IFNAME="eth0")
        hosts = ",".join(f"{cluster.address(host)}:1" for host in (1, 0))
        start = [sys.executable, "-m", "dearrun", "-np", "2", "-H", hosts, "-x", "GLOO_SOCKET_IFNAME"]
        command = cluster.enter(0, [*start, sys.executable, str(script)])
        result = subprocess.run(command, capture_output=True, text=True, timeout=90, env=told, check=False)
    assert (result.returncode, result.stdout.count("the end")) == (0, 2), result.stderr
    assert not re.search("trained alone", result.stderr)
