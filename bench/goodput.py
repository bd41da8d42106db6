"""What plain TCP gets through one link of the emulated cluster: the yardstick for wire time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

from bench.cluster import ROOT, Cluster, ClusterError

PORT = 29401
TOTAL_BYTES = 64 * 2**20
_BLOCK = bytes(1 << 16)


def goodput(cluster: Cluster) -> float:
    """Bytes per second of payload from host 0 to host 1, over 64 MB or five seconds, the first 8 MB not counted."""
    receiver = cluster.enter(1, [sys.executable, "-m", "bench.goodput", "receive"])
    sender = cluster.enter(0, [sys.executable, "-m", "bench.goodput", "send", cluster.address(1)])
    with subprocess.Popen(receiver, cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        subprocess.run(sender, cwd=ROOT, check=True, timeout=60)
        text, _ = job.communicate(timeout=60)
    if job.returncode:
        raise ClusterError("the goodput measurement failed")
    return float(json.loads(text)["bytes_per_second"])


def receive() -> None:
    with socket.create_server(("", PORT)) as server:
        server.settimeout(30)
        connection, _ = server.accept()
        with connection:
            seen, started, counted_from = 0, 0.0, 8 * 2**20
            while data := connection.recv(1 << 18):
                seen += len(data)
                if not started and seen >= counted_from:
                    started, counted_from = time.perf_counter(), seen
            seconds = time.perf_counter() - started
    print(json.dumps({"bytes_per_second": (seen - counted_from) / seconds}))


def send(address: str) -> None:
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
        stop, sent = time.monotonic() + 5, 0
        while sent < TOTAL_BYTES and time.monotonic() < stop:
            connection.sendall(_BLOCK)
            sent += len(_BLOCK)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2])
