"""How many layers each stage has: the stage that takes longest, or is largest, as short as can be."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pipe.micro_batches import cut

__all__ = ["balance_by_size", "balance_by_time", "balanced", "layer_seconds"]


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """The numbers of consecutive layers with these `costs` in so many stages, of which the costliest costs least (pure).

    Exact, by dynamic programming; of equal ones, that with more layers in the first stages. Each stage has a layer: raises
    ``ValueError`` for more stages than layers.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{stages} stages of {layers} layers: each has at least one")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[n] of k stages: the least that the costliest costs of the layers from n on, and the first stage's layers
    best = [(before[layers] - before[first], layers - first) for first in range(layers)]
    choices = [best]
    for count in range(2, stages + 1):
        best = [
            min(
                (
                    (max(before[until] - before[first], choices[-1][until][0]), first - until)
                    for until in range(first + 1, layers - count + 2)
                ),
                default=(float("inf"), 0),
            )
            for first in range(layers)
        ]
        choices.append([(cost, -length) for cost, length in best])
    found, first = [], 0
    for choice in reversed(choices):
        found.append(choice[first][1])
        first += found[-1]
    return found


def balance_by_time(
    partitions: int,
    module: torch.nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """The `balance` of so many stages by the seconds that forward and backward of each layer take on `sample`.

    Layers are copied to `device`, by default the first GPU or else the CPU, and run for `timeout` seconds, and at least
    once. Medians count.
    """
    place = _place(device)
    layers = [copy.deepcopy(layer).to(place) for layer in module]
    seconds: list[list[float]] = [[] for _ in layers]
    until = time.perf_counter() + timeout
    while not seconds[-1] or time.perf_counter() < until:
        x = tree_map(lambda each: each.to(place) if isinstance(each, torch.Tensor) else each, sample)
        for layer, mine in zip(layers, seconds, strict=True):
            x = tree_map(_cut_off, x)
            _settle(place)
            since = time.perf_counter()
            y = layer(x)
            differentiable = [leaf for leaf in tree_leaves(y) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if differentiable:
                torch.autograd.backward(differentiable, [torch.ones_like(leaf) for leaf in differentiable])
            _settle(place)
            mine.append(time.perf_counter() - since)
            x = y
    return balanced([median(each) for each in seconds], partitions)


@torch.no_grad()
def layer_seconds(
    module: torch.nn.Module, layers: Sequence[torch.nn.Module], sample: Sequence[Any], passes: int = 5
) -> list[float]:
    """The seconds that each of `layers` takes in a forward pass of `module` on `sample`: medians of so many passes.

    What comes before the first layer counts as its, and what comes behind the last one as that one's.
    """
    moments: list[float] = []
    handles = [layer.register_forward_hook(lambda *_: moments.append(time.perf_counter())) for layer in layers]
    found = []
    try:
        for _ in range(passes + 1):
            moments.clear()
            since = time.perf_counter()
            module(*sample)
            moments[-1] = time.perf_counter()
            found.append([until - begin for begin, until in itertools.pairwise([since, *moments])])
    finally:
        for handle in handles:
            handle.remove()
    return [median(each) for each in zip(*found[1:], strict=True)]  # the first pass is slower than any


def balance_by_size(
    partitions: int,
    module: torch.nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """The `balance` of so many stages by the bytes of each layer: activations of a micro-batch of `input`, and parameters.

    Activations are what a layer returns and keeps for backward, of one of so many `chunks`. Parameters count `param_scale`
    times: 2 for SGD, 4 for Adam, 5 where parameters are of 16 bits. `device` is as above.
    """
    place = _place(device)
    x = tree_map(lambda each: each.to(place) if isinstance(each, torch.Tensor) else each, cut(input, chunks)[0])
    sizes = []
    for layer in (copy.deepcopy(each).to(place) for each in module):
        x = tree_map(_cut_off, x)
        there: dict[int, int] = {}

        def keep(tensor: torch.Tensor, there: dict[int, int] = there) -> torch.Tensor:
            there[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = layer(x)
        for leaf in tree_leaves(y):
            if isinstance(leaf, torch.Tensor):
                keep(leaf)
        for known in (
            *layer.parameters(),
            *layer.buffers(),
            *(t for t in tree_leaves(x) if isinstance(t, torch.Tensor)),
        ):
            there.pop(known.untyped_storage().data_ptr(), None)
        sizes.append(sum(there.values()) + param_scale * sum(each.nbytes for each in layer.parameters()))
        x = y
    return balanced(sizes, partitions)


def _place(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _settle(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _cut_off(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())
