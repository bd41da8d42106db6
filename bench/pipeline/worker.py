"""One rank of ``python -m bench.pipeline``: pipelines whose stages sleep instead of computing, block by block in turn."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import dear
import pipe
from bench.methods import process_group

__all__ = ["main"]

_WIDTH = 256  # of what goes from stage to stage
_RECORDED = 4  # steps in a timeline


class _Computation:
    """Sleeps for as long as is asked, in sum: by what one sleep is too long, the next one is shorter."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """That it has slept so far."""
        self._late = 0.0

    def take(self, seconds: float) -> None:
        since = time.perf_counter()
        time.sleep(max(0.0, seconds - self._late))
        took = time.perf_counter() - since
        self._late += took - seconds
        self.seconds += took


_computation = _Computation()


class _Sleep(torch.autograd.Function):
    """A layer's computation: so many seconds in forward, and twice as many in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.shape = seconds, weight.shape
        _computation.take(seconds)
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        _computation.take(2 * ctx.seconds)
        return gradient, gradient.new_zeros(ctx.shape), None


class _Layer(torch.nn.Module):
    """A weight of so many elements, that is used for so many seconds."""

    def __init__(self, elements: int, seconds: float) -> None:
        super().__init__()
        self.weight, self._seconds = torch.nn.Parameter(torch.zeros(elements)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Sleep.apply(x, self.weight, self._seconds)
        return found


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _model(told: dict[str, Any]) -> torch.nn.Sequential:
    elements = int(told["mb"] * 2**20 / 4 / told["layers"])
    seconds = told["ms"] / 1e3 / told["layers"] / 3
    return torch.nn.Sequential(*(_Layer(elements, seconds) for _ in range(told["stages"] * told["layers"])))


def _ours(told: dict[str, Any], mesh: Any) -> Callable[[torch.Tensor], None]:
    balance = [told["layers"]] * told["stages"]
    model = pipe.Pipe(_model(told), balance, mesh=mesh, chunks=told["chunks"], schedule=told["schedule"], loss=_loss)
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, process_set=mesh.group("data")
    )

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model.step(x, target=x)
        optimizer.step()

    return step


def _torchs(told: dict[str, Any], mesh: Any, backend: str = "gloo") -> Callable[[torch.Tensor], None]:
    beside, along = process_group.grid(torch.device("cpu"), backend, told["data"])
    number = mesh.coordinate["pipeline"]
    layers = told["layers"]
    stage_module: torch.nn.Module = _model(told)[number * layers : (number + 1) * layers]
    if told["data"] > 1:
        stage_module = DistributedDataParallel(stage_module, process_group=beside, bucket_cap_mb=told["bucket_mb"])
    stage = PipelineStage(stage_module, number, told["stages"], torch.device("cpu"), group=along)
    kind: Any = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[told["schedule"]]
    schedule = kind(stage, told["chunks"], loss_fn=lambda o, t: _loss(o, t) / told["chunks"], scale_grads=False)
    optimizer = torch.optim.SGD(stage_module.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        options = {"target": x, "losses": losses} if number + 1 == told["stages"] else {}
        schedule.step(*((x,) if number == 0 else ()), **options)
        optimizer.step()

    return step


def main(argv: list[str]) -> None:
    """Train; `argv`: a file for what was measured, and its settings as JSON."""
    output, told = Path(argv[0]), json.loads(argv[1])
    torch.set_num_threads(1)
    dear.init()
    mesh = dear.Mesh(data=told["data"], pipeline=told["stages"])
    over_dear = functools.partial(_torchs, backend="dear")
    makers: dict[str, Callable[..., Callable[[torch.Tensor], None]]] = {
        "dear": _ours,
        "ddp": _torchs,
        "ddp-over-dear": over_dear,
    }
    steps = {name: makers[name](told, mesh) for name in told["methods"]}
    x = torch.randn(told["rows"] * told["chunks"], _WIDTH)
    for step in steps.values():
        for _ in range(told["warm_up"]):
            step(x)
    if told["timeline"] is not None:
        dear.start_timeline(told["timeline"])
        for _ in range(_RECORDED):
            steps["dear"](x)
        dear.stop_timeline()
    found: dict[str, list[float]] = {name: [] for name in steps}
    computed = _computation.seconds
    for number in range(told["blocks"]):
        names = list(steps) if number % 2 else list(reversed(steps))
        for name in names:
            dist.barrier()
            since = time.perf_counter()
            for _ in range(told["steps"]):
                steps[name](x)
            dist.barrier()
            found[name].append((time.perf_counter() - since) / told["steps"])
    timed = told["blocks"] * told["steps"] * len(steps)
    computing = dear.allreduce(torch.tensor((_computation.seconds - computed) / timed, dtype=torch.float64)).item()
    if dear.rank() == 0:
        output.write_text(json.dumps({"computing": computing, "seconds": found}))
    dear.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
