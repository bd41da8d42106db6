"""Flat memory for tensors of any strides."""

from __future__ import annotations

import pytest
import torch

from comm_core import InvalidUsage, Unsupported
from dear.backend.memory import apart, flat, landing, landings, sources


def test_plain_memory_is_used_as_it_is() -> None:
    tensor = torch.arange(6.0).view(2, 3).requires_grad_()
    assert flat(tensor).data_ptr() == tensor.data_ptr()
    memory, finish = landing(tensor)
    assert (memory.data_ptr(), finish) == (tensor.data_ptr(), None)


@pytest.mark.parametrize("filled", [False, True])
def test_what_arrives_beside_other_memory_is_brought_there(filled: bool) -> None:
    around = torch.zeros(4, 6)
    tensor = around[:, ::2].t()
    tensor.copy_(torch.arange(12.0).view(3, 4))
    memory, finish = landing(tensor, filled=filled)
    assert torch.equal(memory, torch.arange(12.0)) or not filled
    memory.copy_(torch.arange(12.0) + 1)
    assert finish is not None
    finish()
    assert torch.equal(tensor, torch.arange(12.0).view(3, 4) + 1)
    assert torch.equal(around[:, 1::2], torch.zeros(4, 3))


def test_conjugates_are_numbers_like_others() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert torch.equal(torch.view_as_real(flat(tensor)), torch.tensor([[1.0, -2.0], [3.0, 1.0]]))
    memory, finish = landing(tensor, filled=True)
    memory += 1
    assert finish is not None
    finish()
    assert torch.equal(tensor, torch.tensor([2 - 2j, 4 + 1j]))


def test_a_result_beside_what_it_is_made_of_is_apart() -> None:
    whole = torch.arange(6.0)
    part = whole[2:4]
    memory, finish = landing(part, beside=whole)
    memory.fill_(9.0)
    assert torch.equal(whole, torch.arange(6.0))
    assert finish is not None
    finish()
    assert whole.tolist() == [0, 1, 9, 9, 4, 5]


def test_a_source_inside_its_target_is_copied_but_for_its_own_part() -> None:
    target = torch.arange(6.0)
    own = target[2:4]
    assert apart(target[2:4], target, own).data_ptr() == own.data_ptr()
    copied = apart(target[0:2], target, own)
    assert copied.data_ptr() != target.data_ptr()
    assert copied.tolist() == [0, 1]
    other = torch.ones(2)
    assert apart(other, target).data_ptr() == other.data_ptr()


def test_chunks_of_one_tensor_are_that_tensor() -> None:
    whole = torch.arange(10.0)
    chunks = list(whole[1:].view(3, 3))
    assert sources(chunks).data_ptr() == whole[1:].data_ptr()
    memory, finish = landings(chunks)
    assert (memory.numel(), memory.data_ptr(), finish) == (9, whole[1:].data_ptr(), None)


@pytest.mark.parametrize(
    "lists",
    [
        lambda whole: [whole[0:2], whole[4:6]],  # with a gap
        lambda whole: [whole[2:4], whole[0:2]],  # in another order
        lambda whole: [whole[0:2], torch.ones(2)],
        lambda whole: [whole[::2][:2], whole[3:5]],
        lambda whole: [whole[0:2], whole[0:0], whole[5:6]],
    ],
)
def test_other_lists_are_copied(lists: object) -> None:
    assert callable(lists)
    tensors = lists(torch.arange(8.0))
    expected = torch.cat([tensor.reshape(-1) for tensor in tensors])
    assert torch.equal(sources(tensors), expected)
    memory, finish = landings(tensors)
    memory.copy_(expected + 1)
    assert finish is not None
    finish()
    assert torch.equal(torch.cat(tensors), expected + 1)


def test_neighbours_in_memory_of_two_tensors_are_no_list() -> None:
    """Their addresses may follow each other, and their storages do not."""
    whole = torch.arange(8.0)
    first, second = whole[:4], torch.frombuffer(whole.numpy(), dtype=torch.float32, offset=16)
    assert sources([first, second]).data_ptr() != first.data_ptr()


def test_lists_are_of_one_dtype() -> None:
    with pytest.raises(InvalidUsage, match=r"float32 and torch\.int64"):
        sources([torch.ones(2), torch.ones(2, dtype=torch.int64)])


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(Unsupported, match="dense"):
        flat(torch.eye(2).to_sparse())
