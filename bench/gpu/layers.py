"""Forward and backward times of a model's layers on a device, as a profile for the emulated accelerator.

``python -m bench.gpu.layers resnet50 --dtype bfloat16 --json resnet50-bfloat16.json``. A layer is a module that owns
parameters, and what follows it until the next one starts; its backward lasts from the gradient of its output to the next
layer's. Several uses of one module in a step add up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.emulation.accelerator import gradient_bytes, owners
from bench.models.catalog import MODELS, workload
from bench.program import at_least
from overlap.plan.simulation.profile import Profile, to_text
from overlap.plan.simulation.workload import Layer

__all__ = ["main", "measure"]

_WARMUP = 3
_CYCLES = 2e9  # of a card in a second, about


class _Mark(Protocol):
    def since(self, other: Any) -> float: ...


class _CudaMark:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def since(self, other: _CudaMark) -> float:
        return float(other.event.elapsed_time(self.event))


class _CpuMark:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def since(self, other: _CpuMark) -> float:
        return 1e3 * (self.at - other.at)


def _at_gradient(output: Any, call: Callable[[], None]) -> None:
    """Have `call` made when backward reaches a module's `output`; in place changes that follow do not matter."""
    first = output if isinstance(output, torch.Tensor) else next(t for t in output if isinstance(t, torch.Tensor))
    if first.requires_grad:
        first.register_hook(lambda _gradient: call())


def _spans(marks: list[tuple[str, _Mark]], end: _Mark) -> dict[str, float]:
    """Milliseconds from each mark to the next, added up by name."""
    spent: dict[str, float] = defaultdict(float)
    following = [mark for _, mark in marks[1:]] + [end]
    for (name, mark), later in zip(marks, following, strict=True):
        spent[name] += later.since(mark)
    return spent


def measure(
    model_name: str, device: torch.device, dtype: torch.dtype, batch_size: int, size: int, repeat: int
) -> Profile:
    """The profile of a model at a batch size; medians of `repeat` steps. bfloat16 is by autocast, parameters stay fp32."""
    chosen = workload(model_name)
    model = chosen.build().to(device)
    batch = tuple(part.to(device) for part in chosen.batch(batch_size, size, torch.Generator().manual_seed(1)))
    names, sizes = [name for name, _, _ in owners(model)], gradient_bytes(model)
    on_gpu = device.type == "cuda"
    mark: Any = _CudaMark if on_gpu else _CpuMark
    forward: list[tuple[str, _Mark]] = []
    backward: list[tuple[str, _Mark]] = []

    def watch(name: str) -> None:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _module, _inputs: forward.append((name, mark())))
        module.register_forward_hook(
            lambda _module, _inputs, output: _at_gradient(output, lambda: backward.append((name, mark())))
        )

    for name in names:
        watch(name)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    launching = 0.0  # seconds that the host takes to launch a step
    for step in range(_WARMUP + repeat):
        forward.clear()
        backward.clear()
        if on_gpu and step >= _WARMUP:  # the card begins when all is launched: a layer's time is not that of launches
            torch.cuda._sleep(int(1.5 * launching * _CYCLES))
        begun = time.perf_counter()
        cast: AbstractContextManager[object] = (
            torch.autocast(device.type, dtype=dtype) if dtype is not torch.float32 else nullcontext()
        )
        with cast:
            loss = chosen.loss(model, batch)
        middle = mark()
        loss.backward()
        end = mark()
        if step < _WARMUP:
            launching = time.perf_counter() - begun
        model.zero_grad()
        if on_gpu:
            torch.cuda.synchronize(device)
        if step >= _WARMUP:
            ahead, back = _spans(forward, middle), _spans(backward, end)
            for name in names:
                found[name][0].append(ahead.get(name, 0.0))
                found[name][1].append(back.get(name, 0.0))
    card = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    source = (
        f"measured on {card}, torch {torch.__version__}, {dtype}, inputs of size {size}, median of {repeat} steps "
        "(python -m bench.gpu.layers)"
    )
    layers = tuple(
        Layer(name, statistics.median(ahead) / 1e3, statistics.median(back) / 1e3, sizes[name])
        for name, (ahead, back) in found.items()
    )
    return Profile(model_name, "".join(card.lower().split()), batch_size, source, layers)


def main(arguments: list[str] | None = None) -> int:
    """Write the profile; returns 2 where there is no such device."""
    parser = argparse.ArgumentParser(prog="bench.gpu.layers", description=__doc__)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=at_least(1))
    parser.add_argument(
        "--size", type=at_least(1), help="edge of a picture, or words of a sentence (default: the model's own)"
    )
    parser.add_argument("--repeat", type=at_least(1), default=20)
    parser.add_argument("--json", type=Path, required=True, help="file for the profile")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench.gpu.layers: no GPU: PyTorch sees no CUDA device", file=sys.stderr)
        return 2
    about = workload(chosen.model)
    size, batch_size = chosen.size or about.size, chosen.batch_size or about.batch_size
    profile = measure(chosen.model, device, getattr(torch, chosen.dtype), batch_size, size, chosen.repeat)
    chosen.json.write_text(to_text(profile))
    print(f"{chosen.json}: {1e3 * profile.seconds:.2f} ms a step, {len(profile.layers)} layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
