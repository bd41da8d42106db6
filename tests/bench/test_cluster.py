"""The emulated cluster: made, shaped, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from bench.emulation.cluster import Cluster, ClusterError, _namespaces
from bench.emulation.goodput import TOTAL_BYTES, goodput, rate, wanted


@pytest.mark.needs_root
def test_links_are_shaped_and_hosts_disappear() -> None:
    with Cluster(2, "100mbit") as cluster:
        mine = [name for name in _namespaces() if name.startswith(cluster._prefix)]
        assert len(mine) == 3
        rate = goodput(cluster) * 8 / 1e6
        with pytest.raises(ClusterError, match="exited with 3"):
            cluster.run_torch(["-c", "import sys; sys.exit(3)"], timeout=30)
        begun = time.monotonic()  # host 0 is waited for first, and does not end by itself
        dies = "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
        with pytest.raises(ClusterError, match="a job on the cluster on host 1 was ended by SIGKILL"):
            cluster.run_torch(["-c", dies], timeout=30)
        assert time.monotonic() - begun < 20
    assert 70 < rate < 105
    assert not set(mine) & set(_namespaces())


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
        assert 4.0 < goodput(cluster) * 8 / 1e6 < 5.2


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
