"""The interface of a method: join the job, distribute a model and its optimizer, settle, leave."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from bench.methods.spec import refuse_unknown

__all__ = ["MakeOptimizer", "Method", "MethodUnavailable", "Place", "tensor_bytes"]

Optimizer = torch.optim.Optimizer
# (class, keyword arguments): methods build the optimizer themselves, as some of them must see the class.
MakeOptimizer = tuple[Callable[..., Optimizer], Mapping[str, Any]]


class MethodUnavailable(RuntimeError):
    """The method cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Place:
    rank: int
    size: int


class Method(ABC):
    """One way to train on several ranks, with its options.

    ``launchers`` are the ways to start its ranks, the preferred one first. ``defaults`` are its options; a value of
    None means the method's own default. ``choices`` are the words that an option may be; others are numbers or switches.
    ``environment`` is set for every rank before Python starts.
    """

    name: ClassVar[str]
    launchers: tuple[str, ...]
    defaults: ClassVar[Mapping[str, Any]] = {}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    timeline_variable: ClassVar[str | None] = None  # names the file to record a timeline in, where the method can

    def __init__(self, options: Mapping[str, Any]) -> None:
        refuse_unknown(self.name, options, tuple(self.defaults))
        for name, value in options.items():
            what = f"{name} of {self.name}"
            if name in self.choices:
                _choose(what, value, self.choices[name])
            else:
                _check(what, value, isinstance(self.defaults[name], bool))
        self.options = {**self.defaults, **options}

    @property
    def environment(self) -> dict[str, str]:
        return {}

    @property
    def passes(self) -> int:
        """Backward passes before each step of the optimizer, whose gradients the method sums."""
        return 1

    def look(self) -> None:  # noqa: B027  most methods are always here
        """Check that the method can run on this machine; raises :class:`MethodUnavailable`."""

    @abstractmethod
    def join(self, device: torch.device) -> Place:
        """Connect to the other ranks. On every rank."""

    @abstractmethod
    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """The model to call and the optimizer to step. On every rank."""

    def tuning(self, optimizer: Optimizer) -> bool:
        """Whether the method still changes itself by what it measures: such steps are not timed. The same on every rank."""
        return False

    def setting(self, optimizer: Optimizer) -> str:
        """The method's current choice, as text; empty where it chooses nothing."""
        return ""

    def save_profile(self, optimizer: Optimizer, path: Path, batch_size: int) -> None:
        """Measure layers in the next steps, and write them to `path`. Raises ``ValueError`` where the method cannot."""
        raise ValueError(f"{self.name} does not measure layers: --profile is for our own strategies")

    def bytes_over(self) -> str:
        """What moves this rank's bytes: ``tcp``, ``mpi``, ``gloo``, …; empty where none are moved. After :meth:`join`."""
        return ""

    def settle(self, optimizer: Optimizer) -> None:  # noqa: B027  most methods leave nothing in flight
        """Wait for what the last step left in flight."""

    def average(self, optimizer: Optimizer) -> None:  # noqa: B027  parameters are the same on all ranks but for local SGD
        """Give all ranks the same parameters, the ones to be evaluated. On every rank."""

    def digest(self, model: nn.Module) -> str:
        """The SHA-256, in hexadecimal, of the bytes of all parameters of `model`, by name. On every rank, settled."""
        found = hashlib.sha256()
        for _, param in sorted(model.named_parameters()):
            whole = (
                param.full_tensor() if hasattr(param, "full_tensor") else param
            )  # of a DTensor, which all ranks gather
            found.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def state_bytes(self, optimizer: Optimizer) -> int:
        """Bytes of optimizer state on this rank."""
        return tensor_bytes(optimizer.state)

    def limit_bytes(self, optimizer: Optimizer) -> int | None:
        """The memory that this rank's process may have; None without a limit."""
        return None

    def most_bytes(self, optimizer: Optimizer) -> int:
        """The most memory that the method has seen this rank take, where it makes the kernel count anew; else 0."""
        return 0

    @abstractmethod
    def leave(self) -> None:
        """Disconnect. On every rank."""


def _choose(what: str, value: Any, words: tuple[str, ...]) -> None:
    if value is not None and value not in words:
        raise ValueError(f"{what} should be one of {', '.join(words)}, or None, and is {value!r}")


def _check(what: str, value: Any, switch: bool) -> None:
    if switch and value not in (True, False):
        raise ValueError(f"{what} should be True or False and is {value!r}")
    if not switch and value is not None and not (isinstance(value, int | float) and value >= 0):
        raise ValueError(f"{what} should be a number of at least 0 and is {value!r}")


def tensor_bytes(state: Any) -> int:
    """Bytes of all tensors in nested mappings and sequences; of a sharded tensor, this rank's part."""
    if isinstance(state, torch.Tensor):
        local = state.to_local() if hasattr(state, "to_local") else state
        return int(local.numel() * local.element_size())
    if isinstance(state, Mapping):
        return sum(tensor_bytes(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(tensor_bytes(value) for value in state)
    return 0
