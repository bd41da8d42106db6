"""The emulated cluster: made, shaped, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.emulation.cluster import Cluster, ClusterError, _namespaces, parse_rate
from bench.emulation.delayed import Links
from bench.emulation.goodput import TOTAL_BYTES, goodput, rate, wanted


def _check_goodput(cluster: Cluster, least: float, most: float, connections: int = 1) -> None:
    """In Mbit/s. The best of three counts: what else runs on this machine makes it lower."""
    found: list[float] = []
    while len(found) < 3 and max(found, default=0.0) <= least:
        found.append(goodput(cluster, connections) * 8 / 1e6)
    assert least < max(found) < most, found


@pytest.mark.needs_root
def test_links_are_shaped_and_hosts_disappear() -> None:
    with Cluster(2, "100mbit") as cluster:
        mine = [name for name in _namespaces() if name.startswith(cluster._prefix)]
        assert len(mine) == 3
        _check_goodput(cluster, 70, 105)
        with pytest.raises(ClusterError, match="exited with 3"):
            cluster.run_torch(["-c", "import sys; sys.exit(3)"], timeout=30)
        begun = time.monotonic()  # host 0 is waited for first, and does not end by itself
        dies = "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
        with pytest.raises(ClusterError, match="a job on the cluster on host 1 was ended by SIGKILL"):
            cluster.run_torch(["-c", dies], timeout=30)
        assert time.monotonic() - begun < 20
        assert all(Path("/etc/netns", name).exists() for name in mine if not name.endswith("sw"))
    assert not set(mine) & set(_namespaces())
    assert not any(Path("/etc/netns", name).exists() for name in mine)


@pytest.mark.needs_root
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_ranks_of_a_host_have_its_name_and_consecutive_numbers(launcher: str, tmp_path: Path) -> None:
    rank = "'RANK'" if launcher == "torchrun" else "'OMPI_COMM_WORLD_RANK'"
    local = "'LOCAL_RANK'" if launcher == "torchrun" else "'OMPI_COMM_WORLD_LOCAL_RANK'"
    tells = (
        "import os, pathlib, socket, sys\n"
        "name = socket.gethostname()\n"
        "other = name[:-1] + {'1': '2', '2': '1'}[name[-1]]\n"
        "found = [socket.gethostbyname(each)[-1] for each in (name, other)]\n"
        f"text = name[-1] + os.environ[{local}] + ' ' + ''.join(found)\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ[{rank}]).write_text(text)\n"
        f"sys.exit(3 if os.environ[{rank}] == os.environ.get('FAILS') else 0)"
    )
    with Cluster(2, "100mbit", ranks=2) as cluster:
        start = cluster.run_mpi if launcher == "mpi" else cluster.run_torch
        start(["-c", tells], timeout=60)
        assert [(tmp_path / str(each)).read_text() for each in range(4)] == ["10 12", "11 12", "20 21", "21 21"]
        if launcher == "torchrun":
            with pytest.raises(ClusterError, match="on host 1 exited with 3"):
                start(["-c", tells], env={"FAILS": "2"}, timeout=60)


@pytest.mark.needs_root
def test_hosts_of_a_process_that_was_killed_are_removed_by_the_next_cluster() -> None:
    killed = subprocess.Popen(["true"])
    killed.wait()
    left, kept = f"dearemu{killed.pid}x1", f"dearemu{os.getpid()}x9"
    for name in (left, kept):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with Cluster(1):
            assert left not in _namespaces()
            assert kept in _namespaces()
    finally:
        subprocess.run(["ip", "netns", "delete", kept], check=False)


@pytest.mark.full
@pytest.mark.needs_root
def test_goodput_of_a_slow_link() -> None:
    with Cluster(2, "5mbit") as cluster:
        _check_goodput(cluster, 4.0, 5.2)


@pytest.mark.needs_root
def test_goodput_of_several_connections_is_that_of_the_link() -> None:
    with Cluster(2, "200mbit") as cluster:
        _check_goodput(cluster, 150, 205, connections=3)


def arrivals(bytes_per_second: float, seconds: float, burst: int = 2**18) -> list[tuple[float, int]]:
    """What arrives over a link every 10 ms: at once what its buckets let through, then as much as it carries."""
    return [(n / 100, burst + int(bytes_per_second * n / 100)) for n in range(1, int(100 * seconds) + 1)]


@pytest.mark.parametrize("mbit", [1, 2, 5, 13, 20, 100, 1000])
def test_goodput_is_counted_once_the_link_is_as_slow_as_it_should_be(mbit: int) -> None:
    seconds = min(20.0 if mbit < 3 else 5.0, TOTAL_BYTES / (mbit * 125e3))
    assert rate(arrivals(mbit * 125e3, seconds)) == pytest.approx(mbit * 125e3, rel=0.02)


@pytest.mark.parametrize("some", [[], [(1.0, 10**5)], arrivals(10_000, 20)])
def test_too_little_to_tell_the_goodput_is_an_error(some: list[tuple[float, int]]) -> None:
    with pytest.raises(ClusterError, match=r"too slow to measure its goodput: .* KB arrived, 512 KB are needed"):
        rate(some)


def test_a_sender_takes_longer_on_slow_links_only() -> None:
    assert wanted(4.9, 2**26 - 1)
    assert not wanted(5.0, 2**21)
    assert wanted(5.1, 2**20)
    assert not wanted(20.0, 2**20)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 host, not 0"):
        Cluster(0)
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        Cluster(2, ranks=0)


def test_rates_and_delays_are_read() -> None:
    assert parse_rate("1gbit") == (1e9, 0.0)
    assert parse_rate("2.5mbit+20ms") == (2.5e6, pytest.approx(0.02))
    for text in ("1gbps", "1gbit+20", "local", "1gbit + 20ms"):
        with pytest.raises(ValueError, match="like 1gbit, 100mbit, or 100mbit"):
            parse_rate(text)


def test_packets_follow_one_another_and_arrive_later() -> None:
    links = Links(3, rate=8e6, delay=0.5)  # a byte takes a microsecond
    assert links.arrival(1.0, 0, 1, 1000) == pytest.approx(1.501)
    assert links.arrival(1.0, 0, 2, 1000) == pytest.approx(1.502)  # the sender's link sends one after the other
    assert links.arrival(1.0, 1, 0, 1000) == pytest.approx(1.501)  # the other direction is another one's
    assert links.arrival(1.0, 1, 2, 1000) == pytest.approx(
        1.503
    )  # the receiver's link is free when the first is through
    assert links.arrival(2.0, 0, 1, 200_000) == pytest.approx(2.7)
    assert links.arrival(2.0, 0, 1, 1000) is None  # more than a tenth of a second waits
    assert links.arrival(2.15, 0, 1, 1000) == pytest.approx(2.701)


@pytest.mark.needs_root
def test_a_link_with_a_delay() -> None:
    with Cluster(2, "50mbit+30ms") as cluster:
        answer = (
            "import socket; s = socket.create_server(('', 5000)); c, _ = s.accept()\n"
            "for _ in range(10): c.sendall(c.recv(1))"
        )
        ask = (
            "import socket, time\n"
            "for _ in range(100):\n"
            "    try: c = socket.create_connection(('10.77.0.2', 5000), 5); break\n"
            "    except OSError: time.sleep(0.05)\n"
            "took = []\n"
            "for _ in range(10):\n"
            "    begun = time.perf_counter(); c.sendall(b'x'); c.recv(1); took.append(time.perf_counter() - begun)\n"
            "print(min(took))"
        )
        with subprocess.Popen(cluster.enter(1, [sys.executable, "-c", answer])) as other:
            told = subprocess.run(
                cluster.enter(0, [sys.executable, "-c", ask]), capture_output=True, text=True, timeout=30
            )
            other.wait(30)
        assert 0.06 <= float(told.stdout) < 0.2
        _check_goodput(cluster, 35, 55)
        with pytest.raises(ValueError, match="but no delay: not from 50mbit"):
            cluster.set_rate("1gbit")
