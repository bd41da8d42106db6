"""What is stamped around the layers of a model, and that nothing of it is left behind."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from overlap.optimizer import layer_times
from overlap.optimizer.layer_times import LayerTimes, ProfileWriter, durations


def _hooks(model: nn.Module) -> int:
    parts = [part for module in model.modules() for part in (module._forward_hooks, module._forward_pre_hooks)]
    gradients = [parameter._post_accumulate_grad_hooks or () for parameter in model.parameters()]
    return sum(map(len, [*parts, *gradients]))


def test_no_hook_is_left_once_a_profile_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    writer = ProfileWriter(model, tmp_path / "mine.json", 1, 1)
    writer.handle = optimizer.register_step_post_hook(writer)
    assert _hooks(model) > 0
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert (tmp_path / "mine.json").exists()
    assert _hooks(model) == 0
    assert not optimizer._optimizer_step_post_hooks


def test_of_several_passes_in_a_step_the_last_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(layer_times, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    times = LayerTimes(model)
    model(torch.ones(1, 2)).sum().backward()
    between = next(clock)
    model(torch.ones(1, 2)).sum().backward()
    lap = times.lap()
    assert set(lap) == {"entered", "begun", "ended", "gradient"}
    assert all(stamp > between for stamps in lap.values() for stamp in stamps.values())


def test_a_weight_that_two_layers_share_counts_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert LayerTimes(model).tensors == {"0": (16, 8), "1": (8,)}


def test_what_a_checkpoint_recomputes_is_no_forward_pass() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    times = LayerTimes(model)
    inner = torch.utils.checkpoint.checkpoint(model, torch.ones(2, 4), use_reentrant=False)
    inner.sum().backward()
    lap = times.lap()
    assert max(lap["entered"].values()) < min(lap["gradient"].values())
    assert set(durations([lap])) == {"0", "1"}


def test_the_clock_stands_still_while_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a plan takes the network for computation, and nothing that it could send less of helps."""
    now, waited = [0.0], [0.0]
    monkeypatch.setattr(layer_times, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    times = LayerTimes(model, lambda: waited[0])

    def pass_by(seconds: float, *, waits: bool) -> None:
        now[0] += seconds
        waited[0] += seconds if waits else 0.0

    model[1].register_full_backward_pre_hook(lambda *_: pass_by(100.0, waits=True))
    model[0].register_full_backward_pre_hook(lambda *_: pass_by(3.0, waits=False))
    model(torch.ones(1, 2)).sum().backward()
    found = durations([times.lap()])
    assert found["1"][1] == 0.0
    assert found["0"][1] == pytest.approx(3.0)
