"""What computation costs where the same cores also move bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cores"]


@dataclass(frozen=True, slots=True)
class Cores:
    """The `count` cores of a machine on which so many `ranks` compute, each with so many `threads`.

    Raises ``ValueError`` where one of them is below 1.
    """

    count: int
    ranks: int
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("count", "ranks", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of cores should be at least 1 and is {getattr(self, name)}")

    def stretched(self, used: float) -> float:
        """The seconds that a second of computation takes while communication keeps so many cores of each rank busy.

        Idle cores move bytes first. What is left is taken from those that compute: computation lasts longer by these
        processor seconds, divided by the cores that share them. The kernel shares fairly, so it keeps half of its cores.
        """
        computing = min(self.count, self.ranks * self.threads)
        taken = max(0.0, self.ranks * used - (self.count - computing))
        return computing / max(computing - taken, computing / 2)
