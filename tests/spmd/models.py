"""Small models, each with one thing that breaks wrappers elsewhere."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 9


def adafactor(params: Any, rate: float) -> torch.optim.Optimizer:
    """An optimizer that has to see whole parameters. Skips the test where torch has it not yet."""
    if not hasattr(torch.optim, "Adafactor"):
        pytest.skip("torch.optim.Adafactor came with torch 2.5")
    return torch.optim.Adafactor(params, rate)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 33), nn.Tanh())
        self.head = nn.Linear(33, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


class Tied(Mlp):
    """One weight in two places, used through a functional call as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(self.second(x), self.head.weight.t()[:WIDTH, :WIDTH])
        return super().forward(self.first(y))


class Unused(Mlp):
    """Parameters nobody uses; in the middle, so that they would keep a fused bucket from filling."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.append(nn.Identity())
        self.inner[0].register_parameter("spare", nn.Parameter(torch.ones(5)))
        self.never = nn.Linear(WIDTH, WIDTH)


class Attention(nn.Module):
    """``out_proj``'s forward is never called; the LSTM keeps references to its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.unsqueeze(1).expand(-1, 3, -1)
        y, _ = self.attention(y, y, y)
        return self.lstm(y)[0][:, -1]


class Repeated(Mlp):
    """A module that runs three times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return super().forward(x)


class Checkpointed(Repeated):
    """Recomputes its forward in backward; with `reentrant`, a gradient arrives several times per backward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.again, x, use_reentrant=self.reentrant)
        x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedReentrant(Checkpointed):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.requires_grad_())


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.inner[0].parameters():
            parameter.requires_grad_(False)


class Convolution(nn.Module):
    """Channels-last weights: dense, but not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 6, 2)).to(
            memory_format=torch.channels_last
        )
        self.head = nn.Linear(6, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolutions(x.view(-1, 1, 3, 3)).flatten(1))


class OddParameters(nn.Module):
    """Zero elements, no dimensions, gaps between elements (which a conversion would close), complex numbers, a parameter
    of the root itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.gappy = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(WIDTH, 2)[:, 0])
        self.phase = nn.Parameter(torch.linspace(-1, 1, WIDTH).to(torch.complex128))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x * self.gappy) * self.scale + self.empty.sum()
        return y + torch.view_as_real(self.phase * x).sum(-1)


class Sometimes(Mlp):
    """A branch that only inputs with a positive first entry take: some ranks use it, in some iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        chosen = x[:, 0] > 0
        if chosen.any():
            y = y + torch.where(chosen.unsqueeze(1), self.branch(x), torch.zeros_like(y))
        return y


class TablesAlone(nn.Module):
    """Embeddings with sparse gradients; one of them used by some ranks only, in some iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rare = nn.Embedding(11, WIDTH, sparse=True), nn.Embedding(7, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = (x[:, 1].abs() * 3).long().clamp(max=6)
        y = self.table(index + 2)
        chosen = x[:, 0] > 0
        return y.index_add(0, chosen.nonzero()[:, 0], self.rare(index[chosen])) if chosen.any() else y


class Tables(TablesAlone):
    def __init__(self) -> None:
        super().__init__()
        self.dense = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x) + super().forward(x)


class Pause(torch.autograd.Function):
    """Backward takes 20 ms longer here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return gradient


SPARSE_MODELS = {"Tables": Tables, "TablesAlone": TablesAlone}
MODELS = {
    cls.__name__: cls
    for cls in (
        Mlp,
        Tied,
        Unused,
        Attention,
        Repeated,
        Checkpointed,
        CheckpointedReentrant,
        Frozen,
        Convolution,
        OddParameters,
        Sometimes,
    )
}


def double_model(name: str) -> nn.Module:
    """One of MODELS in double precision, with the same values in every process."""
    torch.manual_seed(1234)
    model = MODELS[name]()
    for parameter in model.parameters():
        if not parameter.is_complex():
            parameter.data = parameter.data.double()
    return model


def single_model(seed: int = 7) -> nn.Module:
    """In single precision, with the same values in every process."""
    torch.manual_seed(seed)
    return Mlp()
