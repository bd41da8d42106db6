"""CO2's outer step (Sun et al., ICLR 2024, arXiv 2401.16265, section 3), as functions of tensors. Pure.

Every rank starts round t at the same parameters x[t] and makes its own local steps. While it does, the mean a[t-1] over
ranks of what round t-1 ended in arrives, and with it the start of round t+1 is made:

    m[t]   = clip(beta m[t-1] + (x[t-1] - a[t-1]) / gap[t], -phi, phi)
    x[t+1] = x[t] - alpha m[t]

The round's own end is sent off and counts one round later. So with alpha = 1, beta = 0, no clipping and gap = 1, the
progress of a round is applied whole, one round late: periodic averaging, delayed. With x[t] = x[t-1] (nothing moved
meanwhile) it is periodic averaging itself.

[Note: the staleness gap]
What a[t-1] proposes was found from x[t-1] and is applied to x[t]. The paper divides it by a gap Lambda[t] between the two,
whose formula we could not confirm; its authors' program divides by a constant that the user gives. Here the gap is that
of Barkai, Hakimi and Schuster, "Gap-Aware Mitigation of Gradient Staleness" (ICLR 2020), with outer steps in the place
of steps: one plus the distance, in units of the longest outer step so far.

    gap[t] = 1 + |x[t] - x[t-1]| / max over s <= t of |x[s] - x[s-1]|        from 1, nothing moved, to 2
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["OuterRule", "outer_step"]


@dataclass(frozen=True)
class OuterRule:
    """alpha, beta, phi (None: no clipping), and the gap: True measures it, False is 1, a number is that constant.

    Raises ``ValueError`` for values outside of their ranges.
    """

    lr: float = 1.0
    momentum: float = 0.2
    clip: float | None = 1.0
    gap_penalty: bool | float = True

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"outer_lr should be above 0 and is {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer_momentum should be at least 0 and below 1 and is {self.momentum}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"outer_clip should be above 0, or None for no clipping, and is {self.clip}")
        if not isinstance(self.gap_penalty, bool) and not (self.gap_penalty > 0 and math.isfinite(self.gap_penalty)):
            raise ValueError(f"gap_penalty should be True, False or a number above 0 and is {self.gap_penalty}")

    @property
    def measures_gap(self) -> bool:
        """Whether the gap depends on how far the parameters moved."""
        return self.gap_penalty is True

    def gap(self, moved: float, longest: float) -> float:
        """[Note: the staleness gap]. `moved`: the norm of the last outer step, `longest`: of the longest, it included."""
        if not self.measures_gap:
            return 1.0 if self.gap_penalty is False else float(self.gap_penalty)
        return 1.0 + moved / longest if longest > 0 else 1.0


def outer_step(
    rule: OuterRule,
    started: torch.Tensor,
    mean: torch.Tensor,
    current: torch.Tensor,
    momentum: torch.Tensor,
    gap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next round's start and the new momentum; new tensors, shaped as the arguments, which all have one shape and type.

    `started` is where the averaged round began, `mean` where it ended on average, `current` where the current one began.
    """
    momentum = rule.momentum * momentum + (started - mean) / gap
    if rule.clip is not None:
        momentum = momentum.clamp(-rule.clip, rule.clip)
    return current - rule.lr * momentum, momentum
