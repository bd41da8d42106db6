"""One rank of a benchmark: trains on a synthetic batch and takes the time."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.emulation.accelerator import Accelerator
from bench.methods.method import MakeOptimizer, Method
from bench.models.catalog import Batch, Workload, workload
from bench.program import ROOT
from bench.train.cores import busy_share, core_ticks, stolen_share
from bench.train.launcher import GOODPUT
from bench.train.origin import commit_of
from bench.train.settings import Settings
from bench.train.stepping import Clock, alone, breakdown, step, warm_up
from overlap.job.launch import Launcher, detect

__all__ = ["Result", "train"]

Say = Callable[[str], None]
_STARTED_BY = {Launcher.MPI: "mpi", Launcher.TORCHRUN: "torchrun"}


@dataclass(frozen=True)
class Result:
    """The measurements of rank 0.

    Times are wall seconds as they passed, stretched by `dilate` where that was asked for.
    """

    settings: dict[str, Any]
    unit: str
    device: str
    workers: int
    parameter_bytes: int
    step_seconds: list[float]  # every measured step
    phase_seconds: dict[str, float]  # medians: forward (to the loss), backward, step (the optimizer's)
    rates: list[float]  # samples per second and worker of every iteration, undilated
    state_bytes: int  # optimizer state on rank 0
    peak_bytes: int  # of rank 0: resident memory at its peak; on a GPU what tensors took there
    training_bytes: int  # of rank 0: at the peak of measured steps, beyond what was there before the model was made
    warmup_steps: int  # before the clock ran: as many as were asked for, and those of a method's own search
    versions: dict[str, str]
    breakdown: dict[str, float] | None  # seconds of computation alone, and what communication adds
    cores_busy: float | None  # share of this machine's cores while the clock ran, whoever used them; None where unknown
    goodput: float | None  # bytes per second of plain TCP through a link, measured in the same run
    limit_share: float | None = None  # of its memory limit, that rank 0 took at the peak of measured steps
    started_by: str = ""  # torchrun or mpi; empty without other workers
    bytes_over: str = ""  # tcp, mpi, gloo, …: what moves the bytes between workers; empty where nothing does
    cores_stolen: float | None = None  # share of the cores that the host of a virtual machine gave to others meanwhile

    @property
    def total(self) -> float:
        return self.workers * statistics.mean(self.rates)

    @property
    def plus_minus(self) -> float:
        return self.workers * 1.96 * statistics.pstdev(self.rates)


def _optimizer(settings: Settings, rate: float) -> MakeOptimizer:
    if settings.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": rate}
    return torch.optim.SGD, {"lr": rate, "momentum": 0.9 if settings.optimizer == "momentum" else 0.0}


def _device(settings: Settings) -> torch.device:
    """The CPU, or the GPU of this rank's number on its host; where there are fewer, ranks share them."""
    if settings.device == "auto":
        kind = "cuda" if torch.cuda.is_available() and not settings.emulate_compute else "cpu"
    else:
        kind = settings.device
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, (detect(os.environ).local_rank or 0) % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)  # before a method connects
    return device


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _resident("VmHWM")


def _resident(what: str) -> int:
    """Bytes that the kernel tells of this process: ``VmRSS``, or ``VmHWM``, the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def _forget_peak(device: torch.device) -> None:
    """From now on the peak of memory is that of what follows."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _model(settings: Settings, chosen: Workload) -> nn.Module:
    if settings.emulate_compute is None:
        return chosen.build()
    return Accelerator.named(settings.emulate_compute, settings.batch_size).model(chosen, settings.dilate)


def _batch(settings: Settings, chosen: Workload, rank: int, device: torch.device) -> Batch:
    """Every rank has its own, always the same one: input is not what is measured."""
    if settings.emulate_compute is not None:
        return ()
    made = chosen.batch(settings.batch_size, settings.size, torch.Generator().manual_seed(1000 + rank))
    return tuple(part.to(device) for part in made)


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "commit": commit_of(ROOT),
    }


def train(
    settings: Settings, method: Method, say: Say, *, breakdown_wanted: bool = False, profile: Path | None = None
) -> Result | None:
    """Warm up, measure; rank 0 gets the figures and calls `say` with the lines of the report. On every rank."""
    torch.set_num_threads(settings.threads)
    chosen, device = workload(settings.model), _device(settings)
    torch.manual_seed(1)
    resident = 0 if device.type == "cuda" else _resident("VmRSS")
    model = _model(settings, chosen).to(device)
    batch = _batch(settings, chosen, detect(os.environ).rank, device)
    make = _optimizer(settings, chosen.learning_rate * (detect(os.environ).size if chosen.unit == "img" else 1))

    def loss_of(network: nn.Module) -> torch.Tensor:
        return chosen.loss(network, batch) if batch else network()

    # Before the method joins, and begins to record a timeline where that was asked for.
    computation = alone(model, make, loss_of, device) if breakdown_wanted else None
    started_by = _STARTED_BY.get(detect(os.environ).launcher, "")
    place = method.join(device)
    if place.rank != 0:
        say = _quiet
    goodput = os.environ.get(GOODPUT)
    kind = "GPU" if device.type == "cuda" else "CPU"
    parameters = list(model.parameters())
    count, nbytes = sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
    model, optimizer = method.distribute(model, make)
    if profile is not None:
        method.save_profile(optimizer, profile, settings.batch_size)
    say(f"Model: {settings.model}, {count:,} parameters")
    if settings.emulate_compute:
        say(f"Emulated accelerator: {settings.emulate_compute}, dilated {settings.dilate:g} times; rates are undilated")
    say(f"Method: {settings.method}")
    say(f"Batch size: {settings.batch_size}")
    say(f"Number of {kind}s: {place.size}")
    say("Running warmup...")
    clock = Clock(device)
    warmed = warm_up(settings.warmup, lambda: method.tuning(optimizer), lambda: step(model, optimizer, loss_of, clock))
    if warmed > settings.warmup:
        say(f"Warmed up for {warmed} steps instead of {settings.warmup}: {settings.method} was searching its buckets")

    say("Running benchmark...")
    highest = _peak(device)
    _forget_peak(device)
    begun, cores = clock.settled(), core_ticks()
    clock, rates = Clock(device), []
    for number in range(settings.iterations):
        for _ in range(settings.batches):
            step(model, optimizer, loss_of, clock)
        begun, before = clock.settled(), begun
        seconds = (begun - before) / settings.dilate
        rates.append(settings.batch_size * settings.batches / seconds)
        say(f"Iter #{number}: {rates[-1]:.1f} {chosen.unit}/sec per {kind}")
    ended = core_ticks()
    method.settle(optimizer)
    made_of = breakdown(computation, statistics.median(clock.steps)) if computation is not None else None
    peak, limit = max(_peak(device), method.most_bytes(optimizer)), method.limit_bytes(optimizer)
    result = Result(
        settings=settings.to_dict(),
        unit=chosen.unit,
        device=kind,
        workers=place.size,
        parameter_bytes=nbytes,
        step_seconds=clock.steps,
        phase_seconds=clock.medians(),
        breakdown=None if made_of is None else asdict(made_of),
        rates=rates,
        state_bytes=method.state_bytes(optimizer),
        peak_bytes=max(highest, peak),
        training_bytes=peak - resident,
        warmup_steps=warmed,
        versions=_versions(),
        cores_busy=busy_share(cores, ended),
        goodput=None if goodput is None else float(goodput),
        limit_share=None if limit is None else peak / limit,
        started_by=started_by,
        bytes_over=method.bytes_over(),
        cores_stolen=stolen_share(cores, ended),
    )
    method.leave()
    if made_of is not None:
        say(f"Breakdown of a step: {made_of}")
    _report(result, say)
    return result if place.rank == 0 else None


def _report(result: Result, say: Say) -> None:
    """The last line is what scripts read."""
    blocks = [result.settings["batch_size"] / rate for rate in result.rates]
    say(f"Iteration time: {statistics.mean(blocks):.3f} +-{1.96 * statistics.pstdev(blocks):.3f}")
    name = "Img" if result.unit == "img" else "Sen"
    each = statistics.mean(result.rates)
    say(f"{name}/sec per {result.device}: {each:.1f} +-{result.plus_minus / result.workers:.1f}")
    say(f"Total {result.unit}/sec on {result.workers} {result.device}(s): {result.total:.1f} +-{result.plus_minus:.1f}")


def _quiet(_line: str) -> None:
    pass


def speak(line: str) -> None:
    """Print one line to standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
