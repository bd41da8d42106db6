"""Steps of optimizers that may look at the loss and evaluate a closure repeatedly: LBFGS, and unknown types.

They are given the averaged loss, so all ranks decide alike.
"""

from __future__ import annotations

from typing import Any

import torch

from overlap.core.step import Closure, Stepper, hyper_parameters
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.operation import all_reduce

__all__ = ["step_by_loss"]


def step_by_loss(stepper: Stepper, closure: Closure) -> Any:
    """One step of `stepper`'s optimizer, with averaged gradients and losses. On every rank."""
    engine, averages, first = stepper.engine, stepper.averages, True
    # The optimizer may use gradients from before it calls the closure.
    if stepper.any_rank(engine.accumulating or any(slot.fires for slot in engine.slots)):
        averages.synchronize()

    def evaluate() -> Any:
        nonlocal first
        with torch.enable_grad():
            loss = closure()
        engine.close("step(closure)", steps=True)
        stepper.settle_whole()
        participants = engine.participants
        if first and participants.absent:  # whose steps will evaluate as often as this one
            groups = hyper_parameters(stepper.optimizer)
            like = torch.zeros_like(loss) if isinstance(loss, torch.Tensor) else None
            participants.announce("closure", groups=groups, loss=like)
        first = False
        factor = participants.factor(participants.round)
        stepper.take_whole()
        return _average(averages.comm, loss, factor)

    with stepper.updating():
        return stepper.update(stepper.optimizer, evaluate)


def _average(comm: Communicator, loss: Any, factor: float) -> Any:
    plain = (
        loss.detach()
        if isinstance(loss, torch.Tensor)
        else torch.tensor(float(loss), dtype=torch.float64, device="cpu")
    )
    mean = plain.clone().contiguous()
    comm.run(all_reduce(mean, mean, ReduceOp.AVG, label="loss"))
    if factor != 1:
        mean *= factor
    return mean if isinstance(loss, torch.Tensor) else float(mean)
