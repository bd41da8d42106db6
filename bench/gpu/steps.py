"""What hooks and the host add to a step of one rank: ``python -m bench.gpu.steps resnet50 --json resnet50.json``.

The same model trains alone, with dear, with wfbp and with DDP, one after the other, and nothing travels. `step_ms` is a
step among others, by the device's clock; `issue_ms` is what the host takes for a step that begins with an idle device:
where it is the larger one, the device waits for Python.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bench.gpu.streams import read, streams_of
from bench.methods.ddp import Ddp
from bench.methods.method import MakeOptimizer, Method
from bench.methods.single import Single
from bench.models.catalog import MODELS, Workload, workload
from bench.program import at_least
from bench.train.stepping import Clock, step, warm_up

__all__ = ["METHODS", "main", "measure"]

#: DDP is the last: it leaves the variables of a launcher behind.
METHODS = ("none", "dear", "wfbp", "ddp")
_WARMUP = 10
_ISSUED = 5
_PROFILED = 2
_ROWS = 25


def _method(name: str) -> Method:
    if name in ("none", "ddp"):  # they run without comm_core, too
        return Single({}) if name == "none" else Ddp({})
    from bench.methods.registry import method

    return method(name)


def _optimizer(chosen: Workload) -> MakeOptimizer:
    if chosen.unit == "img":
        return torch.optim.SGD, {"lr": chosen.learning_rate, "momentum": 0.9}
    return torch.optim.AdamW, {"lr": chosen.learning_rate}


def _one(
    method: Method, chosen: Workload, device: torch.device, batch_size: int, size: int, steps: int, trace: Path | None
) -> dict[str, float]:
    """Between joining and leaving."""
    torch.manual_seed(1)
    model, optimizer = method.distribute(chosen.build().to(device), _optimizer(chosen))
    batch = tuple(part.to(device) for part in chosen.batch(batch_size, size, torch.Generator().manual_seed(1)))
    on_gpu = device.type == "cuda"

    def once(clock: Clock) -> None:
        step(model, optimizer, lambda network: chosen.loss(network, batch), clock)

    warm_up(_WARMUP, lambda: method.tuning(optimizer), lambda: once(Clock(device)))
    clock, idle = Clock(device), Clock(device)
    clock.settled()
    for _ in range(steps):
        once(clock)
    clock.settled()
    issued = []
    for _ in range(_ISSUED):
        began = idle.settled()
        once(idle)
        issued.append(time.perf_counter() - began)
    idle.settled()
    phases = clock.medians()
    seconds = {
        "step": statistics.median(clock.steps),
        "issue": statistics.median(issued),
        "forward": phases["forward"],
        "backward": phases["backward"],
        "update": phases["step"],
    }
    found = {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
    if on_gpu:
        found["peak_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
    _profile(lambda: once(idle), idle, on_gpu, trace)
    method.settle(optimizer)
    return found


def _profile(once: Callable[[], None], clock: Clock, on_gpu: bool, trace: Path | None) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(_PROFILED):
            once()
        clock.settled()
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS, max_name_column_width=48))
    if trace is not None:
        seen.export_chrome_trace(str(trace))
        for stream in streams_of(read(str(trace))):
            print(f"stream {stream.number}: {stream.operations} operations, {stream.busy_ms:.2f} ms, {stream.examples}")


def measure(
    model: str, device: torch.device, batch_size: int | None, size: int | None, steps: int, trace: Path | None
) -> Iterator[dict[str, Any]]:
    """A row for each method; a method that fails has its `error` in it, and the next one follows.

    `trace` is written of dear.
    """
    chosen = workload(model)
    for name in METHODS:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        method = None
        try:
            method = _method(name)
            method.join(device)
            found = _one(
                method,
                chosen,
                device,
                batch_size or chosen.batch_size,
                size or chosen.size,
                steps,
                trace if name == "dear" else None,
            )
            method.leave()
            yield {"method": name, **found}
        except Exception as error:
            traceback.print_exc()
            if method is not None:
                with suppress(Exception):
                    method.leave()
            yield {"method": name, "error": f"{type(error).__name__}: {error}"}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    """0 where every method was measured, 1 where one failed; 2 where there is no such device."""
    parser = argparse.ArgumentParser(prog="bench.gpu.steps", description=__doc__)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=at_least(1))
    parser.add_argument("--size", type=at_least(1), help="edge of a picture, or words of a sentence")
    parser.add_argument("--steps", type=at_least(1), default=20)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="of two steps of dear")
    parser.add_argument("--json", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench.gpu.steps: no GPU: PyTorch sees no CUDA device", file=sys.stderr)
        return 2
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    about = {
        "model": chosen.model,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    rows = []
    for row in measure(chosen.model, device, chosen.batch_size, chosen.size, chosen.steps, chosen.trace):
        rows.append(row)
        print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
        chosen.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
