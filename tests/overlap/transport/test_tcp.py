"""What a job asks of its connections."""

from __future__ import annotations

from overlap.transport.tcp import TcpOptions


def test_a_job_of_many_ranks_has_fewer_connections_for_each_pair() -> None:
    assert TcpOptions().arguments(2, 5.0) == {"silence": None, "sockets": 4, "timeout": 5.0}
    assert [TcpOptions().arguments(size, 5.0)["sockets"] for size in (128, 129, 256, 257, 2000)] == [4, 3, 2, 1, 1]
    assert TcpOptions(silence=9.0, sockets=8).arguments(2000, 5.0) == {"silence": 9.0, "sockets": 8, "timeout": 5.0}
