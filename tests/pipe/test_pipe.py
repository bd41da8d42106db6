"""Stages in one process: values, gradients and statistics are those of the Sequential on one micro-batch after another."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipe
from pipe.balance import balanced
from pipe.micro_batches import cut
from pipe.schedule import bubble, stand_in, ticks

MODES = ("always", "except_last", "never")


def _layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def _batch(rows: int = 12) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))


def _gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in module.parameters()]


def _in_turn(module: nn.Module, x: torch.Tensor, chunks: int) -> torch.Tensor:
    """The module on one micro-batch after the other."""
    return torch.cat([module(part) for part in x.chunk(chunks)])


def test_ticks_are_those_of_gpipe() -> None:
    assert [list(tick) for tick in ticks(3, 2)] == [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    for micro_batches in range(1, 6):
        for stages in range(1, 5):
            found = [pair for tick in ticks(micro_batches, stages) for pair in tick]
            assert sorted(found) == [(i, j) for i in range(micro_batches) for j in range(stages)]
            waits = sum(stages - len(tick) for tick in ticks(micro_batches, stages))
            assert waits / stages / (micro_batches + stages - 1) == pytest.approx(bubble(micro_batches, stages))


def test_a_schedule_stands_in_for_one_that_cannot_have_so_many_micro_batches() -> None:
    assert [stand_in("1f1b", count, 3) for count in (1, 2, 3, 4)] == ["gpipe", "gpipe", "1f1b", "1f1b"]
    found = [stand_in("interleaved1f1b", count, 2) for count in (1, 2, 3, 4, 5, 6, 7)]
    assert [name == "interleaved1f1b" for name in found] == [True, True, True, True, False, True, False]
    assert stand_in("loopedbfs", 5, 2) == "loopedbfs"
    assert bubble(4, 3, 2) == pytest.approx(2 / 10)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 2, 4, 5])
@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 2, 2]])
def test_training_equals_the_sequential_bit_for_bit(checkpoint: str, chunks: int, balance: list[int]) -> None:
    plain = _layers()
    piped = pipe.Pipe(
        copy.deepcopy(plain), balance, devices=["cpu"] * len(balance), chunks=chunks, checkpoint=checkpoint
    )
    for _ in range(3):  # threads run stages from the second pass on
        x, y = _batch().requires_grad_(), _batch().requires_grad_()
        ours, theirs = piped(x), _in_turn(plain, y, chunks)
        assert torch.equal(ours, theirs)
        for loss, module in ((ours, piped), (theirs, plain)):
            module.zero_grad()
            loss.square().mean().backward()
        for mine, wanted in zip(_gradients(piped), _gradients(plain), strict=True):
            assert torch.equal(mine, wanted)
        assert torch.equal(x.grad, y.grad)


def test_one_micro_batch_is_the_plain_module() -> None:
    plain = _layers()
    piped = pipe.Pipe(copy.deepcopy(plain), [3, 2], devices=["cpu", "cpu"])
    assert torch.equal(piped(_batch()), plain(_batch()))
    assert [tuple(each.shape) for each in piped.parameters()] == [tuple(each.shape) for each in plain.parameters()]
    assert (len(piped), piped.balance, piped.chunks, len(piped.partitions)) == (5, [3, 2], 1, 2)
    assert piped[4] is list(piped)[4]


@pytest.mark.parametrize("checkpoint", MODES)
def test_dropout_draws_what_the_recomputation_draws(checkpoint: str) -> None:
    """A stage that drops without parameters: the gradient is 2 where the value came through, and 0 elsewhere."""
    module = nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5))
    piped = pipe.Pipe(module, [1, 1, 1], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint)
    for _ in range(3):
        x = torch.ones(16, 10, requires_grad=True)
        y = piped(x)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())
        assert set(y.detach().unique().tolist()) == {0.0, 4.0}


def test_a_stage_that_begins_to_draw_late_is_told() -> None:
    drops = nn.Dropout(0.0)
    piped = pipe.Pipe(nn.Sequential(nn.Identity(), drops), [1, 1], devices=["cpu", "cpu"], chunks=4)
    piped(_batch())
    drops.p = 0.5
    with pytest.raises(RuntimeError, match="begun to draw random numbers"):
        piped(_batch())


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("rows", [12, 3])
def test_deferred_batch_norm_counts_the_batch_once(checkpoint: str, chunks: int, rows: int) -> None:
    norm = nn.BatchNorm1d(6)
    plain = copy.deepcopy(norm)
    piped = pipe.Pipe(
        nn.Sequential(norm, nn.Linear(6, 2)),
        [1, 1],
        devices=["cpu", "cpu"],
        chunks=chunks if rows > 4 else 1,
        checkpoint=checkpoint,
        deferred_batch_norm=True,
    )
    for _ in range(2):
        plain(_batch(rows))
        piped(_batch(rows)).sum().backward()
    for ours, theirs in zip(piped.partitions[0][0].buffers(), plain.buffers(), strict=False):
        torch.testing.assert_close(ours, theirs)
    piped.eval()
    plain.eval()
    torch.testing.assert_close(piped.partitions[0][0](_batch()), plain(_batch()))


@pytest.mark.parametrize("checkpoint", MODES)
def test_plain_batch_norm_counts_each_micro_batch_once(checkpoint: str) -> None:
    norm = nn.BatchNorm1d(6)
    plain = copy.deepcopy(norm)
    piped = pipe.Pipe(nn.Sequential(norm, nn.Linear(6, 2)), [1, 1], chunks=3, checkpoint=checkpoint)
    _in_turn(plain, _batch(), 3)
    piped(_batch()).sum().backward()
    for ours, theirs in zip(piped.partitions[0][0].buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pipe.skippable(stash=["early"])
class Early(nn.Module):
    """Stashes what it was given."""

    def forward(self, x: torch.Tensor) -> Any:
        yield pipe.stash("early", x)
        return x * 2


@pipe.skippable(pop=["early"])
class Late(nn.Module):
    """Adds what was stashed."""

    def forward(self, x: torch.Tensor) -> Any:
        early = yield pipe.pop("early")
        return x + 3 * early


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("balance", [[5], [1, 3, 1], [2, 2, 1]])
def test_skip_connections(checkpoint: str, balance: list[int]) -> None:
    first, second = pipe.Namespace(), pipe.Namespace()
    module = nn.Sequential(
        Early().isolate(first), Early().isolate(second), nn.Tanh(), Late().isolate(second), Late().isolate(first)
    )
    piped = pipe.Pipe(module, balance, devices=["cpu"] * len(balance), chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        x, y = _batch().requires_grad_(), _batch().requires_grad_()
        ours = piped(x)
        theirs = torch.tanh(4 * y) + 6 * y + 3 * y
        assert torch.equal(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_skip_connections_work_in_a_plain_sequential() -> None:
    x = _batch()
    assert torch.equal(nn.Sequential(Early(), nn.Tanh(), Late())(x), torch.tanh(2 * x) + 3 * x)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Late()], "layer '0' pops 'early', which no layer before has stashed"),
        ([Early(), nn.Tanh()], "layer '0' stashes 'early', which no layer pops"),
        ([Early(), Early(), Late()], "layer '1' stashes 'early', as layer '0' has"),
    ],
)
def test_skip_connections_that_do_not_fit(layers: list[nn.Module], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pipe.Pipe(nn.Sequential(*layers), [len(layers)])


class _Sum(nn.Module):
    def forward(self, values: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        return values["a"] + values["b"], values


class _Back(nn.Module):
    def forward(self, values: tuple[torch.Tensor, dict[str, Any]]) -> dict[str, Any]:
        return {"sum": values[0], "scaled": values[1]["a"] * values[1]["factor"]}


def test_a_layer_may_stand_in_the_sequential_twice() -> None:
    act = nn.Tanh()
    plain = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    x = torch.randn(6, 4)
    assert torch.equal(pipe.Pipe(plain, [2, 2], devices=["cpu", "cpu"], chunks=1)(x), plain(x))


def test_any_structure_of_tensors() -> None:
    piped = pipe.Pipe(nn.Sequential(_Sum(), _Back()), [1, 1], devices=["cpu", "cpu"], chunks=3)
    a, b = _batch(), _batch() + 1
    found = piped({"a": a, "b": b, "factor": 2})
    assert torch.equal(found["sum"], a + b)
    assert torch.equal(found["scaled"], a * 2)
    assert len(cut((a, b), 5)) == 4  # as torch.chunk cuts 12 rows


def test_modes_of_this_thread_hold_in_the_stages() -> None:
    piped = pipe.Pipe(_layers(), [2, 3], devices=["cpu", "cpu"], chunks=4)
    piped(_batch())
    with torch.no_grad():
        assert not piped(_batch()).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert piped(_batch()).dtype is torch.bfloat16
    piped.eval()
    with torch.inference_mode():
        assert piped(_batch()).is_inference()


def test_a_stage_that_fails_is_named() -> None:
    piped = pipe.Pipe(nn.Sequential(nn.Linear(6, 4), nn.Linear(3, 3)), [1, 1], devices=["cpu", "cpu"], chunks=4)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            piped(_batch())
        assert any(
            "stage 1 of the Pipe" in note for note in getattr(caught.value, "__notes__", ["stage 1 of the Pipe"])
        )


def test_state_of_one_process_is_copied_and_pickled() -> None:
    piped = pipe.Pipe(_layers(), [2, 3], devices=["cpu", "cpu"], chunks=2)
    again = copy.deepcopy(piped)
    again.load_state_dict(piped.state_dict())
    assert torch.equal(again(_batch()), piped(_batch()))
    assert sorted(piped.state_dict())[0] == "partitions.0.0.bias"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: pipe.Pipe(nn.Linear(2, 2), [1]), TypeError, "should be an nn.Sequential, whose layers are stages"),
        (lambda: pipe.Pipe(_layers(), [2, 2]), ValueError, r"balance=\[2, 2\] has 4 layers, and the module has 5"),
        (lambda: pipe.Pipe(_layers(), [5, 0]), ValueError, "at least 1"),
        (lambda: pipe.Pipe(_layers(), [2, 3], devices=["cpu"]), ValueError, "2 stages, and 1 devices"),
        (lambda: pipe.Pipe(_layers(), [5], checkpoint="sometimes"), ValueError, "'always', 'except_last', 'never'"),
        (lambda: pipe.Pipe(_layers(), [5], chunks=0), ValueError, "chunks should be at least 1 and is 0"),
        (lambda: pipe.Pipe(_layers(), [5])("words"), TypeError, "a batch is a tensor, or has some; this one is str"),
        (lambda: pipe.Pipe(_layers(), [5])((_batch(3), _batch(4))), ValueError, "one first dimension"),
        (lambda: pipe.Pipe(_layers(), [5]).cuda(), TypeError, "devices of their own"),
        (lambda: pipe.Pipe(_layers(), [5]).to("cpu"), TypeError, "devices of their own"),
    ],
)
def test_mistakes_are_told(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_the_costliest_stage_costs_least() -> None:
    def costliest(costs: list[int], sizes: list[int]) -> int:
        places = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(places))

    generator = torch.Generator().manual_seed(0)
    for layers in range(1, 8):
        costs = torch.randint(1, 20, (layers,), generator=generator).tolist()
        for stages in range(1, layers + 1):
            found = balanced(costs, stages)
            assert len(found) == stages
            assert sum(found) == layers
            every = _all_sizes(layers, stages)
            assert costliest(costs, found) == min(costliest(costs, sizes) for sizes in every)
    with pytest.raises(ValueError, match="3 stages of 2 layers"):
        balanced([1, 1], 3)


def _all_sizes(layers: int, stages: int) -> list[list[int]]:
    if stages == 1:
        return [[layers]]
    return [[n, *rest] for n in range(1, layers - stages + 2) for rest in _all_sizes(layers - n, stages - 1)]


class _Waits(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x + torch.randn(200, 200).mm(torch.randn(200, 200)).sum() * 0
        return x


def test_balances_by_what_layers_take() -> None:
    module = nn.Sequential(_Waits(60), _Waits(1), _Waits(1), _Waits(1))
    assert pipe.balance_by_time(2, module, torch.ones(2, 2), timeout=0.2, device="cpu") == [1, 3]
    large = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 400))
    assert pipe.balance_by_size(2, large, _batch(), chunks=2, device="cpu") == [3, 1]
