"""Deferred models get, bit for bit, the values of models constructed as ever, and leave the generator as they do."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overlap.state.deferred_init import become, deferred_init, is_deferred, materialize, values_of
from overlap.state.replay import Operation
from tests.harness import ROOT
from tests.overlap.state.deferred_models import MODELS, TRANSFORMERS


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(tensors) == list(expected)
    for name, right in expected.items():
        left = tensors[name]
        assert left.device.type == "cpu", name
        assert torch.equal(left, right), name
        for what in ("dtype", "layout", "requires_grad"):
            assert getattr(left, what) == getattr(right, what), (name, what)
        assert left.stride() == right.stride(), name
        assert type(left) is type(right), name


def _ties(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names of the same object, and names of tensors that share memory."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
        groups.setdefault(("memory", tensor.untyped_storage()._cdata), []).append(name)
    return sorted(group for group in groups.values() if len(group) > 1)


def _same(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    plain = build()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with deferred_init():
        model = build()
    assert torch.equal(torch.get_rng_state(), after)
    assert any(map(is_deferred, _named(model).values()))
    expected, deferred = _named(plain), _named(model)
    for name in reversed(deferred):  # one at a time, in any order
        assert torch.equal(values_of(deferred[name]), expected[name]), name
    ties = _ties(deferred)
    assert materialize(model) is model
    assert torch.equal(torch.get_rng_state(), after)
    _assert_same(_named(model), expected)
    assert ties == _ties(deferred) == _ties(expected)
    assert all(deferred[name] is tensor for name, tensor in _named(model).items())
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_a_models_values_are_those_of_plain_construction(name: str) -> None:
    _same(MODELS[name])


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.filterwarnings("ignore")
def test_so_are_those_of_hugging_faces_models(name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(5)
    plain = TRANSFORMERS[name]()
    model = _same(TRANSFORMERS[name])
    tokens = torch.arange(8)[None]
    for one in (plain, model):
        one.eval()
    for left, right in zip(model(tokens).to_tuple(), plain(tokens).to_tuple(), strict=True):
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right)


def _program(seed: int) -> list[torch.Tensor]:
    """Tensors that a random sequence of operations makes and writes to, over views and copies of each other."""
    pick = np.random.default_rng(seed)
    tensors = [torch.zeros(4, 4), torch.rand(4, 4)]
    for _ in range(60):
        one, other = (tensors[int(pick.integers(len(tensors)))] for _ in range(2))
        choice, number = int(pick.integers(14)), int(pick.integers(4))
        if choice == 0:
            tensors.append(torch.empty(4, 4).normal_())
        elif choice == 1:
            tensors.append(one.clone())
        elif choice == 2:
            tensors.append(one.t())
        elif choice == 3:
            one[number].uniform_()
        elif choice == 4:
            one[:, number] = other[number]
        elif choice == 5:
            one.add_(other, alpha=0.5)
        elif choice == 6:
            one.normal_(0.0, 0.5)
        elif choice == 7:
            tensors.append(torch.tanh(one) + torch.randn(4, 4))
        elif choice == 8:
            tensors.append(torch.from_numpy(np.full((4, 4), 0.5, np.float32)))
        elif choice == 9:
            one.copy_(other)
        elif choice == 10:
            tensors.append(torch.bernoulli(one.clamp(0, 1)))
        elif choice == 11 and one[number].sum().item() > 0.5:
            one.zero_()
        elif choice == 12:
            tensors.append(copy.deepcopy(one))
        elif choice == 13:
            one[one > 0.5] = 0.25
    return tensors


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_operations_gives_the_same(seed: int) -> None:
    torch.manual_seed(seed)
    expected = _program(seed)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    with deferred_init():
        tensors = _program(seed)
    assert torch.equal(torch.get_rng_state(), after)
    for number, (tensor, right) in reversed(list(enumerate(zip(tensors, expected, strict=True)))):
        assert torch.equal(values_of(tensor), right), number
    for number, (tensor, right) in enumerate(zip(tensors, expected, strict=True)):
        assert torch.equal(materialize(tensor), right), number
    assert torch.equal(torch.get_rng_state(), after)


def test_objects_stay_the_same_with_their_hooks_and_optimizer() -> None:
    with deferred_init():
        layer = nn.Linear(3, 2)
    weight, calls = layer.weight, []
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    seen = weakref.ref(weight)
    weight.register_hook(lambda grad: calls.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda param: calls.append("accumulated"))
    weight.marked = True  # type: ignore[attr-defined]
    materialize(layer)
    assert layer.weight is weight is seen() is optimizer.param_groups[0]["params"][0]
    assert vars(weight) == {"marked": True}
    before = weight.detach().clone()
    layer(torch.ones(1, 3)).sum().backward()
    assert calls == ["gradient", "accumulated"]
    optimizer.step()
    assert torch.equal(weight, before - 0.1)


def test_an_optimizer_may_be_made_inside() -> None:
    with deferred_init():
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(layer.parameters())
    materialize(layer)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[layer.weight]["exp_avg"].device.type == "cpu"


def test_values_of_leaves_the_tensor_deferred_and_gives_memory_of_its_own() -> None:
    with deferred_init():
        layer = nn.Linear(3, 2)
    first = values_of(layer.weight)
    second = values_of(layer.weight)
    first.zero_()
    assert is_deferred(layer.weight)
    assert not first.requires_grad
    assert second.abs().min() > 0
    assert torch.equal(second, values_of(layer.weight))
    assert values_of(second) is second
    assert not is_deferred(second)


def test_become_takes_any_real_tensor() -> None:
    with deferred_init():
        layer = nn.Linear(3, 2)
    weight, stand_in = layer.weight, torch.full((), float("nan")).expand(2, 3)
    become(weight, stand_in)
    assert layer.weight is weight
    assert weight.requires_grad
    assert weight.untyped_storage().nbytes() == 4


def test_a_part_of_a_model_may_get_its_values_alone_and_shared_memory_stays_shared() -> None:
    with deferred_init():
        both = torch.randn(4, 3)
        first, second = nn.Linear(3, 2), nn.Linear(3, 2)
        first.weight, second.weight = nn.Parameter(both[:2]), nn.Parameter(both[2:])
    materialize(first)
    assert is_deferred(second.weight)
    with torch.no_grad():
        first.weight.fill_(7.0)
    materialize(second)
    assert first.weight.untyped_storage().data_ptr() == second.weight.untyped_storage().data_ptr()
    assert (first.weight == 7).all()


def test_values_are_from_before_the_original_was_trained() -> None:
    with deferred_init():
        layer = nn.Linear(3, 2)
        twin = copy.deepcopy(layer)
    materialize(layer)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(materialize(twin).weight, before)


def test_real_tensors_that_were_copied_in_may_change_afterwards() -> None:
    source = np.ones((2, 3), np.float32)
    with deferred_init():
        layer = nn.Linear(3, 2)
        layer.weight.data.copy_(torch.from_numpy(source))
    source[:] = 2
    assert (materialize(layer).weight == 1).all()


def test_defaults_are_those_at_the_time() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with deferred_init():
            tensor, steps = torch.randn(3), torch.arange(3.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert materialize(tensor).dtype == materialize(steps).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_generators_of_the_script_move_too() -> None:
    def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        drawn = torch.randn(5, generator=generator), torch.empty(5).uniform_(generator=generator)
        return *drawn, generator.get_state()

    expected = draw()
    with deferred_init():
        tensors = draw()
    assert all(torch.equal(values_of(left), right) for left, right in zip(tensors, expected, strict=True))


def test_tensors_read_as_on_the_cpu_inside_and_single_values_can_be_read() -> None:
    with deferred_init():
        tensor = torch.linspace(0, 1, 3)
        assert tensor.device == torch.device("cpu")
        assert (tensor.is_cpu, tensor.is_meta) == (True, False)
        assert is_deferred(torch.zeros(2, device=tensor.device))
        assert not is_deferred(torch.zeros(2, device="cpu"))
        assert tensor.cpu() is tensor.to("cpu") is tensor
        assert tensor.tolist() == [0, 0.5, 1]
        assert [one.item() for one in tensor] == [0, 0.5, 1]
        assert (f"{tensor[1]}", bool(tensor[0]), int(tensor[2])) == ("0.5", False, 1)
        assert torch.nonzero(tensor).shape == (2, 1)
        assert torch.as_tensor(tensor) is tensor
        assert torch.tensor([tensor[1], 2.0]).tolist() == [0.5, 2]
        assert tensor.to(torch.float32, False, True) is not tensor
        assert tensor.to(device="cpu", non_blocking=True) is tensor.to("cpu", None, False) is tensor
        assert tensor.to("cpu", torch.float64).dtype == tensor.to("cpu", dtype=torch.float64).dtype == torch.float64
        assert is_deferred(tensor.to("cpu", copy=True))
        assert tensor.to("cpu", copy=True) is not tensor
        assert not is_deferred(torch.tensor([1.0], device=tensor.device))
        real = torch.ones(3, device="cpu")
        assert is_deferred(real + tensor)
        real += tensor
        assert real.tolist() == [1, 1.5, 2]
        with deferred_init():
            assert is_deferred(torch.zeros(2))
        assert is_deferred(torch.zeros(2))
    assert tensor.device.type == "meta"
    assert not is_deferred(torch.zeros(2))


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor.numpy(),
        np.asarray,
        lambda tensor: tensor.data_ptr(),
    ],
)
def test_what_needs_memory_is_refused_with_a_remedy(use: Callable[[torch.Tensor], Any]) -> None:
    with deferred_init(), pytest.raises(RuntimeError, match=r"shape \(3,\) has no memory .* make it with device='cpu'"):
        use(torch.zeros(3))


def test_another_device_is_refused() -> None:
    with deferred_init(), pytest.raises(RuntimeError, match=r"cannot go to cuda:0 yet; .* dear\.materialize\(model\)"):
        torch.ops.aten._to_copy.default(torch.zeros(3), device=torch.device("cuda:0"))
    with torch.device("meta"), pytest.raises(RuntimeError, match="the default device is meta"), deferred_init():
        pass


def test_what_is_written_afterwards_is_refused_as_it_would_be_lost() -> None:
    with deferred_init():
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    nn.init.zeros_(model[0].bias)
    with pytest.raises(RuntimeError, match=r"^0\.bias, of shape \(2,\), was written to after"):
        materialize(model)
    with pytest.raises(RuntimeError, match=r"^bias of layer 1, of shape"):
        values_of(model[0].bias, "bias of layer 1")
    assert is_deferred(model[0].weight)
    with deferred_init():
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean.add_(1)
    with pytest.raises(RuntimeError, match=r"^1\.running_mean, of shape \(2,\), was written to after"):
        materialize(model)


def test_other_tensors_on_the_meta_device_have_no_values() -> None:
    with deferred_init():
        layer = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"^weight, of shape \(2, 3\), is on the meta device and has no values"):
        materialize(layer.half())
    with deferred_init():
        strange = torch.zeros(2, device="meta")
        with torch.device("meta"):
            other = nn.Linear(3, 2)
        with pytest.raises(NotImplementedError, match="no values"):
            torch.ones(2) + strange
    assert not is_deferred(strange)
    assert not is_deferred(other.weight)


def test_pickling_a_deferred_tensor_is_refused_inside() -> None:
    with deferred_init(), pytest.raises(NotImplementedError, match="meta"):
        pickle.dumps(nn.Linear(3, 2))


def _operations() -> int:
    gc.collect()
    return sum(type(thing) is Operation for thing in gc.get_objects())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_operations_are_forgotten_when_values_are_overwritten_or_nobody_can_ask() -> None:
    before = _operations()
    with deferred_init():
        layer = nn.Linear(3, 2)
        for _ in range(3):
            with torch.no_grad():
                layer.weight.normal_().mul_(2).add_(torch.randn(3))
            assert _operations() == before + 5
        nn.init.ones_(layer.weight)
        assert _operations() == before + 2
    materialize(layer)
    assert _operations() == before


_MEMORY = """
import resource, sys, torch
from overlap.state.deferred_init import deferred_init, materialize, values_of
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
torch.set_num_threads(1)
torch.nn.Linear(8, 8)(torch.ones(1, 8)).sum().backward()
with deferred_init():  # what the first use imports
    small = torch.nn.Linear(8, 8)
materialize(small)
before = peak()
with deferred_init():
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(23)))
    model.append(torch.nn.Linear(2048, 4096, dtype=torch.float16))
constructed = peak() - before
shares = []
for parameter in model.parameters():
    values = values_of(parameter)
    shares.append(values.flatten()[: values.numel() // 8].clone())
    del values
print(constructed, peak() - before)
"""


def test_construction_takes_memory_for_one_parameter_and_so_do_values_beside_the_shares_kept_of_them() -> None:
    ran = subprocess.run([sys.executable, "-c", _MEMORY], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    constructed, valued = map(float, ran.stdout.split())
    assert constructed < 16 + 20, "MiB, of a model of 384 whose largest parameter has 16"
    assert valued < 384 / 8 + 16 + 20
