"""What plain TCP gets through one link of the emulated cluster: the yardstick for wire time."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from bench.emulation.cluster import Cluster, ClusterError
from bench.program import ROOT

PORT = 29401
TOTAL_BYTES, _NO_LIMIT = 64 * 2**20, 2**62
_ENOUGH_SECONDS, _ENOUGH_BYTES = 5, 2 * 2**20  # both are sent, where that takes less than _MOST_SECONDS
_MOST_SECONDS, _PATIENCE_SECONDS = 20, 30  # of the sender, and of the receiver for what is still on its way
_BURST = 2**18  # what the buckets of both ends of a link let through at once
_BLOCK = bytes(1 << 16)


def goodput(cluster: Cluster, connections: int = 1) -> float:
    """Bytes per second of payload from host 0 to host 1, over 64 MB or five seconds, the first eighth not counted.

    With a delay, TCP takes some round trips to become fast: five seconds, of whose bytes the second half counts. Several
    connections are summed, from senders that are a process each.

    Raises ``ClusterError`` where too little arrives to tell.
    """
    program = [sys.executable, "-m", "bench.emulation.goodput"]
    receiver = cluster.enter(1, [*program, "receive", str(connections)])
    total = _NO_LIMIT if cluster.delay else TOTAL_BYTES // connections
    sender = cluster.enter(0, [*program, "send", cluster.address(1), str(total)])
    with subprocess.Popen(receiver, cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        senders = [subprocess.Popen(sender, cwd=ROOT, text=True) for _ in range(connections)]
        try:
            failed = [code for each in senders if (code := each.wait(timeout=60))]
            text, _ = job.communicate(timeout=60) if not failed else ("", None)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"measuring goodput at {cluster.rate} did not end within 60 s") from None
        finally:
            for each in (*senders, job):
                each.kill()
                each.wait()
    if failed:
        raise ClusterError(f"measuring goodput at {cluster.rate}: a sender exited with {failed[0]}")
    if job.returncode:
        raise ClusterError(f"measuring goodput at {cluster.rate}: the receiver exited with {job.returncode}")
    return rate(json.loads(text), 2 if cluster.delay else 8)


def rate(arrivals: Sequence[tuple[float, int]], parts: int = 8) -> float:
    """Bytes per second, from pairs of a time and the bytes that had arrived by then (pure).

    The first one of so many parts is left out, and at least what a link lets through at once, before it is as slow as it
    should be. Raises ``ClusterError`` unless as much again is left to count.
    """
    total = arrivals[-1][1] if arrivals else 0
    begun, skipped = next(((at, seen) for at, seen in arrivals if seen >= max(total // parts, _BURST)), (0.0, total))
    if total - skipped < _BURST:
        raise ClusterError(
            f"the link is too slow to measure its goodput: {total / 2**10:.0f} KB arrived, "
            f"{2 * _BURST / 2**10:.0f} KB are needed"
        )
    return (total - skipped) / (arrivals[-1][0] - begun)


def receive(connections: int) -> None:
    with socket.create_server(("", PORT)) as server, selectors.DefaultSelector() as selector:
        server.settimeout(30)
        for _ in range(connections):
            selector.register(server.accept()[0], selectors.EVENT_READ)
        arrivals, seen = [], 0
        deadline = time.perf_counter() + _PATIENCE_SECONDS
        while selector.get_map() and time.perf_counter() < deadline:
            for key, _ in selector.select(timeout=1):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                data = connection.recv(1 << 18)
                seen += len(data)
                if data:
                    arrivals.append((time.perf_counter(), seen))
                else:
                    selector.unregister(connection)
                    connection.close()
    print(json.dumps(arrivals))


def send(address: str, total: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((address, PORT), timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with connection:
        connection.settimeout(2 * _PATIENCE_SECONDS)
        begun, sent = time.monotonic(), 0
        with contextlib.suppress(ConnectionError):  # the receiver has waited long enough
            while sent < total and wanted(time.monotonic() - begun, sent):
                connection.sendall(_BLOCK)
                sent += len(_BLOCK)


def wanted(seconds: float, sent: int) -> bool:
    """Whether a sender continues that has sent so many bytes in so many seconds."""
    return seconds < _ENOUGH_SECONDS or (sent < _ENOUGH_BYTES and seconds < _MOST_SECONDS)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(sys.argv[2], int(sys.argv[3]))
