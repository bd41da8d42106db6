"""Scripts of Horovod's kinds, run under both libraries with only the import replaced."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.compare_horovod.job import command, run
from tests.compare_horovod.outcome import Likeness
from tests.harness import ROOT

__all__ = ["SCRIPTS", "Script", "compare", "prepare", "results", "with_import"]

IMPORT = "import dear as hvd"
_SECONDS = 240.0
# 16 bits on the wire are summed in fp16 by Horovod and in fp32 here; accuracies are shares of a few hundred samples.
TOLERANCES = {"loss": 0.01, "accuracy": 0.015}


@dataclass(frozen=True)
class Script:
    """A run of a file in `examples`; those of one comparison share a folder, so that a later one can resume."""

    name: str
    file: str
    arguments: tuple[str, ...]


_IMAGENET = ("--small", "--batches-per-allreduce", "2", "--checkpoint-format", "checkpoint-{epoch}.pt", "--epochs")

SCRIPTS = (
    Script("MNIST", "horovod_mnist.py", ("--small",)),
    Script(
        "MNIST, fp16 on the wire, predivide, GradScaler",
        "horovod_mnist.py",
        ("--small", "--fp16-allreduce", "--gradient-predivide-factor", "2", "--use-mixed-precision"),
    ),
    Script("ImageNet, warm-up, two batches to a step", "horovod_imagenet.py", (*_IMAGENET, "2")),
    Script("ImageNet, resumed", "horovod_imagenet.py", (*_IMAGENET, "3", "--fp16-allreduce")),
    Script("synthetic benchmark, fp16 on the wire", "horovod_synthetic_benchmark.py", ("--small", "--fp16-allreduce")),
)


def with_import(source: str, module: str) -> str:
    """`source` with another library behind ``hvd``; raises ``ValueError`` where it has no import of ours, or several."""
    if source.count(IMPORT) != 1:
        raise ValueError(f"a script should say {IMPORT!r} once and says it {source.count(IMPORT)} times")
    return source.replace(IMPORT, f"import {module} as hvd")


def prepare(library: str, folder: Path) -> None:
    """Copy the examples into `folder`."""
    for path in (ROOT / "examples").glob("*.py"):
        if path.name.startswith("horovod_"):
            (folder / path.name).write_text(with_import(path.read_text(), library))
        else:
            shutil.copy(path, folder)


def results(script: Script, folder: Path, ranks: int) -> str:
    """What rank 0 printed of losses and accuracies, one line; or how the run failed."""
    output = folder / "output"
    output.unlink(missing_ok=True)
    status = run(command(ranks, [script.file, *script.arguments]), _SECONDS, output, cwd=folder)
    text = output.read_text(errors="replace")
    if status != 0:
        return f"failed: {'no end' if status is None else ' '.join(text.split())[-300:]}"
    return " ".join(f"{what} {number}" for what, number in re.findall(r"\b(loss|accuracy) (-?[\d.]+%?|nan|inf)", text))


def compare(theirs: str, ours: str) -> Likeness:
    """Lines of :func:`results`: as many numbers of the same kind, none further apart than ``TOLERANCES``."""
    one, other = theirs.split(), ours.split()
    if not one or len(one) != len(other) or one[::2] != other[::2] or one[0] == "failed:":
        return Likeness.DIFFERENT
    if one == other:
        return Likeness.EQUAL
    near = all(_near(what, *pair) for what, *pair in zip(one[::2], one[1::2], other[1::2], strict=True))
    return Likeness.ROUNDED if near else Likeness.DIFFERENT


def _near(what: str, theirs: str, ours: str) -> bool:
    numbers = [float(text.rstrip("%")) / (100 if text.endswith("%") else 1) for text in (theirs, ours)]
    return abs(numbers[0] - numbers[1]) <= TOLERANCES[what]
