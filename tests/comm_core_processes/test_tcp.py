"""Ranks over plain TCP, without MPI: how they meet, what a stranger can do, and what is told of a rank that is lost."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.emulation.cluster import Cluster
from comm_core.tcp_connect import common_family

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import comm_core

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
rounds = iter(range(100))

def exchange(mine):
    number = next(rounds)
    part = folder / f"{number}-{rank}.part"
    part.write_bytes(mine)
    part.rename(folder / f"{number}-{rank}")
    paths = [folder / f"{number}-{peer}" for peer in range(size)]
    while not all(path.exists() for path in paths):
        time.sleep(0.005)
    return [path.read_bytes() for path in paths]

def connect(**options):
    return comm_core.tcp(rank, size, exchange, **options)

def say(*words):
    print(*words, flush=True)
"""


Start = Callable[..., "Job"]


def _on(hosts: Cluster | None, rank: int, command: list[str]) -> list[str]:
    return command if hosts is None else hosts.enter(rank, command)


class Job:
    """Processes that run a text, each as a rank."""

    def __init__(self, text: str, size: int, folder: Path, hosts: Cluster | None = None) -> None:
        self.folder = folder
        script = folder / "script.py"
        script.write_text(PRELUDE + text)
        command = [sys.executable, str(script)]
        self.processes = [
            subprocess.Popen(
                _on(hosts, rank, [*command, str(rank), str(size), str(folder)]),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]

    def line(self, rank: int) -> str:
        """What that rank says next."""
        stream = self.processes[rank].stdout
        assert stream is not None
        return stream.readline().strip()

    def outputs(self, seconds: float = 60.0) -> list[str]:
        """What each has said until its end."""
        return [process.communicate(timeout=seconds)[0] for process in self.processes]

    def codes(self) -> list[int]:
        return [process.wait(30) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(text: str, size: int = 2, hosts: Cluster | None = None) -> Job:
        jobs.append(Job(text, size, Path(tempfile.mkdtemp(dir=tmp_path)), hosts))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


WORK = """
def work(comm):
    data = np.ones(300_000)
    comm.all_reduce(data, data)
    assert data[0] == data[-1] == size
    part = comm.split(0, key=-rank)
    part.broadcast(data, 0)
    comm.post((rank + 1) % size, b"bye")
"""

ENDINGS = {
    "nothing is called": "work(connect())",
    "finalize": "work(connect())\ncomm_core.finalize()\ncomm_core.finalize()",
    "close and finalize": "c = connect()\nwork(c)\nc.close()\ncomm_core.finalize()\nc.close()",
    "works are dropped": "c = connect()\nfor _ in range(20):\n    c.all_reduce_async(np.ones(200_000), np.ones(200_000))",
    "another after the first": "c = connect()\nwork(c)\nc.close()\nwork(connect())",
    "one rank ends late": "c = connect()\nwork(c)\nif rank == 0: time.sleep(0.5)",
    "over IPv6": "work(connect(hosts=['::1']))",
    "over several connections": "work(connect(sockets=3, apart=True))",
    "over two interfaces": "work(connect(hosts=['127.0.0.1', '127.0.0.2'], apart=True))",
    "over what all have": "work(connect(hosts=['127.0.0.1', '::1'] if rank else ['::1']))",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_every_way_to_end_is_clean_and_quick(how: str, start: Start) -> None:
    job = start(f"{WORK}\n{ENDINGS[how]}\nsay('reached the end')\n", 3)
    for output in job.outputs():
        assert output == "reached the end\n"
    assert job.codes() == [0, 0, 0]


def test_a_process_that_ends_waits_for_nobody_who_goes_on(start: Start) -> None:
    job = start(
        "c = connect()\nc.barrier()\nc.close()\nif rank: time.sleep(60)\n"
        "begun = time.monotonic()\ncomm_core.finalize()\nsay(time.monotonic() - begun)\n"
    )
    assert float(job.line(0)) < 30


LOST = """
c = connect()
c.barrier()
say("ready")
sys.stdin.readline()
try:
    if waits:
        c.all_reduce(np.ones(10), np.ones(10), label="last")
    else:
        time.sleep(0.7)
        c.barrier()
except comm_core.TransportError as error:
    say(f"{time.time()} {error}")
    time.sleep(1)  # whose connections end with it must not be taken for the rank that was lost
    os._exit(0)
"""


@pytest.mark.parametrize("options", ["", "sockets=4, apart=True"], ids=["", "several connections"])
@pytest.mark.parametrize("waits", [True, False], ids=["in an operation", "before the next"])
def test_a_rank_that_is_killed_is_named_at_once(waits: bool, options: str, start: Start) -> None:
    text = LOST.replace("connect()", f"connect({options})").replace("waits", str(waits))
    text = text.replace("sys.stdin.readline()", "time.sleep(60 if rank == 1 else 0)")
    job = start(text, 3)
    assert [job.line(rank) for rank in range(3)] == ["ready"] * 3
    time.sleep(0.3)
    job.processes[1].kill()
    killed = time.time()
    for rank in (0, 2):
        when, _, said = job.line(rank).partition(" ")
        assert re.search(
            r"rank [02] of 3 lost the connection to rank 1: ", said
        )  # its own, or what another has told it
        assert float(when) - killed < 10.0  # and not when a stall is noticed


@pytest.mark.needs_root
@pytest.mark.parametrize("waits", [True, False], ids=["in an operation", "before the next"])
def test_a_host_that_is_cut_off_is_named(waits: bool, start: Start) -> None:
    """Its packets are dropped, and nobody is told: silence is all that there is."""
    with Cluster(2) as hosts:
        addresses = [hosts.address(host) for host in range(2)]
        text = LOST.replace("connect()", f"connect(hosts=[{addresses}[rank]], sockets=2, silence=3.0)")
        text = text.replace("time.sleep(0.7)", "time.sleep(4)").replace("waits", str(waits))
        text = text.replace("sys.stdin.readline()", "time.sleep(1.5 if rank == 0 else 60)")
        job = start(text, 2, hosts)
        assert [job.line(rank) for rank in range(2)] == ["ready"] * 2
        subprocess.run(hosts.enter(1, ["ip", "route", "add", "blackhole", f"{addresses[0]}/32"]), check=True)
        cut_off = time.time()
        when, _, said = job.line(0).partition(" ")
        assert "rank 0 of 2 lost the connection to rank 1: " in said
        assert float(when) - cut_off < 3.0 + 10.0


ROOT = Path(__file__).parents[2]
RANDOM = """
import threading
from tests.comm_core.random_groups import play
c = connect(OPTIONS)
c.barrier()
say("ready")
if rank == VICTIM:
    threading.Timer(SECONDS, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
try:
    for seed in range(FIRST, FIRST + 20):
        play(c, seed)
    c.close()
    say("done")
except comm_core.TransportError as error:
    say(f"lost: {error}")
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("options", ["", "apart=True", "sockets=3, apart=True"], ids=["copies", "socket", "sockets"])
def test_random_sequences_are_exact_or_end_with_a_lost_rank(options: str, size: int, start: Start) -> None:
    """2,000 over all sizes and ways; in every other job a rank is killed somewhere among them."""
    chance = random.Random(f"{options} {size}")
    for job_number in range(12):
        victim = chance.randrange(size) if job_number % 2 else -1
        values = {"OPTIONS": options, "VICTIM": victim, "SECONDS": chance.random() * 2, "FIRST": 20 * job_number}
        text = f"sys.path.insert(0, {str(ROOT)!r})\n{RANDOM}"
        for name, value in values.items():
            text = text.replace(name, str(value))
        job = start(text, size)
        try:
            outputs = job.outputs(120)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end: {values}")
        for rank, output in enumerate(outputs):
            if rank == victim and output == "ready\n":
                continue
            whole = output == "ready\ndone\n"
            assert whole or (victim >= 0 and output.startswith("ready\nlost: ")), (values, rank, output)


def test_a_child_of_a_fork_does_not_hide_the_end_of_its_parent(start: Start) -> None:
    text = LOST.replace("sys.stdin.readline()", "(os.fork() or time.sleep(30) or os._exit(0)) if rank == 1 else 0")
    text = text.replace("if waits:", "if rank == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n    elif True:")
    job = start(text)
    assert job.line(0) == "ready"
    begun = time.monotonic()
    assert "rank 0 of 2 lost the connection to rank 1: " in job.line(0)
    assert time.monotonic() - begun < 20.0


def test_who_waits_for_a_rank_that_has_closed_is_told(start: Start) -> None:
    text = """
c = connect()
part = c.split(0)
part.barrier()
if rank == 1:
    part.close()
else:
    try:
        part.all_reduce(np.ones(10), np.ones(10), label="alone")
    except comm_core.TransportError as error:
        say(error)
c.barrier()
"""
    outputs = start(text).outputs()
    assert "'alone'" in outputs[0]
    assert "rank 1 has closed the communicator" in outputs[0]
    assert outputs[1] == ""


def test_who_waits_for_a_rank_that_has_given_up_and_ends_is_told(start: Start) -> None:
    text = """
c = connect()
c.barrier()
if rank == 1:
    c.abandon()
    c.close()
    comm_core.finalize()
    os._exit(0)
try:
    c.all_reduce(np.ones(10), np.ones(10), label="alone")
except comm_core.TransportError as error:
    say(error)
    os._exit(0)
"""
    outputs = start(text).outputs(30)
    assert "rank 0 of 2 lost the connection to rank 1: " in outputs[0]


def test_a_rank_that_is_lost_before_a_group_is_made_is_lost_to_that_too(start: Start) -> None:
    """Another one has made the group and sent a message, so that it is known of; rank 2 is late, and rank 1 gone then."""
    text = """
c = connect()
c.barrier()
if rank == 2:
    time.sleep(1.5)
part = c.split(0)
if rank == 1:
    part.send_async(np.ones(5), 0, tag=0)
    c.close()
    time.sleep(0.2)
    os._exit(0)
if rank == 2:
    time.sleep(1.0)
try:
    part.recv(np.ones(5), 1, tag=3)
except comm_core.TransportError as error:
    say(error)
    os._exit(0)
"""
    outputs = start(text, 3).outputs(60)
    assert "lost the connection to rank 1" in outputs[0]
    assert "lost the connection to rank 1" in outputs[2]


def test_a_stranger_ends_its_own_connection_and_nothing_else(start: Start) -> None:
    """It finds the port while ranks meet: rank 1 comes to connect only after it."""
    text = """
real = exchange
def exchange(mine, calls=iter(range(9))):
    said = real(mine)
    while rank == 1 and next(calls) == 0 and not (folder / "go").exists():
        time.sleep(0.01)
        calls = iter(range(9))
    return said
c = connect()
c.barrier()
say("reached the end")
"""
    job = start(text)
    port = _port_of(job.folder / "0-0")
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 500)
    strangers[1].sendall(b"comm_tc2" + bytes(500))  # a rank's first words, but for the secret
    strangers[2].sendall(b"comm")  # and then nothing
    assert all(_is_closed(stranger) for stranger in strangers[:2])
    (job.folder / "go").touch()
    assert job.outputs() == ["reached the end\n"] * 2
    for stranger in strangers:
        stranger.close()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:  # what it has sent was not read to the end
        return True


def _port_of(path: Path) -> int:
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    return int(json.loads(path.read_text())["places"]["4"][0][1])


MEETINGS = {
    "a host that is none": (
        "hosts=['10.77.255.254'] if rank == 1 else ['127.0.0.1']",
        r"rank 1: listening on 10.77.255.254",
    ),
    "no address": ("hosts=['nowhere'] if rank == 1 else ['127.0.0.1']", "rank 1: 'nowhere' does not appear to be"),
    "no family in common": (
        "hosts=['127.0.0.1'] if rank else ['::1']",
        "no family of addresses in common: ::1; 127.0.0.1",
    ),
}


@pytest.mark.parametrize("how", MEETINGS)
def test_ranks_that_cannot_meet_say_why_on_each(how: str, start: Start) -> None:
    options, message = MEETINGS[how]
    text = f"try:\n    connect({options})\nexcept comm_core.TransportError as error:\n    say(error)\n"
    for output in start(text).outputs():
        assert message in output
        assert output.count("\n") == 1


def test_a_rank_that_never_connects_is_named(start: Start) -> None:
    text = """
import comm_core.tcp_connect
if rank == 1:
    class Absent:
        Listener = comm_core.tcp_connect._backend().Listener
        def connect(self, *rest):
            raise comm_core.Error("had no time")
    comm_core.tcp_connect._backend = Absent
try:
    connect(timeout=1.0)
except comm_core.TransportError as error:
    say(error)
"""
    for output in start(text).outputs():
        assert "rank 0: rank 0 waited 1" in output
        assert "is not connected with rank 1 at 127.0.0.1 port" in output


def test_connections_take_turns_among_addresses(start: Start) -> None:
    text = """
import socket
c = connect(hosts=["127.0.0.1", f"127.0.0.{rank + 2}"], sockets=4 - rank, apart=True)
reached = []
for fd in os.listdir("/proc/self/fd"):
    try:
        with socket.socket(fileno=os.dup(int(fd))) as found:
            reached.append(found.getpeername()[0])
    except OSError:
        pass
c.barrier()
say(sorted(reached))
"""
    other = "127.0.0.3", "127.0.0.2"
    for output, peer in zip(start(text).outputs(), other, strict=True):
        assert ast.literal_eval(output) == ["127.0.0.1", "127.0.0.1", peer]  # as many as rank 1 wants


def test_addresses_that_not_all_ranks_have_are_left_out(start: Start) -> None:
    """One of another network may lead to nobody."""
    text = """
c = connect(hosts=["127.0.0.1", "127.0.0.2"][:2 - rank], sockets=3, apart=True)
import socket
reached = []
for fd in os.listdir("/proc/self/fd"):
    try:
        with socket.socket(fileno=os.dup(int(fd))) as found:
            reached.append((found.getsockname()[0], found.getpeername()[0]))
    except OSError:
        pass
c.barrier()
say(reached)
"""
    for output in start(text).outputs():
        assert ast.literal_eval(output) == [("127.0.0.1", "127.0.0.1")] * 3


def test_there_is_at_least_one_connection_for_each_address(start: Start) -> None:
    text = """
c = connect(hosts=["127.0.0.1", "127.0.0.2"], apart=True)
kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
c.barrier()
say(sum(kind.startswith("socket:") for kind in kinds))
"""
    assert start(text).outputs() == ["2\n"] * 2


def test_the_first_family_that_all_have_is_taken() -> None:
    assert common_family([["4", "6"], ["6", "4"]]) == "4"
    assert common_family([["4", "6"], ["6"]]) == "6"
    assert common_family([["4"], ["6"]]) is None


def test_nothing_is_done_while_nothing_arrives(start: Start) -> None:
    """Neither this process nor its engine runs while ranks wait for each other."""
    text = """
c = connect()
c.barrier()
before = time.process_time()
work = c.barrier_async() if rank == 0 else None
time.sleep(1.0)
used = time.process_time() - before
c.barrier_async().wait() if rank else work.wait()
say(used)
"""
    for output in start(text).outputs():
        assert float(output) < 0.02


def test_a_rank_that_is_stopped_and_goes_on_is_waited_for(start: Start) -> None:
    text = "c = connect()\nc.barrier()\nsay('ready')\nd = np.ones(1_000_000)\nc.all_reduce(d, d)\nsay(d[-1])\n"
    job = start(text)
    assert job.line(1) == "ready"
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(job.processes[1].pid, signal.SIGCONT)
    assert [output.split()[-1] for output in job.outputs()] == ["2.0", "2.0"]
