"""The emulated accelerator: takes the time it is told to, hands over gradients, looks like the real model."""

from __future__ import annotations

import functools
import time

import pytest
import torch

from bench.emulation.accelerator import Accelerator, EmulatedLayer, gradient_bytes
from bench.emulation.profile import even, parse_spec
from bench.models.catalog import workload
from overlap.plan.simulation.profile import known, load


def test_specs_are_read_and_nonsense_is_refused() -> None:
    assert parse_spec("resnet50@a100:64") == ("resnet50", "a100", 64.0)
    assert parse_spec("resnet50@a100") == ("resnet50", "a100", None)
    for spec, message in (
        ("resnet50", "written MODEL@DEVICE"),
        ("mlp@even", "needs the milliseconds"),
        ("mlp@even:fast", "not 'fast'"),
        ("mlp@even:0", "above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_spec(spec)


@functools.cache
def _bytes(model: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return gradient_bytes(workload(model).build())


@pytest.mark.parametrize("name", known())
def test_every_profile_fits_its_model_and_says_where_it_comes_from(name: str) -> None:
    model, device, number = parse_spec(name)
    assert number is not None
    profile = load(model, device, int(number))
    assert (profile.model, profile.device, profile.batch_size) == (model, device, number)
    assert profile.source.startswith(("derived, not measured: ", "measured "))
    assert profile.seconds > 1e-3
    assert {layer.name: layer.tensors for layer in profile.layers} == _bytes(model)


def test_even_layers_take_a_third_in_forward() -> None:
    profile = even("mlp", ["a", "b"], 60)
    assert [(layer.forward, layer.backward) for layer in profile.layers] == [(0.01, 0.02), (0.01, 0.02)]
    assert profile.seconds == pytest.approx(0.06)


def test_the_emulated_model_has_the_real_ones_parameters_and_takes_its_time() -> None:
    chosen = workload("resnet50")
    with torch.device("meta"):
        real = {name: p.shape for name, p in chosen.build().named_parameters()}
    model = Accelerator.named("resnet50@even:60", 1).model(chosen, dilate=2)
    assert {name: p.shape for name, p in model.named_parameters()} == real
    begun = time.perf_counter()
    loss = model()
    forward = time.perf_counter() - begun
    loss.backward()
    assert forward >= 0.04
    assert time.perf_counter() - begun >= 0.12
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_gradients_arrive_layer_by_layer_from_the_end() -> None:
    model = Accelerator.named("mlp@even:1", 1).model(workload("mlp"), dilate=1)
    layers = [module for module in model.modules() if isinstance(module, EmulatedLayer)]
    arrived: list[int] = []
    for number, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _p, n=number: arrived.append(n))  # type: ignore[union-attr]
    model().backward()
    assert arrived == list(range(len(layers)))[::-1]


def test_a_profile_of_another_batch_size_or_model_is_refused() -> None:
    with pytest.raises(ValueError, match="batch size 64, and this run has 32"):
        Accelerator.named("resnet50@a100:64", 32)
    with pytest.raises(ValueError, match="of resnet50 and the model of this run is mlp"):
        Accelerator.named("resnet50@even:9", 1).model(workload("mlp"), 1)
    with pytest.raises(ValueError, match=r"no profile of resnet50@a100:7; there are resnet50@a100:64.*derive one"):
        load("resnet50", "a100", 7)
