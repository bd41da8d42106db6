"""Parameters that several stages share, such as an embedding and a head: the first stage owns one, and others borrow it.

    step      owner ── values ─▶ borrower … all backward passes … borrower ── gradient ─▶ owner's last backward pass

A borrower's last backward pass comes before the owner's, in any schedule, so that nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from overlap.job.session import current
from overlap.transport.communicator import Communicator
from overlap.transport.operation import broadcast
from overlap.transport.work import Work, arrive

__all__ = ["Borrowed", "Tie", "ties_between"]


class Tie(NamedTuple):
    """A parameter of the stage `owner` that the stage `borrower` has, too, under these names."""

    owner: int
    name: str
    borrower: int
    borrowed: str


def ties_between(stages: Sequence[Mapping[str, torch.nn.Parameter]]) -> list[Tie]:
    """The parameters that stages share, by name in each; the same list on every rank."""
    first: dict[int, tuple[int, str]] = {}
    found = []
    for number, parameters in enumerate(stages):
        for name, parameter in parameters.items():
            owner, known = first.setdefault(id(parameter), (number, name))
            if owner != number:
                found.append(Tie(owner, known, number, name))
    return found


class Borrowed:
    """This rank's side of a tie. All methods: on the two ranks, in the same order."""

    def __init__(self, comm: Communicator, owns: bool, module: torch.nn.Module, name: str) -> None:
        self._comm, self.owns = comm, owns
        path, _, self._name = name.rpartition(".")
        self._holder = module.get_submodule(path)
        self._work: Work | None = None
        if not owns:  # a leaf that no optimizer has: its gradient goes to the owner
            values = self._holder._parameters.pop(self._name)
            assert values is not None
            leaf = values.detach().clone().requires_grad_(values.requires_grad)
            self._holder.register_buffer(self._name, leaf, persistent=False)

    def _tensor(self) -> torch.Tensor:
        """By the module: who reads a parameter there waits for its values."""
        found: torch.Tensor = getattr(self._holder, self._name)
        return found

    def lend(self) -> None:
        """Before a step: the borrower gets the values in force."""
        tensor = self._tensor()
        if self.owns:
            for optimizer in current().registry.having([tensor]):
                optimizer._engine.unsharder.hand_out(tensor)
        values = tensor.detach().contiguous()
        self._comm.run(broadcast(values, 0, label=f"values of {self._name}"))
        if not self.owns:
            tensor.data.copy_(values)
            tensor.grad = None

    def give_back(self) -> None:
        """The borrower's last backward pass is over."""
        tensor = self._tensor()
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        self._work = self._comm.start(broadcast(gradient.contiguous(), 1, label=f"gradient of {self._name}"))

    def take_back(self) -> None:
        """Before the owner's last backward pass: its gradient gets the borrower's, by a backward pass of its own."""
        tensor = self._tensor()
        gradient = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        arrive(self._comm.start(broadcast(gradient, 1, label=f"gradient of {self._name}")))
        for optimizer in current().registry.having([tensor]):
            optimizer._engine.unsharder.added_to(tensor)
        torch.autograd.backward([tensor], [gradient])

    def settle(self) -> None:
        """At the end of a step."""
        work, self._work = self._work, None
        if work is not None:
            arrive(work)
