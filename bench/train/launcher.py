"""Starts the workers of one benchmark run: on this machine, on an emulated cluster, or on the hosts of a hostfile.

Every method gets the same threads, the same treatment of freed memory, and no binding to cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.emulation.cluster import Cluster, ClusterError, parse_rate
from bench.emulation.goodput import goodput
from bench.methods.method import Method
from bench.models.catalog import workload
from bench.program import ROOT
from bench.train.settings import Settings

__all__ = [
    "GOODPUT",
    "LAUNCHED",
    "LauncherError",
    "environment",
    "first_host",
    "for_method",
    "interpreter_arguments",
    "launch",
    "local_command",
    "narrowed",
    "pick",
]

LAUNCHED = "DEAR_BENCH_LAUNCHED"  # set in workers: do not start workers again
GOODPUT = "DEAR_BENCH_GOODPUT"  # bytes per second through an emulated link
PORT = "29400"
_PATIENCE_SECONDS = 15
_BASE_BYTES = 400 * 10**6
# [Note: freed memory] Gradients come and go with every step. Whether glibc keeps their memory meanwhile, or gives it back
# to the kernel and gets it again page by page, depends on what happens to lie behind it: computation alone took 0.89 s a
# step in one run and, with 23,500 page faults a step, 1.03 s in another. Here it is kept, whatever the method (not
# that of tensors above 32 MiB, which glibc never keeps).
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**40)}


class LauncherError(RuntimeError):
    """The workers could not be started, or did not succeed."""


def narrowed(network: str, dilate: float) -> str:
    """A link with its rate divided by `dilate` and its delay multiplied: ``("10gbit", 50)`` to ``"200000000bit"``."""
    bits, delay = parse_rate(network)
    return f"{bits / dilate:.0f}bit" + (f"+{1e3 * delay * dilate:g}ms" if delay else "")


def first_host(hostfile: Path) -> str:
    """The host on the first line that names one."""
    for line in hostfile.read_text().splitlines():
        words = line.split("#")[0].split()
        if words:
            return words[0]
    raise LauncherError(f"{hostfile} names no host")


def for_method(method: Method, timeline: str | None) -> dict[str, str]:
    """The environment variables that a method's workers read when they join.

    Raises ``LauncherError`` where it records no timeline.
    """
    if timeline is None:
        return method.environment
    if method.timeline_variable is None:
        raise LauncherError(f"{method.name} records no timeline: leave --timeline out")
    return {**method.environment, method.timeline_variable: timeline}


def environment(settings: Settings, method: Method, timeline: str | None = None) -> dict[str, str]:
    """The environment variables that every worker needs, whatever starts it.

    Raises ``LauncherError`` where a method records no timeline.
    """
    env = {
        **{name: os.environ.get(name, value) for name, value in _ALLOCATOR.items()},
        **for_method(method, timeline),
        LAUNCHED: "1",
        "OMP_NUM_THREADS": str(settings.threads),
        "PYTHONPATH": str(ROOT),
    }
    if settings.hostfile is None and settings.workers > (os.cpu_count() or 1):
        # Emulated hosts share cores without Open MPI's knowing: who waits by spinning would keep the others from sending.
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return env


def pick(settings: Settings, method: Method) -> str:
    """The launcher to use for these settings. Raises ``LauncherError`` when the wish cannot be granted."""
    if settings.launcher is not None and settings.launcher not in method.launchers:
        raise LauncherError(f"{method.name} runs under {' or '.join(method.launchers)}, not under {settings.launcher}")
    if settings.hostfile is None:
        return settings.launcher or method.launchers[0]
    if settings.launcher == "torchrun":
        raise LauncherError("with a hostfile mpirun starts the workers; start torchrun on every host by yourself")
    return "mpi"


def local_command(launcher: str, settings: Settings, argv: Sequence[str], exported: Sequence[str]) -> list[str]:
    """The command line that runs ``python argv`` on this machine, or on the hosts of a hostfile."""
    if launcher == "torchrun":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.workers), "--no-python"]
        return [sys.executable, *run, sys.executable, *argv]
    command = [str(ROOT / "scripts" / "mpirun"), "-np", str(settings.workers)]
    if settings.hostfile is not None:
        command += ["--hostfile", str(Path(settings.hostfile).resolve()), "--map-by", "slot"]
        interface = os.environ.get("ETH_MPI_BTC_TCP_IF_INCLUDE")
        if interface:
            command += ["--mca", "btl_tcp_if_include", interface]
        for name in exported:
            command += ["-x", name]
    return [*command, sys.executable, *argv]


def interpreter_arguments(command: Sequence[str]) -> list[str]:
    """Python's own arguments in ``sys.orig_argv``, such as ``-W ignore``, which workers get, too."""
    return list(command[1 : command.index("-m")]) if "-m" in command else []


def needed_bytes(settings: Settings) -> int:
    """The memory for workers on this machine: parameters, gradients, buckets beside them, and a Python with torch."""
    with torch.device("meta"):
        model = workload(settings.model).build()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    state = {"sgd": 0, "momentum": 1, "adamw": 2}[settings.optimizer]
    return settings.workers * ((3 + state) * parameters + _BASE_BYTES)


def _check_memory(settings: Settings) -> None:
    """Raises ``LauncherError`` where the workers would drive this machine out of memory."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return
    available = int(re.findall(r"MemAvailable:\s+(\d+)", text)[0]) * 1024
    needed = needed_bytes(settings)
    if needed > available:
        raise LauncherError(
            f"{settings.workers} workers with {settings.model} need about {needed / 1e9:.1f} GB on this machine, which has "
            f"{available / 1e9:.1f} GB left: take fewer workers, or a smaller model"
        )


def launch(settings: Settings, method: Method, argv: Sequence[str], timeline: str | None = None) -> None:
    """Run ``python argv`` on every worker. Raises :class:`LauncherError` or ``ClusterError``."""
    launcher, env = pick(settings, method), environment(settings, method, timeline)
    if settings.hostfile is None:
        _check_memory(settings)
    if settings.network != "local":
        _on_cluster(settings, launcher, argv, env)
        return
    if settings.hostfile is not None:
        env |= {"MASTER_ADDR": first_host(Path(settings.hostfile)), "MASTER_PORT": PORT}
    command = local_command(launcher, settings, argv, list(env))
    with subprocess.Popen(command, env={**os.environ, **env}, cwd=ROOT) as job:
        try:
            code = job.wait(settings.timeout)
        except subprocess.TimeoutExpired:
            raise LauncherError(
                f"the run did not end within {settings.timeout:g} s: give it a larger --timeout"
            ) from None
        finally:
            if job.poll() is None:
                _end(job)
    if code:
        raise LauncherError(f"a worker failed; the launcher exited with {code}")


def _end(job: subprocess.Popen[bytes]) -> None:
    """Ask, as mpirun and torchrun then end their workers; insist after a while."""
    job.terminate()
    try:
        job.wait(_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        job.kill()


def _on_cluster(settings: Settings, launcher: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
    with Cluster(settings.workers, narrowed(settings.network, settings.dilate)) as cluster:
        extra = {}
        if settings.workers > 1:
            extra[GOODPUT] = str(goodput(cluster))
        start = cluster.run_mpi if launcher == "mpi" else cluster.run_torch
        try:
            start([*argv], env={**env, **extra}, timeout=settings.timeout)
        except ClusterError as error:
            raise LauncherError(str(error)) from None
