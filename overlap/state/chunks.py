"""A rank's share of a tensor as ``torch.distributed.checkpoint`` takes it: chunks of one tensor of the whole shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from overlap.state.boxes import Box, Place, Region, boxes, dims_in_memory
from overlap.transport.memory import is_dense, to_flat

__all__ = ["Chunked"]


class Chunked(torch.Tensor):
    """Stands for a tensor of which this rank has the elements [start, stop), in the order in which `like` lies in memory.

    It has the shape of the whole tensor, in which `like` lies at `region`; `held` has the values, 1-D, and its dtype and
    device. It is for ``torch.distributed.checkpoint`` alone, which writes what is held, and reads into it. Copies of it,
    which ``async_save()`` makes, have values of their own. Anything else raises ``TypeError``.
    """

    held: torch.Tensor
    begin: int
    dims: tuple[int, ...]
    region: Region

    @staticmethod
    def __new__(cls, like: torch.Tensor, start: int, held: torch.Tensor, region: Region) -> Chunked:
        dims = dims_in_memory(like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride())
        return cls._of(region, held, start, dims)

    @classmethod
    def _of(cls, region: Region, held: torch.Tensor, begin: int, dims: tuple[int, ...]) -> Chunked:
        made: Chunked = torch.Tensor._make_wrapper_subclass(cls, region.shape, dtype=held.dtype, device=held.device)
        made.held, made.begin, made.dims, made.region = held, begin, dims, region
        return made

    @classmethod
    def part(cls, values: torch.Tensor, region: Region) -> Chunked:
        """What lies at `region` of a whole tensor: all of `values`, whose memory it is if that has no gaps."""
        flat = values.detach().as_strided((values.numel(),), (1,)) if is_dense(values) else to_flat(values, values)
        return cls(values, 0, flat, region)

    def __init__(self, like: torch.Tensor, start: int, held: torch.Tensor, region: Region) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the base's has another name for each argument
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.new_empty.default:  # by which async_save() begins a copy of it
            mine = args[0]
            return cls._of(mine.region, mine.held, mine.begin, mine.dims)
        if function in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            mine = args[0]
            return cls._of(mine.region, function(mine.held, **(kwargs or {})), mine.begin, mine.dims)
        raise TypeError(
            f"{function}: this rank holds a share of the tensor, which is for torch.distributed.checkpoint alone; "
            "model.state_dict() and optimizer.state_dict() have whole values"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        end, part = self.begin + self.held.numel(), f" of a part {self.region.local}" if self.region.divided else ""
        return f"Chunked({tuple(self.shape)}, {self.dtype}, elements {self.begin} to {end}{part})"

    @property
    def pieces(self) -> Iterator[tuple[Place, torch.Tensor]]:
        """What this rank has of the whole tensor: boxes of it, and views of ``held`` in their shape."""
        local = self.region.local
        for box in boxes(local, self.begin, self.begin + self.held.numel(), self.dims):
            for place in self.region.places(box):
                yield place, self._part(box, place)

    def _part(self, box: Box, place: Place) -> torch.Tensor:
        flat = self.held[box.start - self.begin : box.stop - self.begin]
        there = [self.dims.index(dim) for dim in range(len(self.dims))]
        found = flat.view([box.sizes[dim] for dim in self.dims]).permute(there)
        for dim, (start, length) in enumerate(zip(place.inside, place.sizes, strict=True)):
            found = found.narrow(dim, start, length)
        return found

    # - What torch.distributed.checkpoint calls

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.held)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(place.offsets), sizes=torch.Size(place.sizes))
            for place, _ in self.pieces
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for place, values in self.pieces:
            if torch.Size(place.offsets) == index.offset:
                return values
        raise ValueError(f"{self!r} has no chunk at {index.offset} for {index.fqn!r}")
