"""Makes pickles of tensors in a flat buffer hold their own elements, without the buffer around them.

What ``state_dict()`` hands out, parameters and gradients are views of a bucket. torch saves a view with all of the memory
behind it: the 440 bytes of a bias would become the 25 MB of its bucket. Whoever makes a buffer calls
:func:`cut_when_pickled` once; from then on plain tensors in it are pickled as copies of their own size. Two views of the
same elements, as of tied weights, are one copy in one file, as in torch.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["cut_when_pickled"]

_FEW = 64  # references that may have expired without being looked for


class _References(dict[Any, StorageWeakRef]):
    """Of storages. Those that have expired are left out whenever there are twice as many as lived the last time.

    So what all of these looks cost together grows with the number of storages, not with its square.
    """

    _most = _FEW

    def remember(self, key: Any, storage: torch.UntypedStorage) -> None:
        if len(self) >= self._most:
            for expired in [known for known, reference in self.items() if reference.expired()]:
                del self[expired]
            self._most = max(_FEW, 2 * len(self))
        self[key] = StorageWeakRef(storage)


# By the address of a storage, which is nobody else's as long as a weak reference to it is kept.
_buffers = _References()
# By the view and its version: the storage of its copy, which whoever writes a file keeps until that is written.
_copies = _References()


def cut_when_pickled(buffer: torch.Tensor) -> None:
    """Let views of `buffer` be pickled without the rest of it, in this process, from now on."""
    if not _buffers:
        copyreg.pickle(torch.Tensor, _reduced)  # type: ignore[arg-type]
    storage = buffer.untyped_storage()
    _buffers.remember(storage._cdata, storage)


def _reduced(tensor: torch.Tensor) -> Any:
    """What pickle asks for; `copy.copy()` too, which copies the elements of a view then."""
    if tensor.layout is torch.strided and tensor.device.type != "meta":
        storage = tensor.untyped_storage()
        if storage._cdata in _buffers and tensor.numel() * tensor.element_size() < storage.nbytes():
            tensor = _cut(tensor, storage)
    return tensor.__reduce_ex__(2)  # torch.save's protocol; a tensor's is the same in all


def _cut(view: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    version = -1 if view.is_inference() else view._version
    place = storage._cdata, int(view.storage_offset()), view.shape, view.stride(), version
    found = _copies.get(place)
    known = None if found is None or version < 0 else torch.UntypedStorage._new_with_weak_ptr(found.cdata)
    if known is None:
        plain = view.detach().clone()
        _copies.remember(place, plain.untyped_storage())
    else:
        plain = torch.empty_strided((0,), (1,), dtype=view.dtype, device=view.device)
        plain.set_(known, 0, view.shape, torch.empty_like(view, device="meta").stride())
    plain.requires_grad_(view.requires_grad)
    plain.__dict__.update(view.__dict__)
    return plain
