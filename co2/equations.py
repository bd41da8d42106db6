"""Outer rules: how a round of local steps becomes an update of the model, as functions of tensors. Pure.

Ranks make tau local steps of their own from x[t], which is the same on all of them but with "eager". They end in y[t], and
a[t] is the mean of that over ranks. ``x[t] - a[t]`` is called the pseudo-gradient: it takes the place of a gradient.

**co2** (Sun et al., ICLR 2024, arXiv 2401.16265, section 3). Nobody waits: while ranks make round t, a[t-1] arrives, and
with it the start of round t+1 is made. With alpha = 1, beta = 0, no clipping and gap = 1, the progress of a round is
applied whole, one round late.

    m[t]   = clip(beta m[t-1] + (x[t-1] - a[t-1]) / gap[t], -phi, phi)
    x[t+1] = x[t] - alpha m[t]

**localsgd** (Stich, ICLR 2019, arXiv 1805.09767, algorithm 1). Ranks wait for a[t].

    x[t+1] = a[t]

**slowmo** (Wang et al., ICLR 2020, arXiv 1910.00643, algorithm 1). Ranks wait for a[t]. gamma is the learning rate of the
inner optimizer in round t, which is constant in the paper; here the mean over the steps of the round. Where that is 0,
there are no units to measure in: m decays, and x[t+1] = a[t].

    m[t]   = beta m[t-1] + (x[t] - a[t]) / gamma[t]
    x[t+1] = x[t] - alpha gamma[t] m[t]

**diloco** (Douillard et al., arXiv 2311.08105, algorithm 1). Ranks wait for a[t]. The outer optimizer is SGD with
Nesterov's momentum, as ``torch.optim.SGD(nesterov=True)`` has it.

    m[t]   = beta m[t-1] + g[t]                       g[t] = x[t] - a[t]
    x[t+1] = x[t] - alpha (g[t] + beta m[t])

**eager** (Kale, Douillard, Donchev, arXiv 2502.12996). DiLoCo, and nobody waits: a rank's own part of the
pseudo-gradient counts at once, that of the others when it has arrived, one round late. Each rank has an x and an m of its
own. With d[t] = x[t] - y[t], and w[t] this rank's weight in the mean: one over the number of workers, or of those that were
left in the round before, if some are out of data.

    g[t] = w[t] d[t] + (mean(d[t-1]) - w[t-1] d[t-1])      then as diloco

**streaming-diloco** (Douillard et al., arXiv 2501.18512, algorithm 2). DiLoCo by fragments of the model, each sent in its
turn every H steps, and nobody waits: what it leads to counts tau steps later, mixed with what the rank has learned in
these. Q is what travels, of which there is more in `co2.fragments.codec`: with it, e is what Q has left out so far, of this
rank's progress, and r of the outer step. x and m are the same for all ranks, e is each rank's own. Of one fragment:

    d = x - y;       q = Q(d + e);               e <- d + e - q          each rank, when it is sent
    g = mean(q);     m <- beta m + g
    s = r - alpha (g + beta m);                  r <- s - Q(s)           x <- x + Q(s)
    y <- mixing y + (1 - mixing) x                                       each rank, tau steps later

**sparseloco** (Sarfi et al., arXiv 2508.15706, algorithm 1). What the largest elements of e leave out takes the place of
the outer momentum: it is kept, decays, and is sent once it has become large. Q is top-k in chunks, in 2 bits
(`co2.fragments.sparse_codec`). All ranks wait, for the whole model, unless `fragments` and `overlap_steps` say otherwise:

    e <- 0.95 e + d;   q = Q(e);   e <- e - q            each rank
    x <- x - alpha mean(q)

**acco** (Nabli et al., NeurIPS 2025, arXiv 2406.02613, "ACCO"). No rank steps by itself, and nobody waits: a round is
half a batch. What ranks send is not parameters but the gradients of a round, summed over its steps, and the inner
optimizer, Opt, steps at the owner of each shard. While the second half's gradients g are computed at x[t], the first
half's, h, lead to an estimate of x[t+1], whose state Opt forgets; at that estimate the next first half is computed, while
both halves lead to x[t+1]. So every gradient is of the parameters that it is applied to, or of an estimate of them, and
not a step late. n and k count the gradients in g and h, over all ranks; h[0] is computed at x[0]:

    e[t+1] = Opt(x[t], sum h[t] / sum k[t])                      while g[t] is computed at x[t]
    x[t+1] = Opt(x[t], (sum h[t] + sum g[t]) / (sum k[t] + sum n[t]))        while h[t+1] is computed at e[t+1]

[Note: the staleness gap]
What a[t-1] proposes was found from x[t-1] and is applied to x[t]. The paper divides it by a gap Lambda[t] between the two,
whose formula we could not confirm; its authors' program divides by a constant that the user gives. Here the gap is that
of Barkai, Hakimi and Schuster, "Gap-Aware Mitigation of Gradient Staleness" (ICLR 2020), with outer steps in the place
of steps: one plus the distance, in units of the longest outer step so far.

    gap[t] = 1 + |x[t] - x[t-1]| / max over s <= t of |x[s] - x[s-1]|        from 1, nothing moved, to 2

[Note: parameters of 16 bits]
Local steps begin at x[t] rounded. Rules take where they began and x[t] itself, so that what is not learned is not lost.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

import torch

__all__ = [
    "WORDS",
    "Acco",
    "Averaging",
    "Co2Rule",
    "DiLoCo",
    "Eager",
    "Ended",
    "LocalSgd",
    "OuterRule",
    "Overlapped",
    "Shared",
    "SlowMo",
    "SparseLoCo",
    "StreamingDiLoCo",
    "Timing",
    "eager_gradient",
    "nesterov",
]


#: What users call the fields of rules.
WORDS = {
    "outer_lr": "lr",
    "outer_momentum": "momentum",
    "outer_clip": "clip",
    "gap_penalty": "gap_penalty",
    "fragments": "fragments",
    "overlap_steps": "overlap_steps",
    "bits": "bits",
    "mixing": "mixing",
    "top_k": "top_k",
}


class Timing(Enum):
    """Who waits for whom at the end of a round."""

    DELAYED = auto()  # nobody: the average counts a round later, for all ranks alike
    WAITED = auto()  # all ranks, for the average of the round that has just ended
    OWN = auto()  # nobody: a rank's own part counts at once, the others' a round later
    OVERLAPPED = auto()  # the average of a fragment counts some steps later, for all ranks alike; after none, all wait


@dataclass(frozen=True)
class OuterRule:
    """The base of all outer rules. Raises ``ValueError`` for values outside of their ranges."""

    name: ClassVar[str]
    timing: ClassVar[Timing]
    needs_inner_lr: ClassVar[bool] = False
    frequency: ClassVar[int] = 12  # steps of a round, unless a user says otherwise
    exchange: ClassVar[str] = "a reduce-scatter and an all-gather"  # what carries a round

    def __post_init__(self) -> None:
        lr, momentum = getattr(self, "lr", 1.0), getattr(self, "momentum", 0.0)
        if not (lr > 0 and math.isfinite(lr)):
            raise ValueError(f"outer_lr should be above 0 and is {lr}")
        if not 0 <= momentum < 1:
            raise ValueError(f"outer_momentum should be at least 0 and below 1 and is {momentum}")

    @property
    def waits(self) -> bool:
        return self.timing is Timing.WAITED

    @property
    def measures_gap(self) -> bool:
        """Whether the step depends on how far the parameters moved."""
        return False

    def gap(self, moved: float, longest: float) -> float:
        """The staleness gap, from the norms of the last outer step and of the longest, where the rule has one."""
        return 1.0

    @property
    def options(self) -> dict[str, Any]:
        """The rule's own options, by the names that users give them."""
        return {word: getattr(self, name) for word, name in WORDS.items() if hasattr(self, name)}


@dataclass(frozen=True)
class Ended:
    """A round whose average is there, for its outer step. Tensors of one shape and type.

    Local steps began at `began`, and ended at `mean` on average; the outer step is made from `current` and `momentum`.
    """

    began: torch.Tensor
    mean: torch.Tensor
    current: torch.Tensor
    momentum: torch.Tensor
    gap: float = 1.0  # [Note: the staleness gap]
    inner_lr: torch.Tensor | float = 1.0  # mean over the round's steps, element by element, where the rule needs it


class Shared(OuterRule):
    """A rule whose x is the same for all ranks, so that each rank makes the outer step of its shard alone."""


class Averaging(Shared, ABC):
    """A rule whose outer step uses the average of what the ranks' rounds led to."""

    @abstractmethod
    def step(self, ended: Ended) -> tuple[torch.Tensor, torch.Tensor]:
        """The start of the next round and the new momentum, as new tensors."""


@dataclass(frozen=True)
class Co2Rule(Averaging):
    """CO2's rule: alpha, beta, phi (None: no clipping), and the gap: measured (True), 1 (False), or a constant."""

    name = "co2"
    timing = Timing.DELAYED
    lr: float = 1.0
    momentum: float = 0.2
    clip: float | None = 1.0
    gap_penalty: bool | float = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"outer_clip should be above 0, or None for no clipping, and is {self.clip}")
        if not isinstance(self.gap_penalty, bool) and not (self.gap_penalty > 0 and math.isfinite(self.gap_penalty)):
            raise ValueError(f"gap_penalty should be True, False or a number above 0 and is {self.gap_penalty}")

    @property
    def measures_gap(self) -> bool:
        return self.gap_penalty is True

    def gap(self, moved: float, longest: float) -> float:
        """The gap by which an outer step is divided: [Note: the staleness gap].

        `moved`: the norm of the last outer step, `longest`: of the longest, it included.
        """
        if not self.measures_gap:
            return 1.0 if self.gap_penalty is False else float(self.gap_penalty)
        return 1.0 + moved / longest if longest > 0 else 1.0

    def step(self, ended: Ended) -> tuple[torch.Tensor, torch.Tensor]:
        momentum = self.momentum * ended.momentum + (ended.began - ended.mean) / ended.gap
        if self.clip is not None:
            momentum = momentum.clamp(-self.clip, self.clip)
        return ended.current - self.lr * momentum, momentum


@dataclass(frozen=True)
class LocalSgd(Averaging):
    """Plain averaging, as in local SGD."""

    name = "localsgd"
    timing = Timing.WAITED

    def step(self, ended: Ended) -> tuple[torch.Tensor, torch.Tensor]:
        following = ended.mean + (ended.current - ended.began)  # the mean itself, but for 16 bits
        return following, torch.zeros_like(ended.momentum)


@dataclass(frozen=True)
class SlowMo(Averaging):
    """SlowMo's rule, with alpha and beta.

    Where the mean inner learning rate is 0, parameters become their mean, and momentum moves nothing.
    """

    name = "slowmo"
    timing = Timing.WAITED
    needs_inner_lr = True
    lr: float = 1.0
    momentum: float = 0.5

    def step(self, ended: Ended) -> tuple[torch.Tensor, torch.Tensor]:
        moved = ended.began - ended.mean
        gamma = torch.as_tensor(ended.inner_lr, dtype=moved.dtype, device=moved.device)
        momentum = self.momentum * ended.momentum + torch.where(gamma == 0, 0.0, moved / gamma)
        averaged = ended.mean + (ended.current - ended.began)
        return torch.where(gamma == 0, averaged, ended.current - self.lr * gamma * momentum), momentum


@dataclass(frozen=True)
class DiLoCo(Averaging):
    """DiLoCo's rule: alpha and beta of the outer Nesterov; the paper's values."""

    name = "diloco"
    timing = Timing.WAITED
    lr: float = 0.7
    momentum: float = 0.9

    def step(self, ended: Ended) -> tuple[torch.Tensor, torch.Tensor]:
        return nesterov(ended.current, ended.began - ended.mean, ended.momentum, self.lr, self.momentum)


@dataclass(frozen=True)
class Eager(OuterRule):
    """The rule "eager": alpha and beta of each rank's own outer Nesterov, by :func:`eager_gradient`.

    What comes late asks for shorter outer steps than DiLoCo's.
    """

    name = "eager"
    timing = Timing.OWN
    lr: float = 0.4
    momentum: float = 0.9


@dataclass(frozen=True)
class Overlapped(OuterRule):
    """A rule that averages fragments of the model in turn: tau, the mixing factor, and the bits of an element sent.

    `fragments` None: as many as `co2.fragments.layers` finds. `bits` None: elements travel as they are. `mixing` None: the
    paper's 0.5 where there are steps between, else 0.
    """

    timing = Timing.OVERLAPPED
    fragments: int | None = None
    overlap_steps: int = 0
    bits: int | None = None
    mixing: float | None = None
    _BITS: ClassVar[tuple[int, ...]] = ()
    feedback: ClassVar[float] = 1.0  # how much of what was left out is added to what is sent next

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fragments is not None and self.fragments < 1:
            raise ValueError(f"fragments should be a number of fragments, at least 1, and is {self.fragments}")
        if self.overlap_steps < 0:
            raise ValueError(f"overlap_steps should be a number of steps, at least 0, and is {self.overlap_steps}")
        if self.bits is not None and self.bits not in self._BITS:
            known = ", ".join(map(str, self._BITS))
            raise ValueError(f"bits should be {known} or None, for elements as they are, and is {self.bits}")
        if self.mixing is None:
            object.__setattr__(self, "mixing", 0.5 if self.overlap_steps > 0 else 0.0)
        elif not 0 <= self.mixing < 1:
            raise ValueError(f"mixing should be at least 0 and below 1 and is {self.mixing}")


@dataclass(frozen=True)
class StreamingDiLoCo(Overlapped):
    """Streaming DiLoCo's rule: alpha and beta of the outer Nesterov, and the rest; the paper's values."""

    name = "streaming-diloco"
    exchange = "an all-to-all and an all-gather"
    lr: float = 0.4
    momentum: float = 0.9
    overlap_steps: int = 1
    bits: int | None = 4
    _BITS: ClassVar[tuple[int, ...]] = (8, 4)


@dataclass(frozen=True)
class SparseLoCo(Overlapped):
    """SparseLoCo's rule: alpha, and k of 4,096 elements travel; as in the paper, of the whole model, waited for."""

    name = "sparseloco"
    exchange = "an all-gather"
    lr: float = 1.0
    top_k: int = 64
    fragments: int | None = 1
    bits: int | None = 2
    _BITS: ClassVar[tuple[int, ...]] = (2,)
    feedback: ClassVar[float] = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= 4096:
            raise ValueError(f"top_k should be how many of 4096 elements travel, 1 to 4096, and is {self.top_k}")


@dataclass(frozen=True)
class Acco(Shared):
    """ACCO's rule: gradients travel, and the inner optimizer updates shards. It has no options of its own."""

    name = "acco"
    timing = Timing.DELAYED
    frequency = 1


def nesterov(
    x: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, lr: float, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next x and momentum, of tensors of one shape and type. The momentum is zero before the first step."""
    momentum = beta * momentum + gradient
    return x - lr * (gradient + beta * momentum), momentum


def eager_gradient(
    own: torch.Tensor, own_before: torch.Tensor, mean_before: torch.Tensor, weight: float, weight_before: float
) -> torch.Tensor:
    """The pseudo-gradient of "eager": this rank's part of the last round, and all others' of the one before.

    `weight_before` is that with which `own_before` has counted.
    """
    return weight * own + (mean_before - weight_before * own_before)
