"""Keeps rows that ``nn.Embedding(max_norm=…)`` shortens in forward the same on all ranks, as in one process.

Each rank looks up the rows of its own data. One process on the whole batch shortens the rows of all of it, before it
updates them. So where a round is closed, ranks tell each other which rows they have looked up, also to evaluate, and each
shortens all of these in its replica before anything is updated. Two small operations in a step, where models do so.

[Note: until nothing changes]
A row that is as long as it may be is left alone, but for rounding: shortened twice it may differ from what once gave. Ranks
have shortened a row as often as they have looked it up, so all go on until nothing changes, which is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from overlap.core.feature import Feature
from overlap.features.lookups import listen
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object
from overlap.transport.operation import all_gather

__all__ = ["RenormedRows", "announced", "shorten"]

_MOST = 8  # times that a row is shortened; the second one is rounding

Rule = tuple[str, float, float]  # a weight's name, the largest norm, and which norm


class RenormedRows(Feature):
    """Makes rows that any rank has looked up and shortened equally short on all ranks.

    Args:
        calls: its operations follow the script's calls.
        parameters: gives the parameters that replicas have alike, by name, without waiting for their values.
        early: updates run before ``step()``, which is when all ranks can know whose rows were looked up.
    """

    def __init__(
        self, calls: Communicator, parameters: Callable[[], Mapping[str, torch.Tensor]], *, early: bool
    ) -> None:
        self._calls, self._parameters, self._early = calls, parameters, early
        self._known: dict[int, tuple[str, torch.Tensor]] = {}  # parameters, kept so that no other gets the number
        self._strange: set[int] = set()  # tensors of this round that are none
        self._rows: dict[Rule, list[torch.Tensor]] = {}  # since the last round, on this rank
        self._agreed: list[Rule] = []  # of all ranks
        listen(self)

    def looked_up(self, weight: torch.Tensor, rows: torch.Tensor, max_norm: float, norm_type: float) -> None:
        """Note, in forward, the rows that this rank looks up."""
        name = self._name_of(weight)
        if name is None:
            return
        if self._early:
            raise ValueError(
                f"forward shortens rows of {name!r} (max_norm={max_norm}), which all ranks have to do alike before any "
                "update, and eager=True updates before step(): use eager=False"
            )
        kept = self._rows.setdefault((name, float(max_norm), float(norm_type)), [])
        kept.append(rows.detach().reshape(-1).clone())
        if len(kept) > 1 and sum(map(torch.Tensor.numel, kept)) > 2 * weight.shape[0]:  # a whole evaluation, say
            kept[:] = [torch.cat(kept).unique()]

    def _name_of(self, weight: torch.Tensor) -> str | None:
        number = id(weight)
        if number not in self._known and number not in self._strange:
            self._known |= {id(parameter): (name, parameter) for name, parameter in self._parameters().items()}
            if number not in self._known:
                self._strange.add(number)
        return self._known[number][0] if number in self._known else None

    @property
    def names(self) -> set[str]:
        """The names of weights whose replicas may differ between forward and ``step()``, as far as this rank knows."""
        return {name for name, _, _ in (*self._agreed, *self._rows)}

    def news(self) -> bool:
        return any(rule not in self._agreed for rule in self._rows)

    def closed(self, news: bool, leader: Callable[[], int], factor: Callable[[], float]) -> None:
        if news:
            told = allgather_object(self._calls, sorted(self._rows))
            self._agreed = sorted(set(self._agreed).union(*told))
        if not self._agreed:
            return
        everybodys = self._exchanged()
        self._rows.clear()
        self._strange.clear()
        parameters = self._parameters() if everybodys else {}
        for (name, max_norm, norm_type), rows in everybodys.items():
            weight = parameters[name].data  # no version tells of it: graphs that are kept stay valid
            shorten(weight, rows.to(weight.device), max_norm, norm_type)

    def _exchanged(self) -> dict[Rule, torch.Tensor]:
        """The rows that any rank has looked up, of each rule for which there are some. On every rank."""
        comm = self._calls
        mine = [_united(self._rows.get(rule, [])) for rule in self._agreed]
        counts = torch.tensor([len(rows) for rows in mine], device="cpu")
        table = counts.new_empty((comm.size, len(mine)))
        comm.run(all_gather(counts, table.view(-1), label="looked up"))
        sizes = table.sum(1).tolist()
        if not any(sizes):
            return {}
        rows = counts.new_empty(sum(sizes))
        comm.run(all_gather(torch.cat(mine), rows, counts=sizes, label="looked-up rows"))
        parts = iter(rows.split(table.view(-1).tolist()))  # rank by rank, rule by rule
        found: dict[Rule, list[torch.Tensor]] = {rule: [] for rule in self._agreed}
        for _ in range(comm.size):
            for rule in self._agreed:
                found[rule].append(next(parts))
        return {rule: rows for rule, those in found.items() if len(rows := _united(those))}


def _united(rows: list[torch.Tensor]) -> torch.Tensor:
    """Each once, on the CPU."""
    return torch.cat(rows).unique().to("cpu", torch.int64) if rows else torch.empty(0, dtype=torch.int64, device="cpu")


@torch.no_grad()
def shorten(weight: torch.Tensor, rows: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """Make `rows` of `weight` no longer than `max_norm`, in place: [Note: until nothing changes]."""
    for _ in range(_MOST):
        before = weight[rows]
        torch.embedding_renorm_(weight, rows, max_norm, norm_type)
        if torch.equal(before, weight[rows]):
            return


def announced(model: torch.nn.Module | None) -> set[str]:
    """The names of weights whose rows modules of `model` shorten."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = () if model is None else model.named_modules()
    found = {name: module for name, module in modules if isinstance(module, kinds) and module.max_norm is not None}
    return {f"{name}.weight" if name else "weight" for name in found}
