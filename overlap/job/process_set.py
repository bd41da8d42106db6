"""Process sets: some of the job's ranks, for collectives among them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ProcessSet", "global_process_set"]


class ProcessSet:
    """Ranks of the job that communicate among themselves; made by its ranks, registered by ``init`` or ``add_process_set``.

    `ranks_or_comm` are ranks of the job, sorted here. Raises ``ValueError`` for anything else, Horovod's MPI communicator
    included: pass the ranks of its processes.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                f"a ProcessSet is made of ranks and was given {type(ranks_or_comm).__name__}; of a communicator, pass the "
                "ranks that its processes have in this job"
            )
        given = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in given):
            raise ValueError(f"a ProcessSet is made of ranks (integers) and was given {given}")
        if len(set(given)) != len(given):
            raise ValueError(f"a ProcessSet names each rank once and was given {given}")
        self.ranks: list[int] | None = sorted(given)
        self.process_set_id: int | None = None
        self._me: int | None = None

    def _register(self, number: int, ranks: Iterable[int], me: int) -> None:
        self.process_set_id, self.ranks, self._me = number, list(ranks), me

    def _invalidate(self) -> None:
        self.process_set_id = self._me = None

    def size(self) -> int | None:
        """How many ranks it has; None unless it is registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's number within the set; None unless it is registered.

        Raises ``ValueError`` when this process is not in the set.
        """
        if self.process_set_id is None or self.ranks is None or self._me is None:
            return None
        if self._me not in self.ranks:
            raise ValueError(f"rank {self._me} is not in the process set with ranks {self.ranks}")
        return self.ranks.index(self._me)

    def included(self) -> bool | None:
        """Whether this process is in the set; None unless it is registered."""
        return None if self._me is None or self.ranks is None else self._me in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


#: All ranks of the job; registered while the job is initialised.
global_process_set = ProcessSet([])
