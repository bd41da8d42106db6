"""The settings that decide a benchmark run, read from a command line (pure)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.models.catalog import MODELS, workload
from bench.train.dears_flags import add_flags, in_our_words

__all__ = ["OPTIMIZERS", "Outputs", "Settings", "check", "parse", "to_argv"]

OPTIMIZERS = ("sgd", "momentum", "adamw")


@dataclass(frozen=True)
class Settings:
    """The settings of one run. Batch size is per worker; `size` is the edge of a picture or the words of a sentence.

    `repeat` tells runs apart that are the same in all else.
    """

    method: str = "dear"
    model: str = "resnet50"
    batch_size: int = 64
    size: int = 224
    workers: int = 1
    network: str = "local"
    hostfile: str | None = None
    launcher: str | None = None
    emulate_compute: str | None = None
    dilate: float = 1.0
    optimizer: str = "sgd"
    warmup: int = 10
    iterations: int = 5
    batches: int = 10
    threads: int = 1
    device: str = "auto"
    timeout: float = 1800.0
    repeat: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outputs:
    """What a run writes besides its lines. It does not tell runs apart."""

    json: Path | None = None
    timeline: str | None = None
    breakdown: bool = False
    profile: Path | None = None


def _parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.train",
        usage="%(prog)s [options]    (--help lists them)",  # errors show it, and should not drown in it
        description="Train on synthetic data and print the throughput. Starts its workers by itself, unless mpirun or "
        "torchrun started it.",
    )
    add = parser.add_argument
    add("--method", default=default.method, metavar="NAME[:OPTION=VALUE,…]", help="e.g. dear, ddp:bucket_mb=4, fsdp2")
    add("--model", default=default.model, choices=list(MODELS))
    add("--batch-size", type=int, help="samples per worker and step (default: the model's own)")
    add(
        "--size",
        "--sentence-len",
        type=int,
        help="edge of a picture, or words of a sentence (default: the model's own)",
    )
    add("--small", action="store_true", help="inputs that a CPU manages; parameters stay what they are")
    add("--workers", type=int, help=f"default: {default.workers}, or those of the job that this is started in")
    add(
        "--network",
        help="local, or the rate of emulated links between hosts: 1gbit, 100mbit, 1gbit+20ms with a delay, …",
    )
    add("--hostfile", help="Open MPI's hostfile of a real cluster")
    add("--launcher", choices=["mpi", "torchrun"], help="default: what the method prefers")
    add(
        "--emulate-compute",
        metavar="MODEL@DEVICE[:BATCH]",
        help="sleep for an accelerator's times, e.g. resnet50@a100:64",
    )
    add("--dilate", type=float, default=default.dilate, help="stretch emulated compute and narrow links by this factor")
    add("--optimizer", choices=OPTIMIZERS, default=default.optimizer)
    add("--num-warmup-batches", type=int, default=default.warmup, dest="warmup")
    add("--num-iters", type=int, default=default.iterations, dest="iterations")
    add("--num-batches-per-iter", type=int, default=default.batches, dest="batches")
    add("--threads", type=int, default=default.threads, help="threads of each worker's computation")
    add("--device", choices=["auto", "cpu", "cuda"], default=default.device)
    add("--timeout", type=float, help=f"seconds for the whole run (default: {default.timeout:g})")
    add("--repeat", type=int, default=default.repeat, help="number of this run among equal ones, kept in its result")
    add("--json", type=Path, help="write the result here")
    add("--timeline", metavar="FILE", help="record a Chrome trace; {rank} in the name gives every rank one")
    add("--profile", type=Path, metavar="FILE", help="measure each layer too, of our strategies; see docs/predict.md")
    add("--breakdown", action="store_true", help="print forward, backward, update and exposed communication")
    add_flags(parser)
    return parser


def check(settings: Settings) -> None:
    """Check that settings fit together; raises ``ValueError``."""
    for name in ("batch_size", "size", "workers", "iterations", "batches", "threads"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} should be at least 1 and is {getattr(settings, name)}")
    if settings.warmup < 2:
        raise ValueError(
            "the number of warm-up batches should be at least 2, in which buckets are built (DDP builds its own again in "
            f"the second), not {settings.warmup}"
        )
    if not settings.dilate > 0:
        raise ValueError(f"dilate should be above 0 and is {settings.dilate}")
    if settings.dilate != 1 and settings.emulate_compute is None:
        raise ValueError(
            "dilate stretches emulated compute: give --emulate-compute too, or real compute would not be stretched"
        )
    if settings.hostfile is not None and settings.network != "local":
        raise ValueError(
            f"hostfile {settings.hostfile} names a real network and --network {settings.network} emulates one"
        )


def parse(argv: Sequence[str], job: int | None = None) -> tuple[Settings, Outputs]:
    """The settings, and what to leave where; `job` is the size of the job of mpirun or torchrun that this is a rank of.

    Exits with a message for bad arguments, as argparse does, also for what only whoever starts the workers can heed. Raises
    ``ValueError`` for what a flag of DeAR's asks for and the method does not do.
    """
    parser = _parser()
    given = vars(parser.parse_args(argv))
    in_our_words(given)
    if job is not None:
        for name in ("network", "hostfile", "launcher", "timeout"):
            if given[name] is not None:
                parser.error(
                    f"--{name} {given[name]} is for who starts the workers; mpirun or torchrun has started these"
                )
        if given["workers"] not in (None, job):
            parser.error(f"--workers {given['workers']}: mpirun or torchrun has started {job}")
        given["workers"] = job
    for name in ("workers", "network", "timeout"):
        if given[name] is None:
            given[name] = getattr(Settings(), name)
    chosen = workload(given["model"])
    small = given.pop("small")
    json, timeline, profile = given.pop("json"), given.pop("timeline"), given.pop("profile")
    outputs = Outputs(
        json and json.absolute(),
        timeline and str(Path(timeline).absolute()),
        given.pop("breakdown"),
        profile and profile.absolute(),
    )
    if given["batch_size"] is None:
        given["batch_size"] = min(8, chosen.batch_size) if small else chosen.batch_size
    if given["size"] is None:
        given["size"] = chosen.small if small else chosen.size
    settings = Settings(**given)
    try:
        check(settings)
    except ValueError as error:
        parser.error(str(error))
    return settings, outputs


_FLAGS = {"warmup": "--num-warmup-batches", "iterations": "--num-iters", "batches": "--num-batches-per-iter"}


def to_argv(settings: Settings) -> list[str]:
    """The arguments from which :func:`parse` reads these settings."""
    argv = []
    for name, value in settings.to_dict().items():
        if value is not None:
            argv += [_FLAGS.get(name, "--" + name.replace("_", "-")), str(value)]
    return argv
