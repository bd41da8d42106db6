"""Hosts and their slots, from ``-H host1:2,host2:2`` or a hostfile (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dearrun.errors import LaunchError

__all__ = [
    "Host",
    "is_here",
    "others",
    "parse_hostfile",
    "parse_hosts",
    "require_addresses",
    "require_room",
    "require_shell",
    "require_slots",
]

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]*[A-Za-z0-9_])?"
_HOST = re.compile(rf"({_NAME})(?::(\d+))?")
_LINE = re.compile(rf"({_NAME})(?::(\d+)|\s+slots\s*=\s*(\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and how many workers it takes."""

    name: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def _host(name: str, slots: str | None, where: str) -> Host:
    if slots is not None and int(slots) < 1:
        raise LaunchError(f"{where}: {name} should have at least 1 slot and has {slots}")
    return Host(name, int(slots or 1))


def _unique(hosts: list[Host], where: str) -> list[Host]:
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise LaunchError(f"{where}: {host.name} is named twice; give it once, with all of its slots")
        seen.add(host.name)
    if not hosts:
        raise LaunchError(f"{where}: names no host; write one in each line, 'host slots=2'")
    return hosts


def parse_hosts(text: str) -> list[Host]:
    """``host1:2,host2:2``; a host without a number has one slot. Raises :class:`LaunchError`."""
    hosts = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        if match is None:
            raise LaunchError(f"-H {text}: {part.strip()!r} is no host; write host1:2,host2:2, a number of slots each")
        hosts.append(_host(match[1], match[2], f"-H {text}"))
    return _unique(hosts, f"-H {text}")


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Lines ``host slots=2``, ``host:2`` or ``host``; ``#`` begins a comment. Raises :class:`LaunchError`."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise LaunchError(f"{path}, line {number}: {content!r} is no host; write 'host slots=2' or 'host:2'")
        hosts.append(_host(match[1], match[2] or match[3], f"{path}, line {number}"))
    return _unique(hosts, path)


def require_slots(hosts: Sequence[Host], workers: int) -> None:
    """Raises :class:`LaunchError` where `workers` do not fit on `hosts`."""
    slots = sum(host.slots for host in hosts)
    if workers > slots:
        named = ",".join(str(host) for host in hosts)
        raise LaunchError(
            f"-np {workers} needs {workers} slots, and {named} has {slots}; name more hosts or slots, or fewer workers"
        )


def require_room(workers: int, limits: Mapping[str, int]) -> None:
    """Raises :class:`LaunchError` where this machine cannot start as many `workers`, by the name of each of its limits."""
    name, most = min(limits.items(), key=lambda pair: pair[1], default=("", workers))
    if workers > most:
        raise LaunchError(
            f"-np {workers}: this machine can start {most} workers at most ({name}); give fewer, or more hosts with -H"
        )


def is_here(name: str, here: str) -> bool:
    """Whether `name` is a name of this host, which is called `here`."""
    return name in ("localhost", "127.0.0.1", here)


def others(hosts: Sequence[Host], here: str) -> list[str]:
    """The names of the hosts other than this one, which is called `here`."""
    return [host.name for host in hosts if not is_here(host.name, here)]


def require_addresses(hosts: Sequence[Host], here: str, has_address: Callable[[str], bool]) -> None:
    """Raises :class:`LaunchError` where a host other than this one, which is called `here`, has no address."""
    for name in others(hosts, here):
        if not has_address(name):
            raise LaunchError(
                f"{name} has no address: correct the name, or put it into DNS, /etc/hosts or ~/.ssh/config"
            )


def require_shell(hosts: Sequence[Host], here: str, has_ssh: bool) -> None:
    """Raises :class:`LaunchError` where a host other than this one, which is called `here`, cannot be reached."""
    strangers = others(hosts, here)
    if strangers and not has_ssh:
        raise LaunchError(
            f"{strangers[0]} is another host, and there is neither ssh nor rsh on the PATH to reach it with: install ssh"
        )
