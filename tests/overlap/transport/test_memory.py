"""Flat memory, and layouts."""

from __future__ import annotations

import pytest
import torch

from overlap.transport import memory as dense
from overlap.transport.memory import copy_gradient, from_flat, is_dense, to_flat, view_like


def test_dense_layouts() -> None:
    block = torch.empty(2, 3, 4, 5)
    assert is_dense(block)
    assert is_dense(block.to(memory_format=torch.channels_last))
    assert is_dense(block.permute(3, 1, 0, 2))
    assert is_dense(torch.tensor(1.0))
    assert is_dense(torch.empty(0, 3))
    assert not is_dense(block[:, :2])
    assert not is_dense(torch.empty(3, 1).expand(3, 4))


def test_flat_and_back_keeps_values_and_layout() -> None:
    original = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    flat = to_flat(original, original)
    assert torch.equal(flat, original.permute(0, 2, 3, 1).reshape(-1))  # the order of memory
    back = from_flat(flat, original)
    assert torch.equal(back, original)
    assert back.stride() == original.stride()


def test_views_have_version_counters_of_their_own() -> None:
    flat = torch.zeros(10)
    one, other = view_like(flat, 0, torch.empty(5)), view_like(flat, 5, torch.empty(5))
    before = other._version
    one.add_(1)
    assert other._version == before
    assert flat[:5].sum() == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 5, 1000, 16_385, 32_768, 65_536, 70_001, 200_003])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_gradient_is_copied_bit_for_bit(dtype: torch.dtype, numel: int, offset: int) -> None:
    torch.manual_seed(1)
    gradient = torch.randn(numel + offset).to(dtype)[offset:]  # neither starts where a line of the cache does
    gradient[::7], gradient[1::7], gradient[2::7] = -0.0, 0.0, float("inf")
    gradient[3::7] = torch.finfo(dtype).smallest_normal / 4  # subnormal
    flat = torch.full((numel + 2 * offset + 9,), 3.0, dtype=dtype)
    copy_gradient(flat[offset : offset + numel], gradient)
    assert torch.equal(_bits(flat[offset : offset + numel]), _bits(gradient))
    place = flat[offset : offset + numel]
    place.copy_(gradient)
    copy_gradient(place, place)  # after zero_grad(set_to_none=False) backward adds to what is in the bucket
    assert torch.equal(_bits(place), _bits(gradient))
    assert bool((flat[:offset] == 3).all())
    assert bool((flat[offset + numel :] == 3).all())


@pytest.mark.parametrize(
    ("threads", "numel", "ours"), [(1, 100_000, True), (2, 100_000, True), (3, 100_000, False), (3, 1000, True)]
)
def test_large_copies_are_left_to_many_threads(
    threads: int, numel: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(source.numel())
        target.copy_(source)

    monkeypatch.setattr(dense, "copy_past_caches", copy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    gradient, target = torch.randn(numel), torch.empty(numel)
    copy_gradient(target, gradient)
    assert torch.equal(target, gradient)
    assert bool(copied) == ours


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16 if values.itemsize == 2 else torch.int32)


@pytest.mark.parametrize("numel", [12, 120_000])  # the second would be written past the caches
def test_gradients_of_other_layouts_and_kinds_are_copied_too(numel: int) -> None:
    torch.manual_seed(1)
    plain = torch.randn(2, 3, numel // 6)
    kinds = {
        "plain": plain,
        "nan": plain.clone().fill_(float("nan")),
        "permuted": plain.transpose(0, 2).contiguous().transpose(0, 2),
        "expanded": torch.randn(2, 3, 1).expand_as(plain),
        "every other": torch.randn(2, 3, numel // 3)[..., ::2],
        "negated on reading": torch._neg_view(torch.randn(2, 3, numel // 6)),
        "zero without memory": torch._efficientzerotensor(plain.shape),
        "of a graph": plain.clone().requires_grad_() * 1,
        "of another type": plain.double(),
    }
    assert kinds["negated on reading"].is_neg()
    for kind, gradient in kinds.items():
        for like in (plain, kinds["permuted"]):
            target = view_like(torch.empty(numel), 0, like)
            copy_gradient(target, gradient)
            assert torch.equal(target.isnan(), gradient.isnan()), kind
            assert torch.equal(target.nan_to_num(), gradient.float().nan_to_num()), kind
            assert not target.requires_grad, kind
