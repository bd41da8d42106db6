"""Views of a flat buffer are saved by themselves; everything else is saved as ever."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from overlap.transport import cut_pickles
from overlap.transport.cut_pickles import cut_when_pickled


def _saved(value: Any) -> tuple[int, Any]:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return len(file.getvalue()), torch.load(file, weights_only=True)


def _buffer() -> torch.Tensor:
    flat = torch.arange(100_000, dtype=torch.float32)
    cut_when_pickled(flat)
    return flat


def test_a_view_is_saved_by_itself_with_its_layout() -> None:
    flat = _buffer()
    plain, turned = flat[10:110].view(10, 10), flat[200:300].view(4, 5, 5).permute(2, 0, 1)
    size, (one, two) = _saved((plain, turned))
    assert size < 4000
    assert torch.equal(one, plain)
    assert torch.equal(two, turned)
    assert two.stride() == turned.stride()
    assert torch.equal(pickle.loads(pickle.dumps(plain)), plain)
    assert len(pickle.dumps(plain)) < 4000
    noted: Any = flat[:10].detach().requires_grad_()
    noted.note = "mine"
    again = pickle.loads(pickle.dumps(noted))
    assert (again.requires_grad, again.note) == (True, "mine")
    parameter = torch.nn.Parameter(torch.zeros(10))
    parameter.data = flat[:10]
    size, loaded = _saved(parameter)
    assert size < 4000
    assert isinstance(loaded, torch.nn.Parameter)
    assert torch.equal(loaded, parameter)


def test_tied_views_stay_tied_in_one_file_and_every_file_has_the_values_of_its_moment() -> None:
    flat = _buffer()
    alone, _ = _saved({"a": flat[:2500]})
    both, loaded = _saved({"a": flat[:2500], "b": flat[:2500], "part": flat[5:9]})
    assert both < alone + 1000
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    flat.add_(1)
    _, later = _saved(flat[:2500])
    assert torch.equal(later, loaded["a"] + 1)
    writer = pickle.Pickler(io.BytesIO())
    writer.dump(flat[:2500])  # whose copy it keeps
    flat.add_(1)
    assert torch.equal(pickle.loads(pickle.dumps(flat[:2500])), flat[:2500])
    flat.sub_(1)
    with torch.inference_mode():
        _, unversioned = _saved(flat[:2500].detach())
    assert torch.equal(unversioned, later)


def test_other_tensors_are_saved_as_ever() -> None:
    _buffer()
    other = torch.zeros(100_000)
    size, loaded = _saved(other[:10])
    assert size > 400_000
    assert loaded.untyped_storage().nbytes() == 400_000
    for value in (torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"), torch.tensor(1 + 2j), torch.zeros(0)):
        assert _saved(value)[1].shape == value.shape
    tensor = torch.zeros(2)
    assert copy.copy(tensor).data_ptr() == tensor.data_ptr()


def test_little_is_kept_of_buffers_that_are_gone() -> None:
    flat = _buffer()
    for end in range(1, 400):
        _saved(flat[:end])
        _buffer()
    gc.collect()
    for table in (cut_pickles._copies, cut_pickles._buffers):
        living = sum(not reference.expired() for reference in table.values())
        assert len(table) <= cut_pickles._FEW + 2 * living


def test_a_buffer_more_is_no_look_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, expired = [], StorageWeakRef.expired
    monkeypatch.setattr(StorageWeakRef, "expired", lambda reference: looks.append(1) or expired(reference))
    kept = [torch.zeros(2) for _ in range(500)]
    for buffer in kept:
        cut_when_pickled(buffer)
    assert len(looks) < 5 * len(kept)
