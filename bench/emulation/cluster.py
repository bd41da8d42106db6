"""Hosts and links of an emulated cluster on one machine: network namespaces behind one bridge, each link shaped.

    with Cluster(hosts=2, rate="1gbit") as cluster:
        cluster.run_mpi(["-m", "bench.collectives.worker"])

    Cluster(2, "1gbit", ranks=2)        four ranks, two on each host; between these two nothing is shaped

A token bucket of 128 KB at both ends of every link passes `rate` in each direction, as a switched full-duplex network
does; a larger bucket would let a whole message through after an idle moment. With ``rate="1gbit+20ms"`` packets arrive
20 ms later, and a process carries them (`bench.emulation.delayed`). Needs root. Every host has a name of its own (UTS
namespace), which leads to its address on all hosts (``/etc/netns``, see ip-netns(8)). Only addresses inside these
namespaces are ever used. Hosts that a killed process left behind are removed when the next cluster is made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from bench.emulation.delayed import MTU
from bench.program import ROOT

__all__ = ["SUBNET", "Cluster", "ClusterError", "network", "parse_rate"]

PREFIX = "dearemu"
SUBNET = "10.77.0"
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_MEETING_PORT = "29400"
_ETC_NETNS = Path("/etc/netns")  # what ip netns exec puts over the files of /etc, by namespace
_NAP_SECONDS = 0.05
_LAST_WORDS_SECONDS = 5.0  # of the others when one has failed: they may be about to say why
_AGENT = """#!/bin/sh
# Stands in for ssh: enters the namespace of the host whose address is the first argument.
host=$1; shift
number=${{host##*.}}
exec ip netns exec {prefix}$number unshare --uts sh -c 'hostname {prefix}'$number'; exec sh -c "$0"' "$*"
"""


class ClusterError(RuntimeError):
    """The cluster could not be made."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")


def parse_rate(text: str) -> tuple[float, float]:
    """Bits per second, and seconds that each packet takes besides, of ``"1gbit"`` or ``"100mbit+20ms"``.

    Raises ``ValueError``.
    """
    found = re.fullmatch(r"([0-9.]+)([kmg]?)bit(?:\+([0-9.]+)ms)?", text)
    if found is None:
        raise ValueError(
            f"a network is local or a rate like 1gbit, 100mbit, or 100mbit+20ms with a delay, and not {text!r}"
        )
    return float(found[1]) * _UNITS[found[2]], float(found[3] or 0) / 1e3


def network(text: str) -> str:
    """The type of an argument of a command line that is a rate."""
    try:
        parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


class Cluster:
    """`hosts` namespaces with links of `rate` (1gbit, 100mbit, 1gbit+20ms), while the context lasts.

    Jobs have so many `ranks` on each, of consecutive numbers.
    """

    def __init__(self, hosts: int, rate: str = "1gbit", ranks: int = 1) -> None:
        if hosts < 1:
            raise ValueError(f"a cluster needs at least 1 host, not {hosts}")
        if ranks < 1:
            raise ValueError(f"a host of a cluster needs at least 1 rank, not {ranks}")
        if os.geteuid() != 0:
            raise ClusterError("the emulated cluster makes network namespaces and needs root; use --network local")
        for tool in ("ip", "tc", "unshare"):
            if shutil.which(tool) is None:
                raise ClusterError(f"{tool} was not found (Debian: iproute2, util-linux)")
        self.hosts, self.rate, self.ranks = hosts, rate, ranks
        self._bits, self._delay = parse_rate(rate)
        self._carrier: subprocess.Popen[str] | None = None  # of packets, where there is a delay
        self._prefix = f"{PREFIX}{os.getpid()}x"
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))

    @property
    def delay(self) -> float:
        """Seconds that a packet takes from host to host, besides its bytes."""
        return self._delay

    @property
    def agent(self) -> str:
        """A program that stands in for ssh: it runs a command on the host of an address."""
        return str(self._folder / "agent")

    def address(self, host: int) -> str:
        return f"{SUBNET}.{host + 1}"

    def __enter__(self) -> Cluster:
        try:
            self._make()
            self._name_hosts()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _namespace(self, host: int) -> str:
        return f"{self._prefix}{host + 1}"

    def _make(self) -> None:
        _remove_abandoned()
        agent = Path(self.agent)
        agent.write_text(_AGENT.format(prefix=self._prefix))
        agent.chmod(0o755)
        if self._delay:
            self._make_delayed()
            return
        switch = f"{self._prefix}sw"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            space, port = self._namespace(host), f"port{host}"
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for name in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", name, "up")
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
        self._shape("add")

    def _make_delayed(self) -> None:
        spaces = [self._namespace(host) for host in range(self.hosts)]
        for space in spaces:
            _run("ip", "netns", "add", space)
        command = [sys.executable, "-m", "bench.emulation.delayed", str(self._bits), str(self._delay), *spaces]
        self._carrier = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._carrier.stdout is not None
        if self._carrier.stdout.readline().strip() != "ready":
            raise ClusterError("the process that carries packets with a delay did not start: see above")
        for host, space in enumerate(spaces):
            _run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "set", "eth0", "up", "mtu", str(MTU))

    def _name_hosts(self) -> None:
        """Let the name of each host lead to its address, on all of them."""
        names = "".join(f"{self.address(host)} {self._namespace(host)}\n" for host in range(self.hosts))
        for host in range(self.hosts):
            files = _ETC_NETNS / self._namespace(host)
            files.mkdir(parents=True)
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def _shape(self, action: str) -> None:
        switch, shape = (
            f"{self._prefix}sw",
            ("tbf", "rate", f"{self._bits:.0f}bit", "burst", "128kb", "latency", "100ms"),
        )
        for host in range(self.hosts):
            for where, device in ((self._namespace(host), "eth0"), (switch, f"port{host}")):
                _run("tc", "-n", where, "qdisc", action, "dev", device, "root", *shape)

    def set_rate(self, rate: str) -> None:
        """Another rate for all links from now on, whatever is on its way.

        Raises :class:`ClusterError`, and ``ValueError`` where there is a delay, or was.
        """
        bits, delay = parse_rate(rate)
        if delay or self._delay:
            raise ValueError(f"links change their rate, but no delay: not from {self.rate} to {rate}")
        self.rate, self._bits = rate, bits
        self._shape("change")

    def _remove(self) -> None:
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.communicate()
        for name in _namespaces():
            if name.startswith(self._prefix):
                _remove_namespace(name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def enter(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host."""
        space = self._namespace(host)
        shell = f'hostname {space}; exec "$0" "$@"'
        return ["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", shell, *command]

    def run_mpi(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 600) -> None:
        """``python argv`` on every rank, over MPI/TCP, within a host too. Raises ClusterError if the job fails."""
        mpirun, major = _mpirun()
        launch = ("--prtemca", "plm_ssh_agent") if major >= 5 else ("--mca", "plm_rsh_agent")
        where = ",".join(f"{self.address(host)}:{self.ranks}" for host in range(self.hosts))
        count = str(self.hosts * self.ranks)
        command = [mpirun, *launch, self.agent, "--host", where, "-np", count, "--map-by", "slot", "--bind-to", "none"]
        command += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        command += ["--mca", "btl_tcp_if_include", f"{SUBNET}.0/24"]
        meet = {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": _MEETING_PORT,
        }  # of torch.distributed, where a rank wants it
        env = {"GLOO_SOCKET_IFNAME": "eth0", **meet, **(env or {})}
        for name in env:
            command += ["-x", name]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        root |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environ = {**os.environ, **root, **env}
        job = subprocess.Popen(self.enter(0, [*command, sys.executable, *argv]), env=environ, cwd=ROOT)
        self._finish([job], timeout)

    def run_torch(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 600) -> None:
        """``python argv`` on every rank, with the environment that torchrun would set."""
        jobs, size = [], self.hosts * self.ranks
        for rank in range(size):
            host, local = divmod(rank, self.ranks)
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(size)}
            ranks |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(self.ranks)}
            meet = {"MASTER_ADDR": self.address(0), "MASTER_PORT": _MEETING_PORT}
            environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **(env or {}), **ranks, **meet}
            jobs.append(subprocess.Popen(self.enter(host, [sys.executable, *argv]), env=environ, cwd=ROOT))
        self._finish(jobs, timeout)

    def _finish(self, jobs: list[subprocess.Popen[bytes]], timeout: float) -> None:
        """Wait for `jobs`, one of all ranks or one of each; where one fails, the others are ended soon, and it is named."""
        deadline, failed = time.monotonic() + timeout, ""
        try:
            while None in [job.poll() for job in jobs]:
                if time.monotonic() > deadline:
                    raise ClusterError(failed or f"a job on the cluster did not end within {timeout:g} s")
                if self._carrier is not None and self._carrier.poll() is not None:
                    raise ClusterError(f"the process that carries packets ended with {self._carrier.returncode}")
                time.sleep(_NAP_SECONDS)
                if not failed and (failed := _failure(jobs, self.ranks)):
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS_SECONDS)
            failed = failed or _failure(jobs, self.ranks)
            if failed:
                raise ClusterError(failed)
        finally:
            for job in jobs:
                if job.poll() is None:
                    job.kill()
                    job.wait()


def _failure(jobs: Sequence[subprocess.Popen[bytes]], ranks: int) -> str:
    """What failed, empty if nothing did. One that was killed comes before those that may have lost it."""
    codes = [(job.returncode, rank // ranks) for rank, job in enumerate(jobs) if job.returncode]
    if not codes:
        return ""
    code, host = min(codes)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    return f"a job on the cluster{f' on host {host}' if len(jobs) > 1 else ''} {how}"


def _mpirun() -> tuple[str, int]:
    """The mpirun of this environment, and the major version of its Open MPI."""
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        raise ClusterError("no mpirun beside this Python or in PATH; run `make setup`")
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    digits = [word for word in text.split() if word[:1].isdigit()]
    return path, int(digits[0].split(".")[0]) if digits else 5


def _namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line.split()[0] for line in done.stdout.splitlines() if line.startswith(PREFIX)]


def _remove_namespace(name: str) -> None:
    """End what still runs in a namespace this module made, and delete it."""
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in done.stdout.split():
        subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    shutil.rmtree(_ETC_NETNS / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # others have files there, too
        _ETC_NETNS.rmdir()


def _remove_abandoned() -> None:
    """The hosts of benchmarks that were killed before they could remove them."""
    for name in _namespaces():
        maker = name.removeprefix(PREFIX).split("x")[0]
        if not Path("/proc", maker).exists():
            _remove_namespace(name)
