"""Which way tensors of a model take, for every combination of what ranks may find."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overlap.transport.cuda.route import (
    Facts,
    Route,
    RouteError,
    Wish,
    choose,
    common_device,
    refuse_capture,
    shares_cards,
)

NCCL = (2, 29, 7)
A, B = (Facts("cuda", f"host, GPU-{name}", NCCL) for name in "ab")


def test_without_a_gpu_nothing_changes_whatever_is_wished() -> None:
    for wish in Wish:
        assert choose([Facts(), Facts()], wish) == (Route.HOST, "")


def test_alone_nothing_travels() -> None:
    assert choose([A], Wish.AUTO) == (Route.ALONE, "")
    assert choose([replace(A, trouble="no NCCL")], Wish.AUTO) == (Route.ALONE, "")


def test_a_card_for_each_rank_and_one_nccl() -> None:
    assert choose([A, B], Wish.AUTO) == (Route.NCCL, "")
    assert choose([A, B], Wish.NCCL) == (Route.NCCL, "")


@pytest.mark.parametrize("wish", [Wish.AUTO, Wish.NCCL])
def test_operations_without_one_order_do_not_go_over_nccl(wish: Wish) -> None:
    with pytest.raises(RouteError, match="as ranks like"):
        choose([A, B], wish, "as ranks like")
    assert choose([A, B], Wish.STAGED, "as ranks like")[0] is Route.STAGED
    assert choose([A], Wish.AUTO, "as ranks like")[0] is Route.ALONE
    assert choose([Facts(), Facts()], Wish.AUTO, "as ranks like")[0] is Route.HOST
    assert choose([A, B], Wish.STAGED) == (Route.STAGED, "DEAR_CUDA_TRANSPORT=staged asks for it")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ([A, replace(B, trouble="NCCL was not found")], "rank 1: NCCL was not found"),
        ([A, replace(B, nccl=(2, 30, 1))], "rank 0 has NCCL 2.29.7 and rank 1 has NCCL 2.30.1"),
        ([A, B, A], "ranks 0 and 2 share a GPU (host, GPU-a), which NCCL 2.29.7 does not allow"),
        (
            [replace(A, nccl=(2, 30, 1)), replace(A, nccl=(2, 30, 1))],
            "ranks 0 and 1 share a GPU (host, GPU-a); give each rank one by torch.cuda.set_device, or set "
            "NCCL_MULTI_RANK_GPU_ENABLE=1",
        ),
    ],
)
def test_otherwise_through_the_host_with_the_reason(facts: list[Facts], reason: str) -> None:
    route, said = choose(facts, Wish.AUTO)
    assert route is Route.STAGED
    assert said.startswith(reason)
    with pytest.raises(RouteError, match=r"DEAR_CUDA_TRANSPORT=nccl cannot be had: "):
        choose(facts, Wish.NCCL)


def test_ranks_may_share_a_card_where_nccl_and_the_environment_allow_it() -> None:
    shared = replace(A, nccl=(2, 30, 1), shares=True)
    assert choose([shared, shared], Wish.AUTO) == (Route.NCCL, "")
    assert choose([shared, replace(shared, shares=False)], Wish.AUTO)[0] is Route.STAGED
    assert shares_cards({"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    assert not shares_cards({})


def test_models_in_different_places_raise_with_both() -> None:
    with pytest.raises(RouteError, match="the model is on cuda on rank 0 and on cpu on rank 1"):
        choose([A, Facts()], Wish.AUTO)
    with pytest.raises(RouteError, match=r"rank 1: strategy 'x' sends"):
        choose([A, replace(B, refusal="strategy 'x' sends")], Wish.AUTO)


class _At:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([], "cpu"), (["cpu"], "cpu"), (["cuda:1", "cuda:1"], "cuda:1"), (["cpu", "cuda:0", "cpu"], "cuda:0")],
)
def test_the_device_of_a_model(devices: list[str], expected: str) -> None:
    assert common_device((f"p{n}", _At(device)) for n, device in enumerate(devices)) == torch.device(expected)  # type: ignore[misc]


def test_two_cards_and_other_devices_are_refused() -> None:
    with pytest.raises(RouteError, match="parameter 'a' is on cuda:0 and 'b' on cuda:1"):
        common_device([("a", _At("cuda:0")), ("b", _At("cuda:1"))])  # type: ignore[list-item]
    with pytest.raises(RouteError, match="parameter 'a' is on meta; only CPU and CUDA"):
        common_device([("a", _At("meta"))])  # type: ignore[list-item]


def test_what_a_capture_is_told() -> None:
    assert refuse_capture(False) is None
    assert "make_graphed_callables" in (refuse_capture(True) or "")
