"""Several plain optimizers over one model of ``fsdp.fully_shard``: each trains its parameters as in one process."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
import fsdp
from tests.spmd.training import values_of
from tests.spmd_plugin import SIZE

SEVERAL = pytest.mark.skipif(SIZE == 1, reason="takes several ranks")
WIDTH, WORDS = 12, 101  # neither two, nor three, nor four ranks divide the vocabulary
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
AdamW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
Optimizers = list[torch.optim.Optimizer]


class Words(torch.nn.Module):
    """Its head is its embedding; the first half is used alone, too, as a generator without its discriminator is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
            for _ in range(4)
        )
        self.head = torch.nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        self.register_buffer("turn", torch.arange(WIDTH) / WIDTH)

    def forward(self, tokens: torch.Tensor, blocks: int = 4) -> torch.Tensor:
        x = self.embedding(tokens) + self.turn
        for block in self.blocks[:blocks]:
            x = x + block(x)
        return self.head(x)


def _by_shape(model: Words) -> Optimizers:
    """Every module has parameters of both."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]
    return [SGD(matrices), AdamW([{"params": others[::2]}, {"params": others[1::2], "lr": 0.02}])]


def _by_part(model: Words) -> Optimizers:
    """The second half has one of its own, which is made first."""
    last = [*model.blocks[2:].parameters()]
    mine = set(map(id, last))
    second = AdamW(last)
    return [SGD([each for each in model.parameters() if id(each) not in mine]), second]


def _by_three(model: Words) -> Optimizers:
    every = [*model.parameters()]
    return [SGD(every[::3]), AdamW(every[1::3]), SGD(every[2::3], momentum=0.0)]


SPLITS = {"by shape": _by_shape, "by part": _by_part, "by three": _by_three}


def _words() -> Words:
    torch.default_generator.manual_seed(3)
    return Words().double()


def _tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: Any, step: int, rank: int, blocks: int = 4) -> torch.Tensor:
    tokens = _tokens(step, rank)
    return torch.nn.functional.cross_entropy(model(tokens, blocks).flatten(0, 1), tokens.roll(1).flatten())


def _shard(model: Words, **options: Any) -> Words:
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


class _Twins:
    """A sharded model, and the same one in one process that gets the batches of all ranks."""

    def __init__(self, split: str = "by shape", *, first: bool = False, **options: Any) -> None:
        self.mine, self.alone = _words(), _words()
        if dear.rank() > 0:  # rank 0's values count
            for parameter in self.mine.parameters():
                parameter.data.mul_(0.5)
        self.references = SPLITS[split](self.alone)
        if first:
            self.optimizers: list[Any] = SPLITS[split](self.mine)
        _shard(self.mine, **options)
        if not first:
            self.optimizers = SPLITS[split](self.mine)

    @property
    def both(self) -> list[Any]:
        return [*self.optimizers, *self.references]

    def backward(self, step: int, blocks: int = 4) -> None:
        _loss(self.mine, step, dear.rank(), blocks).backward()
        for rank in range(SIZE):
            (_loss(self.alone, step, rank, blocks) / SIZE).backward()

    def step(self, which: slice = slice(None)) -> None:
        for each in (*self.optimizers[which], *self.references[which]):
            each.step()

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()

    def check(self) -> None:
        expected = dict(self.alone.state_dict())
        for name, value in self.mine.state_dict().items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
            )
        for mine, other in zip(self.optimizers, self.references, strict=True):
            _close(mine.state_dict(), other.state_dict())


def _close(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for number, state in other["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][number][key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("first", [True, False], ids=["optimizers first", "optimizers last"])
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("split", SPLITS)
def test_training_equals_one_process(split: str, reshard: bool | None, first: bool) -> None:
    twins = _Twins(split, first=first, reshard_after_forward=reshard)
    for step in range(4):
        twins.backward(step)
        twins.step()
        twins.zero_grad()
        twins.check()
    assert [type(each).__name__ for each in twins.optimizers] == [type(each).__name__ for each in twins.references]


def test_a_rank_keeps_its_share_and_each_optimizer_its_own_parameters() -> None:
    twins = _Twins()
    before = [[id(each) for group in one.param_groups for each in group["params"]] for one in twins.optimizers]
    for step in range(2):
        twins.backward(step)
        twins.step()
        twins.zero_grad()
    after = [[id(each) for group in one.param_groups for each in group["params"]] for one in twins.optimizers]
    assert after == before
    buckets = [bucket for each in twins.optimizers for bucket in each.buckets]
    assert len(buckets) == 10, "of each optimizer one for each block, and one for the rest"
    numel = sum(value.numel() for value in twins.alone.parameters())
    assert sum(bucket.parameters.shard.numel() for bucket in buckets) <= 1.1 * numel / SIZE + len(buckets)
    assert all(bool(each.isnan().all()) for each in twins.mine.parameters())


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_over_all_parameters_is_that_of_one_process(split: str, norm_type: float) -> None:
    twins = _Twins(split)
    for step in range(3):
        twins.backward(step)
        norms = [
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type) for model in (twins.mine, twins.alone)
        ]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-10, atol=0.0)
        twins.step()
        twins.zero_grad()
        twins.check()


def test_gradients_that_are_clipped_together_stay_in_shards() -> None:
    twins = _Twins()
    for step in range(2):
        twins.backward(step)
        torch.nn.utils.clip_grad_norm_(twins.mine.parameters(), 0.05)
        assert not any(bucket.gradients.there for each in twins.optimizers for bucket in each.buckets)
        assert all(bool(each.grad.isnan().all()) for each in twins.mine.parameters() if each.grad is not None)
        twins.step()
        twins.zero_grad()


def test_a_norm_that_is_not_finite_is_refused_where_the_script_wants_that() -> None:
    twins = _Twins("by part")
    hook = twins.mine.blocks[3][1].bias.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    _loss(twins.mine, 0, dear.rank()).backward()
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0"):
        torch.nn.utils.clip_grad_norm_(twins.mine.parameters(), 0.05, error_if_nonfinite=True)
    hook.remove()
    for each in twins.optimizers:
        each.zero_grad()
    twins.backward(0)
    twins.step()
    twins.check()


def test_each_optimizers_parameters_may_be_clipped_by_themselves() -> None:
    twins = _Twins()
    for step in range(3):
        twins.backward(step)
        for optimizer, reference in zip(twins.optimizers, twins.references, strict=True):
            norms = [
                torch.nn.utils.clip_grad_norm_([p for group in each.param_groups for p in group["params"]], 0.05)
                for each in (optimizer, reference)
            ]
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-10, atol=0.0)
        twins.step()
        twins.zero_grad()
        twins.check()


@pytest.mark.parametrize("split", ["by shape", "by part"])
def test_steps_may_leave_out_an_optimizer(split: str) -> None:
    """As a discriminator is trained several times for each step of the generator."""
    twins = _Twins(split)
    for step, which in enumerate([0, 1, 1, 0, 0, 1]):
        twins.backward(step)
        twins.step(slice(which, which + 1))
        twins.zero_grad()
        twins.check()


def test_gradients_of_an_optimizer_that_was_left_out_count_when_it_steps() -> None:
    twins = _Twins("by part")
    for step in range(6):
        twins.backward(step)
        twins.step(slice(0, 1))
        for each in (twins.optimizers[0], twins.references[0]):
            each.zero_grad()
        if step % 3 == 2:
            twins.step(slice(1, 2))
            for each in (twins.optimizers[1], twins.references[1]):
                each.zero_grad()
        twins.check()


def test_passes_may_leave_out_the_part_of_an_optimizer() -> None:
    """It has no gradients then, and neither steps nor decays."""
    twins = _Twins("by part")
    for step in range(5):
        twins.backward(step, 2 if step % 2 else 4)
        twins.step()
        twins.zero_grad()
        twins.check()


def test_one_after_the_other_has_a_backward_of_its_own() -> None:
    """As the two losses of a GAN: the second one is computed with what the first step has left."""
    twins = _Twins("by part")
    for step in range(4):
        for which in (0, 1):
            twins.backward(2 * step + which)
            twins.step(slice(which, which + 1))
            twins.zero_grad()
        twins.check()


@pytest.mark.parametrize("begins", [0, 1])
def test_a_part_may_be_frozen_while_the_other_is_trained(begins: int) -> None:
    """Also in the first pass."""
    twins = _Twins("by part")
    for step in range(5):
        which = (step + begins) % 2
        for model in (twins.mine, twins.alone):
            for number, block in enumerate(model.blocks):
                block.requires_grad_((number > 1) is (which == 1))
        twins.backward(step)
        twins.step(slice(which, which + 1))
        twins.zero_grad()
        twins.check()


@pytest.mark.parametrize("syncs", [True, False], ids=["each backward is reduced", "the last backward is reduced"])
def test_accumulation(syncs: bool) -> None:
    twins = _Twins()
    for step in range(3):
        for part in range(3):
            if not syncs:
                twins.mine.set_requires_gradient_sync(part == 2)
            twins.backward(10 * step + part)
            if not syncs:
                travels = any(b.phase.name == "REDUCING" for each in twins.optimizers for b in each.buckets)
                assert travels == (part == 2)
        twins.step()
        twins.zero_grad()
        twins.check()


@pytest.mark.parametrize("to_none", [True, False])
def test_the_model_zeroes_all_gradients(to_none: bool) -> None:
    twins = _Twins()
    for step in range(4):
        twins.backward(step)
        if step % 2 == 0:
            twins.step()
        for model in (twins.mine, twins.alone):
            model.zero_grad(set_to_none=to_none)
        if step % 2 == 0:
            twins.check()


@pytest.mark.parametrize("clips", [False, True])
def test_a_grad_scaler_leaves_out_the_optimizer_that_has_an_infinity(clips: bool) -> None:
    """Each optimizer has a verdict of its own, and one infinity, on one rank, makes the scale smaller for both."""
    twins = _Twins("by part")
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    parts = list(zip(scalers, (twins.optimizers, twins.references), strict=True))
    infinite = [twins.alone.blocks[3][1].bias, *([twins.mine.blocks[3][1].bias] if dear.rank() == SIZE - 1 else [])]
    for step in range(4):
        hooks = [
            each.register_hook(lambda gradient: torch.full_like(gradient, torch.inf)) for each in infinite if step == 1
        ]
        scalers[0].scale(_loss(twins.mine, step, dear.rank())).backward()
        for rank in range(SIZE):
            scalers[1].scale(_loss(twins.alone, step, rank) / SIZE).backward()
        for hook in hooks:
            hook.remove()
        if clips:
            for scaler, optimizers in parts:
                for each in optimizers:
                    scaler.unscale_(each)
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (twins.mine, twins.alone)]
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-10, atol=0.0, equal_nan=True)
        for scaler, optimizers in parts:
            for each in optimizers:
                scaler.step(each)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (8.0 if step == 0 else 4.0)
        twins.zero_grad()
        twins.check()


def test_what_is_written_while_the_model_is_whole_counts() -> None:
    twins = _Twins()
    for step in range(3):
        twins.backward(step)
        twins.step()
        twins.zero_grad()
        with dear.whole(twins.mine), torch.no_grad():
            for mine, other in zip(twins.mine.parameters(), twins.alone.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)
            for model in (twins.mine, twins.alone):
                for each in model.parameters():
                    each.mul_(0.9)
        twins.check()


def test_states_and_checkpoints_of_both(folder: Path) -> None:
    twins, other = _Twins(), _Twins()
    for step in range(2):
        twins.backward(step)
        twins.step()
        twins.zero_grad()
    dear.save_checkpoint(folder / "one", twins.mine, twins.optimizers)
    saved = copy.deepcopy((twins.mine.state_dict(), [each.state_dict() for each in twins.optimizers]))
    other.backward(7)
    other.step()
    other.zero_grad()
    dear.load_checkpoint(folder / "one", other.mine, other.optimizers)
    _train_on(twins, other)
    plain = _Twins()
    plain.backward(8)
    plain.step()
    plain.zero_grad()
    plain.mine.load_state_dict(saved[0])
    for optimizer, state in zip(plain.optimizers, saved[1], strict=True):
        optimizer.load_state_dict(state)
    for step in range(2, 4):
        _loss(plain.mine, step, dear.rank()).backward()
        for each in plain.optimizers:
            each.step()
            each.zero_grad()
    for value, expected in zip(values_of(plain.mine), values_of(twins.mine), strict=True):
        assert torch.equal(value, expected)


def _train_on(twins: _Twins, other: _Twins) -> None:
    """Both from the same state."""
    for step in range(2, 4):
        twins.backward(step)
        twins.step()
        twins.zero_grad()
        _loss(other.mine, step, dear.rank()).backward()
        for each in other.optimizers:
            each.step()
            each.zero_grad()
    for value, expected in zip(values_of(other.mine), values_of(twins.mine), strict=True):
        assert torch.equal(value, expected)


def test_a_method_that_reads_parameters_is_a_forward_of_all() -> None:
    twins = _Twins()
    for model in (twins.mine, twins.alone):
        model.__class__.encode = lambda self, tokens: self.forward(tokens, 2)
    fsdp.register_fsdp_forward_method(twins.mine, "encode")
    for step in range(3):
        twins.mine.encode(_tokens(step, dear.rank())).square().mean().backward()
        for rank in range(SIZE):
            (twins.alone.encode(_tokens(step, rank)).square().mean() / SIZE).backward()
        twins.step()
        twins.zero_grad()
        twins.check()


def test_a_deferred_model() -> None:
    torch.default_generator.manual_seed(3 + dear.rank())
    with dear.deferred_init():
        model = Words().double()
    twins = _Twins()
    twins.mine = model
    twins.optimizers = _by_shape(_shard(model))
    for step in range(2):
        twins.backward(step)
        twins.step()
        twins.zero_grad()
        twins.check()


def test_schedulers_of_both() -> None:
    twins = _Twins(first=True)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in twins.both]
    for step in range(5):
        twins.backward(step)
        twins.step()
        twins.zero_grad()
        for each in schedulers:
            each.step()
        twins.check()


def test_an_optimizer_that_the_script_has_let_go_of_is_not_there() -> None:
    twins = _Twins()
    twins.optimizers.clear()
    loop: list[Any] = [SGD(twins.mine.parameters())]
    loop.append(loop)  # until the garbage collector runs
    del loop
    twins.optimizers = _by_shape(twins.mine)
    twins.backward(0)
    twins.step()
    twins.zero_grad()
    twins.check()


def _train_unevenly(split: str, batches: list[int], parts: int = 1, **options: Any) -> _Twins:
    """Each rank has as many of the `batches`, in `parts`, and joins then. One process averages over who is there."""
    twins = _Twins(split, **options)
    for step in range(batches[dear.rank()]):
        for part in range(parts):
            _loss(twins.mine, 10 * step + part, dear.rank()).backward()
        for each in twins.optimizers:
            each.step()
            each.zero_grad()
    dear.join()
    for step in range(max(batches)):
        present = [rank for rank in range(SIZE) if step < batches[rank]]
        for part in range(parts):
            for rank in present:
                (_loss(twins.alone, 10 * step + part, rank) / len(present)).backward()
        for each in twins.references:
            each.step()
            each.zero_grad()
    return twins


@pytest.mark.parametrize("reshard", [None, *(pytest.param(chosen, marks=pytest.mark.full) for chosen in (True, False))])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("most", ["first", pytest.param("last", marks=pytest.mark.full)])
def test_ranks_out_of_data_give_their_shares_to_all_optimizers(split: str, reshard: bool | None, most: str) -> None:
    ranks = range(SIZE) if most == "last" else reversed(range(SIZE))
    twins = _train_unevenly(split, [2 * rank + 1 for rank in ranks], reshard_after_forward=reshard)
    twins.check()
    twins.zero_grad()
    twins.backward(90)
    twins.step()
    twins.check()


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_out_of_data_give_their_shares_to_several_backward_passes(split: str) -> None:
    _train_unevenly(split, [rank + 1 for rank in range(SIZE)], 3).check()


@pytest.mark.parametrize("reshard", [None, False])
def test_ranks_out_of_data_follow_steps_that_leave_out_an_optimizer(reshard: bool | None) -> None:
    twins = _Twins("by part", reshard_after_forward=reshard)
    batches = [2 * rank + 2 for rank in range(SIZE)]
    for step in range(batches[dear.rank()]):
        for which in (0, 1):
            _loss(twins.mine, 2 * step + which, dear.rank(), 2 if step % 2 else 4).backward()
            twins.optimizers[which].step()
            for each in twins.optimizers:
                each.zero_grad()
    dear.join()
    for step in range(max(batches)):
        present = [rank for rank in range(SIZE) if step < batches[rank]]
        for which in (0, 1):
            for rank in present:
                (_loss(twins.alone, 2 * step + which, rank, 2 if step % 2 else 4) / len(present)).backward()
            twins.references[which].step()
            for each in twins.references:
                each.zero_grad()
    twins.check()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("who", ["first", "last"])
def test_a_rank_may_leave_out_a_pass_or_a_part_of_the_model(split: str, who: str) -> None:
    """Other ranks wait for its buckets, of all optimizers, and it steps with them."""
    other = 0 if who == "first" else SIZE - 1
    twins = _Twins(split)
    for step in range(6):
        blocks = [4 if rank != other else (4, 2, None)[step % 3] for rank in range(SIZE)]
        for rank, used in enumerate(blocks):
            if used is not None:
                (_loss(twins.alone, step, rank, used) / SIZE).backward()
        mine = blocks[dear.rank()]
        if mine is not None:
            _loss(twins.mine, step, dear.rank(), mine).backward()
        twins.step()
        twins.zero_grad()
        twins.check()


def test_a_rank_may_leave_out_the_pass_of_the_part_that_is_stepped_next() -> None:
    """As the pass that trains a discriminator, where a step of each follows a pass of its own."""
    twins = _Twins("by part")
    for step in range(4):
        for which in (0, 1):
            left_out = SIZE - 1 if which == 0 and step > 1 else None  # what is usual is known then
            for rank in range(SIZE):
                if rank != left_out:
                    (_loss(twins.alone, 2 * step + which, rank) / SIZE).backward()
            if dear.rank() != left_out:
                _loss(twins.mine, 2 * step + which, dear.rank()).backward()
            twins.step(slice(which, which + 1))
            twins.zero_grad()
        twins.check()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("left_out", ["pass", "backward"])
def test_a_rank_may_leave_out_what_ranks_that_are_out_of_data_follow(split: str, left_out: str) -> None:
    """The first rank joins after one step; the last one leaves something out in every other one."""
    twins = _Twins(split)
    batches = [1 if rank == 0 else 6 for rank in range(SIZE)]

    def goes_back(step: int, rank: int) -> bool:
        return rank < SIZE - 1 or step % 2 == 0

    for step in range(batches[dear.rank()]):
        if goes_back(step, dear.rank()):
            _loss(twins.mine, step, dear.rank()).backward()
        elif left_out == "backward":
            _loss(twins.mine, step, dear.rank())
        for each in twins.optimizers:
            each.step()
            each.zero_grad()
    dear.join()
    for step in range(max(batches)):
        present = [rank for rank in range(SIZE) if step < batches[rank]]
        for rank in present:
            if goes_back(step, rank):
                (_loss(twins.alone, step, rank) / len(present)).backward()
        for each in twins.references:
            each.step()
            each.zero_grad()
    twins.check()


def test_optimizers_gather_as_often_as_one_would() -> None:
    twins = _Twins()
    counts = []
    for step in range(4):
        twins.backward(step)
        unsharder = twins.optimizers[0]._engine.unsharder
        assert unsharder is twins.optimizers[1]._engine.unsharder
        twins.step()
        twins.zero_grad()
        counts.append(unsharder.gathered)
    each = {after - before for before, after in itertools.pairwise(counts[1:])}
    buckets = sum(len(each.buckets) for each in twins.optimizers)
    assert len(each) == 1
    assert buckets < each.pop() <= 2 * buckets


class Choosing(torch.nn.Module):
    """Of its layers, each pass uses those that are `chosen`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for number in chosen:
            x = x + torch.tanh(self.layers[number](x))
        return self.head(x)


def _train_choosing(seed: int, rank: int | None) -> list[torch.Tensor]:
    """Each rank leaves out modules of its own, backward, or all of a step; or steps leave out optimizers, on all alike."""
    script = random.Random(seed)
    torch.default_generator.manual_seed(3)
    model: Any = Choosing().double()
    kind, room = script.choice(["shape", "part", "three"]), script.choice([None, True, False])
    if rank is not None:
        for layer in model.layers:
            fsdp.fully_shard(layer, reshard_after_forward=room)
        fsdp.fully_shard(model, reshard_after_forward=room)
    every = list(model.parameters())
    parts = {
        "shape": [every[::2], every[1::2]],
        "part": [every[:6], every[6:]],
        "three": [every[k::3] for k in range(3)],
    }
    optimizers = [SGD(part) for part in parts[kind]]
    some = script.random() < 0.5  # steps leave out optimizers
    for step in range(4):
        for other in range(SIZE):
            chosen = [number for number in range(6) if script.random() < 0.6]
            part = script.choice(["all", "all", "all", "forward", "all" if some else "nothing"]) if step else "all"
            generator = torch.Generator().manual_seed(100 * step + other)
            x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
            if rank in (None, other) and part != "nothing":
                loss = model(x, chosen).square().mean() / (SIZE if rank is None else 1)
                if part == "all":
                    loss.backward()
        left_out = script.choice([*range(len(optimizers)), None]) if some and step else None
        for number, optimizer in enumerate(optimizers):
            if number != left_out:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return values_of(model)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 50))])
def test_ranks_may_leave_out_modules_and_passes(seed: int) -> None:
    expected, actual = _train_choosing(seed, None), _train_choosing(seed, dear.rank())
    for mine, value in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-10, atol=1e-11)


@SEVERAL
@pytest.mark.parametrize("how", ["number", "kind"])
def test_ranks_with_different_optimizers_are_told(how: str) -> None:
    model = fsdp.fully_shard(torch.nn.Linear(2, 2))
    make: list[Callable[..., torch.optim.Optimizer]] = [SGD, AdamW]
    if dear.rank() == 0:
        optimizers = [make[0]([model.weight]), make[1]([model.bias])]
    elif how == "number":
        optimizers = [make[0]([model.weight])]
    else:
        optimizers = [make[1]([model.weight]), make[0]([model.bias])]
    with pytest.raises(ValueError, match=r"rank 0 trains the model with SGD of 1 parameters from 'weight', AdamW"):
        model(torch.ones(1, 2))
    del optimizers
