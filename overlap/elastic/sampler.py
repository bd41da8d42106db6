"""A sampler that divides a data set among the ranks there are, without samples that this epoch has used already."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from overlap.job.session import current
from overlap.transport.objects import allgather_object

__all__ = ["ElasticSampler", "order_of", "part_of"]


def order_of(length: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """All indices of a data set in the order of one epoch, the same for any number of ranks (pure)."""
    indices = list(range(length))
    if shuffle:
        random.Random(seed + epoch).shuffle(indices)
    return indices


def part_of(indices: list[int], rank: int, size: int) -> list[int]:
    """The indices that `rank` of `size` takes: every `size`-th one, some twice so that all ranks have as many (pure).

    Batch b of all ranks together is a stretch of `indices`, so that the same number of samples per step over all ranks
    gives the same batches at any world size.
    """
    total = math.ceil(len(indices) / size) * size
    filled = indices + [indices[k % len(indices)] for k in range(total - len(indices))]
    return filled[rank::size]


class ElasticSampler(Sampler[int]):
    """Divides a data set among ranks, and after a restart what is left of the epoch among the ranks there are then.

    Args:
        dataset: what to sample from; its length counts.
        shuffle: in another order every epoch.
        seed: the same on all ranks.

    Tell it with :meth:`record_batch` what was trained on, and give it to a :class:`TorchState`, which commits it. The
    order of an epoch depends on seed and epoch alone, so with the same number of samples per step over all ranks a job
    that continues at another world size goes on with the batches that the old one would have taken.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self._news: list[int] = []  # recorded here and not known to the other ranks yet
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing is processed. At its beginning on every rank, not when one is continued."""
        self.epoch = epoch
        self.processed_indices = set()
        self._news = []
        self.reset()

    def reset(self) -> None:
        """Divide what is not processed among the ranks there are now. It takes effect with the next iteration."""
        self.rank, self.num_replicas = current().comm.rank, current().comm.size
        order = order_of(len(self.dataset), shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        self.remaining_indices = [index for index in order if index not in self.processed_indices]
        self.indices = part_of(self.remaining_indices, self.rank, self.num_replicas)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This rank trained on batch `batch_idx` of this iteration, in batches of `batch_size` of its samples."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """This rank trained on these samples of the data set."""
        new = list(indices)
        self.processed_indices.update(new)
        self._news += new

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples in this rank's batch `batch_idx` of this iteration."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def exchange(self) -> None:
        """Learn what the other ranks recorded. On every rank; a commit calls it."""
        for news in allgather_object(current().comm, self._news):
            self.processed_indices.update(news)
        self._news = []

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, and divide what is left among the ranks there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self._news = []
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
