"""Streaming DiLoCo is equal to a simulation of all workers in one process, bit for bit, at any number of ranks."""

from __future__ import annotations

import pytest
import torch

import co2
from tests.spmd.co2_simulated_rules import STREAMING, STREAMING_CASES, streaming_simulation
from tests.spmd.co2_training import (
    adamw,
    assert_equal,
    assert_same,
    equal_everywhere,
    loss_of,
    momentum_sgd,
    small_model,
    train_steps,
    while_rank_0_stands_still,
    wrapped,
)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("case", list(STREAMING_CASES))
def test_equals_its_equations_on_one_process_bit_for_bit(case: str, bits: int | None) -> None:
    make = adamw if case == "hidden" else momentum_sgd
    model, optimizer = wrapped(make, **STREAMING, **STREAMING_CASES[case], bits=bits)
    simulation = streaming_simulation(make, bits, STREAMING_CASES[case])
    for step in range(14):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        assert_equal(model, simulation.workers[co2.rank()][0])
    assert co2.size() == 1 or not equal_everywhere(model)


@pytest.mark.parametrize("after", [5, 6, 7])
def test_an_average_takes_what_is_on_its_way_along(after: int) -> None:
    """5: before it is applied."""
    case = STREAMING_CASES["two fragments"]
    model, optimizer = wrapped(**STREAMING, **case, bits=4)
    simulation = streaming_simulation(momentum_sgd, 4, case)
    for step in range(14):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        if step + 1 == after:
            optimizer.average_parameters()
            simulation.average()
            assert equal_everywhere(model)
            assert optimizer.local_steps == 0
            assert_same(model, simulation.workers[0][0], measured_gap=False)
    if co2.size() <= 2:  # else the order of sums is the transport's, and codes follow it
        assert_equal(model, simulation.workers[co2.rank()][0])


def test_one_fragment_waited_for_is_diloco() -> None:
    options = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_frequency": 3}
    model, optimizer = wrapped(outer="diloco", **options)
    plain = {"fragments": 1, "overlap_steps": 0, "bits": None, "mixing": 0.0}
    other, streaming = wrapped(outer="streaming-diloco", **options, **plain)
    train_steps(model, optimizer, range(7))
    train_steps(other, streaming, range(7))
    assert_equal(other, model, 1e-12)


def test_rank_0_alone_saves_while_others_go_on() -> None:
    case = STREAMING_CASES["two fragments"]
    model, optimizer = wrapped(**STREAMING, **case, bits=8)
    simulation = streaming_simulation(momentum_sgd, 8, case)
    saved = None
    for step in range(9):
        train_steps(model, optimizer, range(step, step + 1))
        if step <= 6:
            simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        if step == 6 and co2.rank() == 0:
            saved = optimizer.state_dict()["co2"]
    if saved is not None:
        assert (saved["steps"], saved["events"], saved["turns"], saved["fragments"]) == (7, 3, 3, 2)
        for fragment, members in enumerate(simulation.members):
            for index, (begin, end) in zip(members, simulation._places(fragment), strict=True):
                vectors = saved["parameters"][index]
                wanted = {"start": simulation.x, "momentum": simulation.momenta, "owed": simulation.r}
                wanted["residual"] = simulation.e[0]
                for name, rows in wanted.items():
                    assert torch.equal(vectors[name].flatten(), rows[fragment].flatten()[begin:end]), name
        with pytest.raises(ValueError, match="saved with 3 fragments, and this optimizer has 2: pass fragments=3"):
            optimizer.rounds.load({**saved, "fragments": 3})


def test_no_rank_waits_between_sending_and_applying() -> None:
    """The others send, and make all steps but the last before they apply, while one rank does not do anything."""
    model, optimizer = wrapped(**STREAMING, outer_frequency=4, fragments=1, overlap_steps=3)
    train_steps(model, optimizer, range(3))
    while_rank_0_stands_still(lambda: train_steps(model, optimizer, range(3, 6)))
    train_steps(model, optimizer, range(6, 8))


def test_a_frozen_layer_takes_over_what_is_on_its_way_and_stays() -> None:
    model, optimizer = wrapped(**STREAMING, **STREAMING_CASES["two fragments"], bits=4)
    train_steps(model, optimizer, range(2))  # which send layer 0, applied after the next
    before = model[0].weight.clone()
    model[0].requires_grad_(False)
    train_steps(model, optimizer, range(2, 3))
    taken = model[0].weight.clone()
    assert not torch.equal(taken, before)
    train_steps(model, optimizer, range(3, 9))  # its turn comes after 7
    assert torch.equal(model[0].weight, taken)
    assert not optimizer.state_dict()["co2"]["parameters"][0]["momentum"].any()
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    train_steps(model, optimizer, range(9, 13))
    assert (model[0].weight == 0.25).all()
    model[0].requires_grad_(True)
    train_steps(model, optimizer, range(13, 19))
    assert not (model[0].weight == 0.25).any()
    optimizer.average_parameters()
    assert equal_everywhere(model)


def test_a_weight_frozen_beside_its_bias_loses_its_momentum_and_keeps_what_bytes_left_out() -> None:
    model, optimizer = wrapped(**STREAMING, outer_frequency=2, fragments=1, overlap_steps=0, bits=4)
    train_steps(model, optimizer, range(4))
    before = optimizer.state_dict()["co2"]["parameters"][0]
    assert all(before[name].any() for name in ("momentum", "owed", "residual"))
    model[0].weight.requires_grad_(False)
    train_steps(model, optimizer, range(4, 8))
    after = optimizer.state_dict()["co2"]["parameters"][0]
    assert not after["momentum"].any()
    for name in ("start", "owed", "residual"):
        assert torch.equal(after[name], before[name]), name


def test_parameters_of_16_bits() -> None:
    model = small_model(torch.bfloat16)
    optimizer = co2.DistributedOptimizer(
        momentum_sgd(model.parameters()), model, **STREAMING, **STREAMING_CASES["two fragments"]
    )
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, co2.rank(), step, torch.bfloat16).backward()
        optimizer.step()
    assert all(part.whole.dtype is torch.float32 for part in optimizer.rounds.parts)
    optimizer.average_parameters()
    assert equal_everywhere(model)


def test_what_is_explained() -> None:
    model, optimizer = wrapped(**STREAMING, outer_frequency=2, fragments=2)
    train_steps(model, optimizer, range(8))
    assert "an all-to-all and an all-gather of" in optimizer.explain()
    with pytest.raises(ValueError, match="hides the exchange of a fragment behind overlap_steps"):
        co2.suggest_frequency(model)


@pytest.mark.parametrize("outer", ["streaming-diloco", "sparseloco"])
def test_other_types_and_layouts(outer: str) -> None:
    torch.manual_seed(3)
    tensors = [
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(7).bfloat16(),
        torch.zeros(0, 3),
        torch.tensor(1.0, dtype=torch.float64),
    ]
    params = [torch.nn.Parameter(tensor) for tensor in tensors]
    named = [(f"{number}.weight", param) for number, param in enumerate(params)]
    sgd = torch.optim.SGD(params, 0.5)
    optimizer = co2.DistributedOptimizer(sgd, named, outer=outer, outer_frequency=2, fragments=2, overlap_steps=1)
    for step in range(6):
        torch.manual_seed(100 * step + co2.rank())
        optimizer.zero_grad()
        sum((param * torch.randn_like(param)).sum().abs() for param in params).backward()
        optimizer.step()
    saved = optimizer.state_dict()["co2"]["parameters"]
    assert [saved[number]["start"].dtype for number in range(5)] == [torch.float32] * 4 + [torch.float64]
    assert saved[1]["residual"].shape == (5, 2)
    optimizer.average_parameters()
    for param in params:
        values = co2.allgather_object(torch.view_as_real(param.detach()) if param.is_complex() else param.detach())
        assert all(torch.equal(value, values[0]) for value in values)


def test_ranks_at_different_turns_are_told_so() -> None:
    model, optimizer = wrapped(**STREAMING, outer_frequency=2, fragments=2)
    train_steps(model, optimizer, range(2))
    if co2.size() == 1:
        return
    if co2.rank() == 1:  # as after loading a state that was saved a turn later
        optimizer.rounds.turns += 1
    with pytest.raises(
        ValueError, match=r"entry 0 is «fragment 0, after 2 turns» on rank 0 and «fragment 1, after 3 turns»"
    ):
        train_steps(model, optimizer, range(2, 6))


def test_fragments_are_of_layers_and_those_of_the_state() -> None:
    with pytest.raises(
        ValueError, match="fragments=3 are of whole layers, and the names of parameters tell of 2, such as '0'"
    ):
        wrapped(**STREAMING, outer_frequency=6, fragments=3)
    model, optimizer = wrapped(**STREAMING, outer_frequency=2, fragments=2)
    train_steps(model, optimizer, range(3))
    saved = optimizer.state_dict()
    saved["co2"]["fragment"] = [1, 1, 0, 0]
    with pytest.raises(ValueError, match=r"with parameter 0 in fragment 1, and '0.weight' is in fragment 0"):
        optimizer.load_state_dict(saved)


def test_a_step_that_waits_is_no_longer_step() -> None:
    """Else steps that wait for the network would seem to hide it."""
    _, optimizer = wrapped(**STREAMING, outer_frequency=4, fragments=1, overlap_steps=1)
    rounds, steps = optimizer.rounds, []
    rounds.pace.stepped = steps.append
    for seconds in (0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0):
        rounds.begin()
        rounds._waited += seconds
        rounds._since -= seconds
        rounds.stepped()
    assert len(steps) == 2
    assert max(steps) < 0.05
