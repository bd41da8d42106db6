"""What goes from a stage to the next one: any structure of tensors, and skip connections beside it, through stages between.

    stage 0                          stage 1                           stage 2
    stashes "early" ── y, early ──▶  passes it on ── z, early ──▶      pops "early"
                    ◀── gradients ──               ◀── gradients ──

torch's pipelining sends tensors in a row. What is around them goes along once, when stages tell each other the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipe.skip import Key, Skippable, holding

__all__ = ["Carrier", "Structure", "crossings", "taken_apart"]


class Structure(NamedTuple):
    """What is around the tensors of a value; in `leaves`, ``torch.Tensor`` stands where one is."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    def around(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value that has these `tensors`."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if leaf is torch.Tensor else leaf for leaf in self.leaves], self.spec)

    def __reduce__(self) -> Any:
        return _as_in, (
            tree_unflatten(self.leaves, self.spec),
        )  # a spec cannot be pickled without a warning of torch's


def _as_in(value: Any) -> Structure:
    leaves, spec = tree_flatten(value)
    return Structure(spec, tuple(leaves))


def taken_apart(value: Any) -> tuple[tuple[torch.Tensor, ...], Structure]:
    """The tensors of `value`, any structure (pytree), and what is around them."""
    leaves, spec = tree_flatten(value)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return tensors, Structure(spec, tuple(torch.Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))


def crossings(layers: Sequence[torch.nn.Module], ends: Sequence[int]) -> list[list[Key]]:
    """For each of the `ends` of stages, the skip connections that go over it; every rank finds the same order.

    `ends` has the number of the first layer of each stage, and that of all layers.
    """
    found: list[list[Key]] = [[] for _ in ends]
    since: dict[Key, int] = {}
    for number, layer in enumerate(layers):
        for part in layer.modules():
            if not isinstance(part, Skippable):
                continue
            for key in part.keys(part.pops):
                begun = since.pop(key)
                for place, end in enumerate(ends):
                    if begun < end <= number:
                        found[place].append(key)
            since.update(dict.fromkeys(part.keys(part.stashes), number))
    return found


class Carrier(torch.nn.Module):
    """A stage as torch's pipelining calls it: tensors in a row go in, and come out.

    `arriving` are the skip connections that come with its input, `leaving` those that go with its output. The first stage
    is given a tensor, or a tuple where the batch has several.
    """

    def __init__(self, stage: torch.nn.Module, arriving: Sequence[Key] = (), leaving: Sequence[Key] = ()) -> None:
        super().__init__()
        self.stage = stage
        self._arriving, self._leaving = tuple(arriving), tuple(leaving)
        self.given: Structure | None = None  # of what the stage before sends
        self.made: Structure | None = None  # of what this one sends: that of the first micro-batch

    def forward(self, *tensors: torch.Tensor) -> Any:
        if self.given is None:
            value, skips = tensors[0] if len(tensors) == 1 else tensors, ()
        else:
            value, skips = self.given.around(tensors)
        with holding(dict(zip(self._arriving, skips, strict=True))) as store:
            output = self.stage(value)
            passed = tuple(store[key] for key in self._leaving)
        sent, made = taken_apart((output, passed))
        if self.made is None:
            self.made = made
        elif made != self.made:
            raise ValueError(
                f"a stage gives every micro-batch the same structure, whose values are in tensors: its first output was "
                f"{_told(self.made)}, and this one is {_told(made)}"
            )
        sent = tuple(each.contiguous() for each in sent)  # as messages have to be
        return sent[0] if len(sent) == 1 else sent

    def whole(self, sent: Any) -> Any:
        """The output of the stage that :meth:`forward` has taken apart."""
        assert self.made is not None, "it has computed"
        output, _ = self.made.around((sent,) if isinstance(sent, torch.Tensor) else sent)
        return output


def _told(made: Structure) -> str:
    leaves = ["a tensor" if leaf is torch.Tensor else leaf for leaf in made.leaves]
    return str(tree_unflatten(leaves, made.spec)[0])
