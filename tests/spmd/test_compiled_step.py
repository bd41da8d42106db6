"""``torch.compile`` around ``optimizer.step()``, as in torch's recipe; the step itself is called as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dear
import oss
from tests.spmd.one_process import SGD, as_in_one_process, loss_of, small_model, train
from tests.spmd.strategies import WRAP
from tests.spmd_plugin import SIZE


@pytest.fixture(autouse=True)
def _compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("zeroes", [False, True])
@pytest.mark.parametrize("way", WRAP)
def test_a_compiled_function_may_step(way: str, zeroes: bool) -> None:
    """With a scheduler, as torch's own recipe has one; and where it zeroes gradients, too."""

    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def update() -> None:
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()

        call = update if alone else torch.compile(update, backend="eager")
        for step in range(4):
            if not zeroes:
                optimizer.zero_grad()
            loss_of(model, step, alone).backward()
            call()
            scheduler.step()

    as_in_one_process(way, script)


@pytest.mark.skipif(SIZE == 1, reason="OSS works over torch.distributed")
def test_a_compiled_function_may_step_an_oss() -> None:
    reference, model = small_model(), small_model()
    train(reference, SGD(reference.parameters(), 0.1), True, steps=3)
    optimizer = oss.OSS(model.parameters(), SGD, lr=0.1)
    sharded = oss.ShardedDataParallel(model, optimizer)
    call = torch.compile(lambda: optimizer.step(), backend="eager")
    for step in range(3):
        sharded.zero_grad()
        loss_of(sharded, step, False).backward()
        call()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_whole_graph_cannot_have_it_and_says_why() -> None:
    model = small_model()
    optimizer = dear.DistributedOptimizer(SGD(model.parameters(), 0.1), model)
    loss_of(model, 0, False).backward()
    call = torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"ranks communicate in it|disable"):
        call()
    optimizer.step()


@pytest.mark.skipif(SIZE == 1, reason="such optimizers work over torch.distributed")
@pytest.mark.parametrize("way", ["dear", "wfbp", "bytescheduler", "oss"])
def test_an_optimizer_that_splits_parameters_itself_is_to_be_left_out(way: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = small_model()
    for name, optimizer in (
        ("ZeroRedundancyOptimizer", ZeroRedundancyOptimizer(model.parameters(), optimizer_class=SGD, lr=0.1)),
        ("OSS", oss.OSS(model.parameters(), SGD, lr=0.1)),
    ):
        with pytest.raises(TypeError, match=f"leave {name} out, and hand over the optimizer"):
            WRAP[way](optimizer, model)
