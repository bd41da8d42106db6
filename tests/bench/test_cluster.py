"""The emulated cluster: made, shaped, and gone afterwards."""

from __future__ import annotations

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
    assert 70 < rate < 105
    assert not set(mine) & set(_namespaces())


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 host, not 0"):
        Cluster(0)
