"""The inner optimizer's mean learning rate over the local steps of a round, in which schedulers may change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["InnerRates"]


class InnerRates:
    """The mean learning rates of one rank, by slot. `now` gives the learning rates as they are."""

    def __init__(self, now: Callable[[], Mapping[int, float]]) -> None:
        self._now = now
        self.begin_round()

    def begin_round(self) -> None:
        self._noted: dict[int, tuple[float, int]] = {}  # sum and number

    def stepped(self) -> None:
        """Count a local step. A slot that was added in the round counts from its own first step on."""
        for index, rate in self._now().items():
            total, steps = self._noted.get(index, (0.0, 0))
            self._noted[index] = total + rate, steps + 1

    def mean(self) -> dict[int, float]:
        """The mean over the steps of the round; for a slot without a step, the learning rate as it is."""
        return {**self._now(), **{index: total / steps for index, (total, steps) in self._noted.items()}}

    def take_over(self, means: Mapping[int, float]) -> None:
        """Take `means` as the means of the round."""
        self._noted = {index: (mean, 1) for index, mean in means.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint inside a round keeps."""
        return {"inner_rates": dict(self._noted)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._noted = dict(state.get("inner_rates", {}))
