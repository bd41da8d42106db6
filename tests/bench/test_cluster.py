"""The emulated cluster: made, shaped, and gone afterwards."""

from __future__ import annotations

import time

import pytest

from bench.cluster import Cluster, ClusterError, _namespaces
from bench.goodput import goodput


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


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 host, not 0"):
        Cluster(0)
