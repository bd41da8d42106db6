"""Checks that hosts have the network interfaces that are asked for, since MPI explains a missing one badly."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from dearrun.errors import LaunchError
from dearrun.hosts import Host, others

__all__ = ["of_all", "remote_shell", "require_interfaces"]

_SECONDS = 10
_LIST = "ls /sys/class/net"
_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")
_ADDRESS = re.compile(r"[\d.]+(/\d+)?|.*:.*")  # 10.0.0.0/24, which MPI takes as well


def require_interfaces(asked: str, there: Mapping[str, Sequence[str]]) -> None:
    """Raise :class:`LaunchError` where a host lacks one of the interfaces `asked` for, as in "eth0,eth1" (pure).

    `there` are those of each host that said so.
    """
    names = [name.strip() for name in asked.split(",")]
    for host, found in there.items():
        for name in names:
            if name not in found and not _ADDRESS.fullmatch(name):
                raise LaunchError(
                    f"--network-interfaces names {name!r}, and {host} has no such interface: it has {', '.join(found)}"
                )


def of_all(hosts: Sequence[Host], here: str, shell: Sequence[str]) -> dict[str, list[str]]:
    """The interfaces of this host, which is called `here`, and of the others, as far as they say so through `shell`."""
    found = {here: sorted(name for _, name in socket.if_nameindex())}
    names = others(hosts, here)
    with ThreadPoolExecutor(max_workers=32) as pool:
        listed = pool.map(lambda name: _listed([*shell, name, _LIST]), names)
        found |= {name: said for name, said in zip(names, listed, strict=True) if said}
    return found


def _listed(command: Sequence[str]) -> list[str]:
    try:
        said = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return said.stdout.split() if said.returncode == 0 else []


def remote_shell(environ: Mapping[str, str], port: int | None, identity: str | None) -> list[str]:
    """The program that runs a command on a host, as mpirun does: its name and the command follow (pure)."""
    named = next((environ[name] for name in _AGENTS if environ.get(name)), None)
    if named is not None:
        return shlex.split(named.split(":")[0])
    port_words = ["-p", str(port)] if port is not None else []
    identity_words = ["-i", identity] if identity is not None else []
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SECONDS}", *port_words, *identity_words]
