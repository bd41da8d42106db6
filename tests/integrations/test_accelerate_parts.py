"""Parts of dear's Accelerator by themselves: what it refuses, what it notes, and what it hands to checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs

import dear
from dear.integrations import accelerate as module
from dear.integrations.accelerate import Accelerator, DearOptimizer, refuse_other_ways


@pytest.fixture
def _alone() -> Iterator[None]:
    dear.init()
    yield
    dear.shutdown()


class _Accelerator:
    """What Accelerate has found in a process that it takes for number `index` of `size`."""

    distributed_type = None
    ddp_handler: Any = None

    def __init__(self, index: int = 0, size: int = 1, **given: Any) -> None:
        self.process_index, self.num_processes = index, size
        self.gradient_state = SimpleNamespace(plugin_kwargs=given)


@pytest.mark.usefixtures("_alone")
def test_dears_own_option_wins_over_that_of_ddp() -> None:
    for mine, expected in (({}, False), ({"broadcast_buffers": True}, True)):
        accelerator: Any = _Accelerator()
        accelerator.ddp_handler = DistributedDataParallelKwargs(broadcast_buffers=False)
        module._take_charge(accelerator, mine)
        assert accelerator._dear_options == {"broadcast_buffers": expected}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("accelerator", "message"),
    [
        (_Accelerator(0, 2), "number 0 of 2, and dear number 0 of 1"),
        (_Accelerator(sync_each_batch=True), "reduces gradients in every pass"),
    ],
)
def test_another_job_and_another_rhythm_are_refused(accelerator: Any, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        module._take_charge(accelerator, {})


@pytest.mark.parametrize(
    ("given", "variables", "message"),
    [
        ({}, {}, ""),
        ({"fsdp_plugin": None, "parallelism_config": None}, {"ACCELERATE_USE_FSDP": "false"}, ""),
        ({"parallelism_config": SimpleNamespace(tp_size=1, dp_replicate_size=2)}, {}, ""),
        ({"torch_tp_plugin": object()}, {}, "tensor parallelism"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "True"}, "DeepSpeed"),
        ({"parallelism_config": SimpleNamespace(cp_size=2)}, {}, "cp_size=2"),
        ({"parallelism_config": SimpleNamespace(dp_shard_size=2)}, {}, "dp_shard_size=2"),
    ],
)
def test_other_ways_to_train_are_refused(
    given: dict[str, Any], variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not message:
        refuse_other_ways(given)
    else:
        with pytest.raises(ValueError, match=rf"{message}.* and dear both decide"):
            refuse_other_ways(given)


def test_tied_tensors_stay_tied_in_a_checkpoint_and_others_get_a_memory_of_their_own() -> None:
    bucket = torch.arange(6.0)
    state: dict[str, Any] = {"weight": bucket[:2], "tied": bucket[:2], "bias": bucket[2:], "steps": 3}
    apart = module._apart(state)
    assert apart["weight"] is apart["tied"]
    assert [apart[name].tolist() for name in ("weight", "bias")] == [[0.0, 1.0], [2.0, 3.0, 4.0, 5.0]]
    assert [apart[name].untyped_storage().nbytes() for name in ("weight", "bias")] == [8, 16]
    assert apart["steps"] == 3
    assert state["weight"].untyped_storage().nbytes() == 24, "it is a copy"


@pytest.mark.parametrize(("found", "stepped"), [(None, True), (0.0, True), (1.0, False)])
def test_a_step_counts_unless_some_rank_has_found_an_infinity(found: float | None, stepped: bool) -> None:
    """Schedulers go on with steps that were made; a scaler always calls step(), which averages what was found."""
    wrapper: Any = DearOptimizer.__new__(DearOptimizer)
    wrapper.optimizer = SimpleNamespace(**({} if found is None else {"found_inf": torch.tensor(found)}))
    assert wrapper._noting(lambda: "result")() == "result"
    assert wrapper._accelerate_step_called is stepped


def test_optimizers_of_another_model_are_not_held_back() -> None:
    held_back: list[str] = []

    class Optimizer:
        def __init__(self, name: str, model: torch.nn.Module) -> None:
            self.name, self.model, self.optimizer = name, model, self

        def trains(self, model: torch.nn.Module) -> bool:
            return model is self.model

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            held_back.append(self.name)
            yield

    mine, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    accelerator: Any = Accelerator.__new__(Accelerator)
    accelerator._optimizers = [Optimizer("mine", mine), Optimizer("another one", other)]
    with accelerator.no_sync(mine):
        assert held_back == ["mine"]
