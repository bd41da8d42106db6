"""torch.distributed.pipelining: every schedule learns what one process learns, time after time, without a hang."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tests.backend.training import close
from tests.backend.world import SEVERAL, group_of
from tests.spmd_plugin import RANK, SIZE

pytestmark = [
    SEVERAL,
    pytest.mark.skipif("2.9" <= torch.__version__ < "2.10", reason="stages of torch 2.9 abort over gloo, too"),
]
CHUNKS, ROWS, WIDTH = 8, 16, 6
RUNS = 300


def _layers(count: int, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count))).double()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean() / CHUNKS


def _batch(seed: int, width: int = WIDTH, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, width, generator=chosen, dtype=torch.float64) for _ in range(2))
    return x, y


def _step(schedule: Any, stages: list[PipelineStage], batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    first, last = (any(stage.is_first for stage in stages), any(stage.is_last for stage in stages))
    schedule.step(*((batch[0],) if first else ()), **({"target": batch[1], "losses": []} if last else {}))


def _made(schedule: Any, stages: Any) -> Any:
    """Newer versions of torch divide gradients by the number of micro-batches, unless they are told."""
    told = {"scale_grads": False} if "scale_grads" in inspect.signature(schedule).parameters else {}
    return schedule(stages, CHUNKS, loss_fn=_loss, **told)


def _stage(module: Any, number: int, count: int, group: Any, rows: int) -> PipelineStage:
    """Before torch 2.6, a stage asks for an example of what it is given."""
    asks = inspect.signature(PipelineStage).parameters["input_args"].default is inspect.Parameter.empty
    example = torch.empty(rows // CHUNKS, module[0][0].in_features, dtype=torch.float64)
    told = {"input_args": (example,)} if asks else {}
    return PipelineStage(module, number, count, torch.device("cpu"), group=group, **told)


def _schedule(
    kind: str, model: nn.Sequential, group: Any, rows: int = ROWS
) -> tuple[Any, list[PipelineStage], nn.ModuleList]:
    """The schedule, this rank's stages and their modules; with interleaving, a rank has two."""
    numbers = [RANK, RANK + SIZE] if kind == "interleaved" else [RANK]
    count = len(numbers) * SIZE
    per = len(model) // count
    modules = nn.ModuleList(model[number * per : (number + 1) * per] for number in numbers)
    stages = [_stage(m, n, count, group, rows) for m, n in zip(modules, numbers, strict=True)]
    if kind == "interleaved":
        return _made(ScheduleInterleaved1F1B, stages), stages, modules
    return _made({"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind], stages[0]), stages, modules


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_what_one_process_learns(kind: str) -> None:
    with group_of() as group:
        model = _layers(2 * SIZE)
        whole = _layers(2 * SIZE)
        schedule, stages, modules = _schedule(kind, model, group)
        optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (modules, whole))
        for step in range(3):
            batch = _batch(step)
            for each in (optimizer, other):
                each.zero_grad()
            _step(schedule, stages, batch)
            (CHUNKS * _loss(whole(batch[0]), batch[1])).backward()
            for each in (optimizer, other):
                each.step()
        numbers = [stage.stage_index for stage in stages]
        per = len(whole) // (len(numbers) * SIZE)
        expected = nn.ModuleList(whole[number * per : (number + 1) * per] for number in numbers)
        close([p.detach() for p in modules.parameters()], [p.detach() for p in expected.parameters()])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_many_runs(kind: str) -> None:
    """Of messages that a socket takes at once, and of others that it does not."""
    with group_of() as group:
        for width, rows, runs in ((WIDTH, ROWS, RUNS - 30), (2048, 128, 30)):
            model = _layers(SIZE, width)
            schedule, stages, modules = _schedule(kind, model, group, rows)
            for run in range(runs):
                _step(schedule, stages, _batch(run, width, rows))
            assert all(parameter.grad is not None for parameter in modules.parameters())
