"""What would make replicas differ in silence is found, on all ranks at once: hyper-parameters, parameters, buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import co2
import dear
from overlap.transport.communicator import Communicator, Work
from overlap.transport.objects import SignatureMismatch
from tests.spmd.models import double_model
from tests.spmd.strategies import PACKAGES, WRAP
from tests.spmd.training import local_loss, same_everywhere
from tests.spmd_plugin import SIZE

several = pytest.mark.skipif(SIZE == 1, reason="one rank cannot differ from itself")


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "momentum": 0.5}]
    return torch.optim.SGD(groups, 0.05, momentum=0.9)


def _backward(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    local_loss(model, step).backward()


# - Hyper-parameters


@several
@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_rate_that_one_rank_alone_changes_is_found_before_it_counts(strategy: str) -> None:
    """On all ranks, with both values. Put right, the same step goes on, and training is what it would have been."""
    trained, last = [], dear.size() - 1
    for mistaken in (False, True):
        model = double_model("Mlp")
        optimizer = WRAP[strategy](_sgd(model.parameters()), model)
        for step in range(5):
            _backward(model, optimizer, step)
            if mistaken and step in (0, 3):
                optimizer.param_groups[1]["momentum"] = 0.75 if dear.rank() == last else 0.5
                with pytest.raises(SignatureMismatch, match=rf"'momentum' of .* group 1 is .* 0\.75 on rank {last}"):
                    optimizer.step()
                optimizer.param_groups[1]["momentum"] = 0.5
            optimizer.step()
        optimizer.synchronize()
        trained.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *trained))


@several
def test_early_updates_are_compared_too() -> None:
    model = double_model("Mlp")
    optimizer = WRAP["dear-eager"](_sgd(model.parameters()), model)
    for step in range(3):
        _backward(model, optimizer, step)
        optimizer.step()
    optimizer.param_groups[0]["lr"] += dear.rank()
    _backward(model, optimizer, 3)
    with pytest.raises(SignatureMismatch, match=r"'lr' of parameter group 0 is 0\.05 on rank 0 and 1\.05 on rank 1"):
        optimizer.step()
    optimizer._engine.transit.pending.clear()  # a later fork would wait for what only one rank has sent


@several
@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_scheduler_of_one_rank_is_found_also_where_another_had_no_batch(strategy: str) -> None:
    model = double_model("Mlp")
    optimizer = WRAP[strategy](_sgd(model.parameters()), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    _backward(model, optimizer, 0)
    optimizer.step()
    optimizer.zero_grad()
    if dear.rank() == 0:
        scheduler.step()
    else:
        local_loss(model, 1).backward()
    with pytest.raises(SignatureMismatch, match=r"'lr' of parameter group 0 is 0\.005.* on rank 0 and 0\.05 on rank"):
        optimizer.step()


@several
def test_a_closure_is_not_evaluated_by_ranks_with_different_rates() -> None:
    model = double_model("Mlp")
    optimizer = dear.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), 0.1), model)
    optimizer.param_groups[0]["lr"] = 0.1 + dear.rank()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = local_loss(model)
        loss.backward()
        return loss

    with pytest.raises(SignatureMismatch, match=r"'lr' of parameter group 0 is 0\.1 on rank 0 and 1\.1 on rank 1"):
        optimizer.step(closure)


@pytest.mark.parametrize("strategy", [*PACKAGES, "dear-eager"])
def test_what_all_ranks_change_alike_is_no_difference(strategy: str) -> None:
    """A tensor that changes where it is, a schedule, and what a script keeps in a group for itself."""
    model = double_model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), torch.tensor(0.05)), model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    optimizer.param_groups[0]["my rank"] = dear.rank()
    for step in range(4):
        _backward(model, optimizer, step)
        optimizer.step()
        scheduler.step()
    optimizer.synchronize()
    for parameter in model.parameters():
        same_everywhere(parameter.detach())


@several
@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_rank_that_has_joined_steps_with_the_others_rates(strategy: str) -> None:
    model = double_model("Mlp")
    optimizer = WRAP[strategy](_sgd(model.parameters()), model)
    for step in range(2 if dear.rank() == 0 else 5):
        _backward(model, optimizer, step)
        optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)
        optimizer.step()
    dear.join()
    for parameter in model.parameters():
        same_everywhere(parameter.detach())


@several
def test_ranks_of_co2_that_train_apart_are_not_compared() -> None:
    model = double_model("Mlp")
    optimizer = co2.DistributedOptimizer(_sgd(model.parameters()), model, outer_frequency=2, nprocs_per_node=1)
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + dear.rank())
    for step in range(3):
        _backward(model, optimizer, step)
        optimizer.step()
    optimizer.average_parameters()
    for parameter in model.parameters():
        same_everywhere(parameter.detach())


# - Parameters and buffers


@several
@pytest.mark.parametrize("strategy", [*PACKAGES, "dear-eager"])
def test_a_parameter_that_one_rank_alone_has_changed_is_named(strategy: str) -> None:
    """By the smallest change there is, in a frozen one, too; while new values are on their way, and between two steps."""
    model, last = double_model("Mlp"), dear.size() - 1
    names = [name for name, _ in model.named_parameters()]
    model.get_parameter(names[0]).requires_grad_(False)
    optimizer = WRAP[strategy](torch.optim.SGD(list(model.parameters())[1:], 0.05, momentum=0.9), model)
    for step, name in enumerate((names[0], names[2])):
        _backward(model, optimizer, step)
        optimizer.step()
        dear.check_replicas(model)
        optimizer.synchronize()
        parameter = model.get_parameter(name)
        kept = parameter.detach().clone()
        if dear.rank() == last:
            parameter.data.view(-1)[0] = torch.nextafter(parameter.data.view(-1)[0], torch.tensor(torch.inf).double())
        with pytest.raises(
            SignatureMismatch, match=f"parameter {name!r} differs between ranks: .*rank {last} .*different"
        ):
            dear.check_replicas(model)
        parameter.data.copy_(kept)
        dear.check_replicas(model)


@several
@pytest.mark.parametrize("strategy", [*PACKAGES, "dear-eager"])
def test_check_every_compares_in_steps_and_sends_nothing(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, last = double_model("Mlp"), dear.size() - 1
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model, check_every=2)
    name = [name for name, _ in model.named_parameters()][1]
    operations: list[list[str]] = [[] for _ in range(4)]

    def hear(_comm: Communicator, work: Work) -> Work:
        operations[step].append(f"{work.op} {work.label}")
        return work

    monkeypatch.setattr(Communicator, "listener", hear)
    for step in range(4):
        _backward(model, optimizer, step)
        optimizer.step()
        optimizer.synchronize()
    monkeypatch.setattr(Communicator, "listener", None)
    assert sorted(operations[2]) == sorted(operations[3])  # the third step compares, and the fourth does not
    optimizer.synchronize()
    if dear.rank() == last:
        model.get_parameter(name).data.neg_()
    optimizer.zero_grad()
    local_loss(model, 4).backward()
    with pytest.raises(SignatureMismatch, match=f"parameter {name!r} differs between ranks: .*rank {last} "):
        optimizer.step()


@several
def test_a_rank_without_a_batch_is_compared_too() -> None:
    """Under early updates the others are compared before the first one."""
    for strategy in ("dear", "dear-eager"):
        model = double_model("Mlp")
        optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model, check_every=1)
        for step in range(4):
            optimizer.zero_grad()
            if step == 0 or dear.rank() != step % dear.size():
                local_loss(model, step).backward()
            optimizer.step()


@several
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_compared_where_every_step_makes_them_the_same(broadcast: bool) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.BatchNorm1d(4)).double()
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model, broadcast_buffers=broadcast)
    for step in range(2):
        _backward(model, optimizer, step)
        optimizer.step()
    dear.check_replicas(model)
    model[1].running_var += dear.rank()
    if not broadcast:
        dear.check_replicas(model)
        return
    with pytest.raises(SignatureMismatch, match=r"buffer '1\.running_var' differs between ranks"):
        dear.check_replicas(model)


@several
def test_a_model_that_no_distributed_optimizer_has_is_compared_whole() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.BatchNorm1d(4)).to(torch.bfloat16)
    dear.check_replicas(model)
    model[1].running_mean += dear.rank()
    with pytest.raises(SignatureMismatch, match=r"buffer '1\.running_mean' differs between ranks"):
        dear.check_replicas(model)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module and was given generator"):
        dear.check_replicas(model.parameters())  # type: ignore[arg-type]


@several
@pytest.mark.parametrize("outer", ["co2", "localsgd"])
def test_replicas_of_co2_differ_between_averages(outer: str) -> None:
    model = double_model("Mlp")
    optimizer = co2.DistributedOptimizer(
        _sgd(model.parameters()), model, outer=outer, outer_frequency=8, nprocs_per_node=1
    )
    for step in range(2):
        _backward(model, optimizer, step)
        optimizer.step()
    with pytest.raises(SignatureMismatch, match=r"with co2 replicas differ between averages: call average_parameters"):
        co2.check_replicas(model)
    optimizer.average_parameters()
    co2.check_replicas(model)
    with pytest.raises(ValueError, match=r"check_every=5 compares ranks in step.*replicas differ between averages"):
        co2.DistributedOptimizer(_sgd(model.parameters()), model, check_every=5)
