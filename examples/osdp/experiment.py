"""What both experiments measure, and the lines that they print: throughput, a step, memory of the limit, losses."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformer import Shape

import fsdp

MB, GB = 2**20, 2**30
_WARM_STEPS, _MOST_WARM_STEPS = 3, 60
_PROFILED_STEPS = 4  # and one more
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "seq_length",
    "train_batch_size",
    "steps",
)

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Figures:
    """What a run measured, on all ranks. `sent_bytes`: by the busiest host, in a step; None on a single host."""

    mode: str
    model: str
    parameters: int
    ranks: int
    hosts: int
    samples: int  # of all ranks, in a step
    words: int  # of a sample
    step_seconds: list[float]
    peak_bytes: int  # of the rank that took most, in timed steps
    limit_bytes: int | None
    sent_bytes: float | None
    losses: list[float]  # of all steps, means over ranks

    @property
    def samples_per_second(self) -> float:
        return self.samples * len(self.step_seconds) / sum(self.step_seconds)

    def lines(self) -> list[str]:
        rate, step = self.samples_per_second, statistics.median(self.step_seconds)
        memory = f"{self.peak_bytes / GB:.3f} GB"
        if self.limit_bytes is not None:
            share = 100 * self.peak_bytes / self.limit_bytes
            memory = f"{self.peak_bytes / GB:.3f} of {self.limit_bytes / GB:.3f} GB, {share:.1f} %"
        found = {
            "throughput": f"{rate:.4g} samples/s, {rate * self.words:,.0f} words/s",
            "step": f"{step:.4f} s, the median of {len(self.step_seconds)}",
            "memory": f"{memory}, the peak of a rank",
        }
        if self.sent_bytes is not None:
            found["between hosts"] = f"{self.sent_bytes / 1e6:,.1f} MB sent by a host in a step"
        found["loss"] = (
            f"{self.losses[0]:.6f} in the first step, {self.losses[-1]:.6f} in the last of {len(self.losses)}"
        )
        head = f"{self.mode} on {self.ranks} ranks: {self.model}, {self.parameters:,} parameters"
        return [head, *(f"  {name:<14} {text}" for name, text in found.items())]


def add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """The arguments that both scripts have; `defaults` of sizes."""
    for name in _SIZES:
        what = {
            "train_batch_size": "samples of each rank in a step",
            "steps": "that are timed, once the plan is settled",
        }
        parser.add_argument(f"--{name}", type=int, default=defaults[name], help=what.get(name, "") + " (%(default)s)")
    parser.add_argument("--device_memory_limit", type=float, metavar="MB", help="of 2^20 bytes, of each rank's process")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="rank 0 writes all figures here")
    parser.add_argument(
        "--profile", type=int, nargs="?", const=1, default=0, help="1, or no value: print layer times and the plan"
    )


def shape_of(args: argparse.Namespace) -> Shape:
    """The sizes of the model. Raises ``ValueError`` for those that make none."""
    for name in _SIZES:
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} should be at least 1 and is {getattr(args, name)}")
    if args.vocab_size < 2:
        raise ValueError(f"--vocab_size should be at least 2, a word and the mask, and is {args.vocab_size}")
    if args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden_size {args.hidden_size} is not divisible by --num_attention_heads {args.num_attention_heads}: "
            "each head has an equal part"
        )
    if not 0 <= args.dropout < 1:
        raise ValueError(f"--dropout should be at least 0 and below 1 and is {args.dropout}")
    if args.device_memory_limit is not None and not args.device_memory_limit > 0:
        raise ValueError(f"--device_memory_limit should be above 0 MB and is {args.device_memory_limit:g}")
    sizes = (args.num_hidden_layers, args.hidden_size, args.num_attention_heads, args.vocab_size, args.seq_length)
    return Shape(*sizes, args.dropout)


def refuse(problem: Exception) -> NoReturn:
    """End this rank; the first one says why, in a sentence."""
    if os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0":
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {problem}\n")
    sys.exit(2)


class Run:
    """Steps of `model` with `optimizer`, on the batches that ``batches(generator)`` gives each rank."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Callable[[torch.Generator], Batch],
    ) -> None:
        self._args, self._model, self._batches = args, model, batches
        self._optimizer: Any = optimizer
        self._losses: list[torch.Tensor] = []
        self._generator = torch.Generator().manual_seed(1000 * args.seed + fsdp.rank())
        torch.manual_seed(1000 * args.seed + fsdp.rank())  # dropout

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = self._model(*self._batches(self._generator))
        loss.backward()
        self._optimizer.step()
        self._losses.append(loss.detach())

    def measure(self, mode: str, shape: Shape, peak: Callable[[], int] | None = None) -> Figures:
        """Warm up until the optimizer's plan is settled, and time steps. On every rank.

        `peak`: of this rank's memory in a step; None: what Linux counts from the end of the warm-up on.
        """
        parameters = sum(each.numel() for each in self._model.parameters())
        done = 0
        while done < _WARM_STEPS or (self._optimizer.tuning and done < _MOST_WARM_STEPS):
            self.step()
            done += 1
        if peak is None:
            forget_peak()
        sent, marks = _sent_bytes(), [time.perf_counter()]
        for _ in range(self._args.steps):
            self.step()
            marks.append(time.perf_counter())
        sent = _sent_bytes() - sent
        peaks = fsdp.allgather_object((resident_peak() if peak is None else peak(), sent))
        losses = fsdp.allreduce(torch.stack(self._losses))
        limit = self._args.device_memory_limit
        return Figures(
            mode=mode,
            model=f"{shape.layers} layers of {shape.hidden}, {shape.vocabulary:,} words known, sentences of {shape.words}",
            parameters=parameters,
            ranks=fsdp.size(),
            hosts=fsdp.cross_size(),
            samples=fsdp.size() * self._args.train_batch_size,
            words=shape.words,
            step_seconds=[until - since for since, until in itertools.pairwise(marks)],
            peak_bytes=max(taken for taken, _ in peaks),
            limit_bytes=None if limit is None else round(limit * MB),
            sent_bytes=max(each for _, each in peaks) / self._args.steps if fsdp.cross_size() > 1 else None,
            losses=losses.tolist(),
        )

    def report(self, figures: Figures) -> None:
        """Print what was measured, and write it; with ``--profile``, measure layers in some more steps. On every rank."""
        if fsdp.rank() == 0:
            print("\n".join(figures.lines()), flush=True)
            if self._args.json is not None:
                self._args.json.parent.mkdir(parents=True, exist_ok=True)
                self._args.json.write_text(json.dumps(asdict(figures), indent=1) + "\n")
        if self._args.profile:
            self._profile()

    def _profile(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "profile.json"
            self._optimizer.save_profile(file, steps=_PROFILED_STEPS, batch_size=self._args.train_batch_size)
            for _ in range(_PROFILED_STEPS + 1):
                self.step()
            if fsdp.rank() == 0:
                print(layer_table(json.loads(file.read_text())["layers"]), flush=True)
        if fsdp.rank() == 0:
            try:
                print(self._optimizer.explain(), flush=True)
            except RuntimeError:
                print("no plan: what is wrapped is freed after each use", flush=True)


def layer_table(layers: list[dict[str, Any]]) -> str:
    """The measured times of layers, in the order of forward."""
    lines = [f"  {'layer':<28} {'forward ms':>11} {'backward ms':>12} {'MB':>9}"]
    for name, forward, backward, nbytes in layers:
        lines.append(f"  {name:<28} {forward:>11.3f} {backward:>12.3f} {sum(nbytes) / MB:>9.2f}")
    return "\n".join(lines)


def forget_peak() -> None:
    """From now on the peak of memory is that of what follows. Raises ``OSError`` where a container forbids it."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_peak() -> int:
    """The most bytes of this process that were in memory."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _sent_bytes() -> int:
    """What this host's links have sent, all but the loopback, when all ranks are here."""
    fsdp.barrier()
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")
