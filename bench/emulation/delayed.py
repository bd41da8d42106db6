"""Emulates links with a delay where the kernel has no netem: a process carries packets between tun devices.

    host a ─▶ eth0 (tun) ─▶ a's rate ─▶ b's rate ─▶ the delay ─▶ eth0 (tun) ─▶ host b

``python -m bench.emulation.delayed BITS_PER_SECOND SECONDS NAMESPACE…`` makes a device ``eth0`` in each namespace, says
"ready", and carries packets until it is ended. The last byte of an address is the place of its namespace, from 1 on.
Packets are as large as tun allows, so that a process in Python keeps up with some Gbit/s.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count

__all__ = ["MTU", "Links", "main"]

MTU = 65000
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_NEW_NETWORK = 0x40000000
_QUEUE = 0.1  # seconds of packets that wait for a sender's link, as the shaped links keep; more are lost


class Links:
    """Computes when packets arrive, from the times until which each host's link is busy. Pure. Pure."""

    def __init__(self, hosts: int, rate: float, delay: float) -> None:
        self._second = 8 / rate  # of a byte
        self._delay = delay
        self._sends, self._receives = [0.0] * hosts, [0.0] * hosts

    def arrival(self, now: float, source: int, target: int, nbytes: int) -> float | None:
        """The arrival of a packet that `source` sends `now`; None where too many wait."""
        if self._sends[source] - now > _QUEUE:
            return None
        took = nbytes * self._second
        sent = self._sends[source] = max(now, self._sends[source]) + took
        received = self._receives[target] = max(sent, self._receives[target] + took)
        return received + self._delay


def _device(namespace: str) -> int:
    """The other end of a new device ``eth0`` in the namespace, where this process is from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(inside, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(inside)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH14x", b"eth0", _TUN_WITHOUT_HEADER))
    return end


def _packets(end: int) -> Iterator[bytes]:
    """Those that are there now."""
    with contextlib.suppress(BlockingIOError):
        while True:
            yield os.read(end, MTU + 100)


def _carry(ends: Sequence[int], path: Links) -> None:
    """For ever."""
    places = {end: place for place, end in enumerate(ends)}
    on_the_way: list[tuple[float, int, int, bytes]] = []
    numbers = count()
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    while True:
        wait = None if not on_the_way else max(0.0, 1e3 * (on_the_way[0][0] - time.perf_counter()))
        for end, _ in poll.poll(wait):
            for packet in _packets(end):
                target = packet[19] - 1
                if packet[0] >> 4 != 4 or not 0 <= target < len(ends):
                    continue
                arrival = path.arrival(time.perf_counter(), places[end], target, len(packet))
                if arrival is not None:
                    heapq.heappush(on_the_way, (arrival, next(numbers), target, packet))
        while on_the_way and on_the_way[0][0] <= time.perf_counter():
            _, _, target, packet = heapq.heappop(on_the_way)
            with contextlib.suppress(BlockingIOError):  # the host takes no more: lost, as in a full queue
                os.write(ends[target], packet)


def main(argv: Sequence[str]) -> None:
    rate, delay, *namespaces = argv
    with contextlib.suppress(OSError):
        os.nice(-10)
    ends = [_device(name) for name in namespaces]
    print("ready", flush=True)
    _carry(ends, Links(len(ends), float(rate), float(delay)))


if __name__ == "__main__":
    main(sys.argv[1:])
