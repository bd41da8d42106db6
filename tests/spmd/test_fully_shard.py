"""``fsdp.fully_shard`` as scripts for torch's FSDP2 use it: equal to one process, also where others were silently wrong."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import dear
import fsdp
from overlap.transport.objects import SignatureMismatch
from tests.spmd.training import same_everywhere, values_of
from tests.spmd_plugin import SIZE

WIDTH, WORDS = 12, 101  # neither two, nor three, nor four ranks divide the vocabulary
AdamW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
Optimizer = Callable[..., torch.optim.Optimizer]
SOME = next((number for number in (2, 3) if number < SIZE and SIZE % number == 0), 1)  # ranks in each of several groups
SEVERAL_GROUPS = pytest.mark.skipif(SOME == 1, reason="needs groups of several ranks")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(torch.nn.Module):
    """A small language model whose head is its embedding; `checkpoints`: blocks are computed again in backward."""

    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.checkpoints = checkpoints  # the kind: reentrant or not
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("turn", torch.arange(WIDTH) / WIDTH, persistent=False)

    def encode(self, tokens: torch.Tensor, blocks: list[int]) -> torch.Tensor:
        x = self.embedding(tokens) + self.turn
        for number in blocks:
            block = self.blocks[number]
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        return x * self.scale

    def forward(self, tokens: torch.Tensor, blocks: list[int] | None = None) -> torch.Tensor:
        return self.head(self.encode(tokens, [*range(4)] if blocks is None else blocks))


def _words(checkpoints: bool | None = None) -> Words:
    torch.default_generator.manual_seed(3)
    return Words(checkpoints).double()


def _tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: Any, step: int, rank: int, blocks: list[int] | None = None) -> torch.Tensor:
    tokens = _tokens(step, rank)
    return torch.nn.functional.cross_entropy(model(tokens, blocks).flatten(0, 1), tokens.roll(1).flatten())


def _shard(model: Words, **options: Any) -> Words:
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def _ranks() -> Iterator[int]:
    """All of them, for one process that computes what they all do."""
    return iter(range(SIZE))


class _Twins:
    """A sharded model, and the same one in one process that gets the batches of all ranks."""

    def __init__(
        self,
        make: Optimizer = AdamW,
        *,
        first: bool = False,
        checkpoints: bool | None = None,
        groups: bool = False,
        **options: Any,
    ) -> None:
        self.mine, self.alone = _words(checkpoints), _words(checkpoints)
        if dear.rank() > 0:  # rank 0's values count
            for parameter in self.mine.parameters():
                parameter.data.mul_(0.5)
        parameters = _groups if groups else lambda model: list(model.parameters())
        self.reference = make(parameters(self.alone))
        if first:
            self.optimizer: Any = make(parameters(self.mine))
        _shard(self.mine, **options)
        if not first:
            self.optimizer = make(parameters(self.mine))

    def backward(self, step: int, blocks: Callable[[int], list[int] | None] = lambda _rank: None) -> None:
        _loss(self.mine, step, dear.rank(), blocks(dear.rank())).backward()
        for rank in _ranks():
            (_loss(self.alone, step, rank, blocks(rank)) / SIZE).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.reference.step()
        self.optimizer.zero_grad()
        self.reference.zero_grad()

    def check(self) -> None:
        expected = [value.detach() for value in self.alone.parameters()]
        for (name, _), mine, value in zip(self.alone.named_parameters(), values_of(self.mine), expected, strict=True):
            torch.testing.assert_close(
                mine, value, rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
            )


def _groups(model: Words) -> list[dict[str, Any]]:
    """Two groups with settings of their own."""
    thin = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    wide = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return [{"params": wide, "lr": 0.02, "weight_decay": 0.2}, {"params": thin, "lr": 0.005, "weight_decay": 0.0}]


@pytest.mark.parametrize("first", [True, False], ids=["optimizer first", "optimizer last"])
@pytest.mark.parametrize("reshard", [None, True, False, 1, SIZE])
def test_training_equals_one_process(reshard: bool | int | None, first: bool) -> None:
    """Tied weights across units, a vocabulary that does not divide, the optimizer made before or after."""
    twins = _Twins(first=first, reshard_after_forward=reshard)
    scheduler = torch.optim.lr_scheduler.StepLR(twins.optimizer, 2, 0.5)
    reference = torch.optim.lr_scheduler.StepLR(twins.reference, 2, 0.5)
    for step in range(4):
        twins.backward(step)
        twins.step()
        scheduler.step()
        reference.step()
        twins.check()
    assert isinstance(twins.optimizer, torch.optim.AdamW)
    assert isinstance(twins.mine, Words)
    assert twins.mine.head.weight is twins.mine.embedding.weight
    assert twins.optimizer.param_groups[0]["lr"] == twins.reference.param_groups[0]["lr"] == 0.0025


def test_parameter_objects_stay_and_a_rank_keeps_its_share() -> None:
    twins = _Twins()
    before = list(map(id, twins.mine.parameters()))
    for step in range(2):
        twins.backward(step)
        twins.step()
    assert list(map(id, twins.mine.parameters())) == before
    buckets = twins.optimizer.buckets
    assert len(buckets) == 5, "one for each block, and one for the rest of the model"
    numel = sum(value.numel() for value in twins.alone.parameters())
    held = sum(value.numel() for each in twins.optimizer.held_state.values() for value in each.values() if value.dim())
    assert held <= 2.3 * numel / SIZE
    assert sum(bucket.parameters.shard.numel() for bucket in buckets) <= 1.1 * numel / SIZE + len(buckets)


_OPTIMIZERS = "SGD AdamW Adam NAdam RAdam Adamax Adagrad Adadelta RMSprop ASGD Rprop"


@pytest.mark.parametrize("name", _OPTIMIZERS.split())
def test_every_optimizer_takes_uneven_and_empty_shards(name: str) -> None:
    """Adagrad makes its state in its constructor, before anything is sharded."""
    torch.default_generator.manual_seed(1)
    mine = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=bool(number % 2)) for number in range(3))).double()
    alone = copy.deepcopy(mine)
    optimizer, reference = (getattr(torch.optim, name)(model.parameters()) for model in (mine, alone))
    for layer in mine:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(mine)
    for step in range(3):
        for model, ranks in ((mine, [dear.rank()]), (alone, [*_ranks()])):
            for rank in ranks:
                (
                    model(torch.full((2, 1), 1.0 + step + rank, dtype=torch.float64)).square().mean() / len(ranks)
                ).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for value, expected in zip(values_of(mine), alone.parameters(), strict=True):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("function", ["clip_grad_norm_", "get_total_norm"])
def test_the_norm_that_is_clipped_by_and_logged_is_that_of_all_shards(function: str) -> None:
    twins = _Twins()
    for step in range(3):
        twins.backward(step)
        norms = []
        for model in (twins.mine, twins.alone):
            if function == "clip_grad_norm_":
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            else:
                gradients = [each.grad for each in model.parameters() if each.grad is not None]
                norms.append(torch.nn.utils.get_total_norm(gradients))
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norms[-1])
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-10, atol=0.0)
        twins.step()
        twins.check()


def test_a_norm_of_gradients_that_lie_in_shards_is_not_a_number() -> None:
    """Nobody logs a part of it by mistake."""
    twins = _Twins()
    twins.backward(0)
    gradient = twins.mine.blocks[0].up.weight.grad
    assert gradient is not None
    assert gradient.shape == (2 * WIDTH, WIDTH)
    assert bool(gradient.norm().isnan())


@pytest.mark.parametrize("syncs", [True, False], ids=["each backward is reduced", "the last backward is reduced"])
def test_accumulation(syncs: bool) -> None:
    twins = _Twins()
    for step in range(3):
        issued = []
        for part in range(3):
            if not syncs:
                twins.mine.set_requires_gradient_sync(part == 2)
            twins.mine.set_is_last_backward(part == 2)
            before = twins.optimizer.buckets[0].round if hasattr(twins.optimizer, "buckets") else 0
            twins.backward(10 * step + part)
            issued.append(any(bucket.phase.name == "REDUCING" for bucket in twins.optimizer.buckets))
            assert twins.optimizer.buckets[0].round >= before
        assert issued == ([True] * 3 if syncs else [False, False, True]), "nothing travels in the others"
        twins.step()
        twins.check()


@pytest.mark.parametrize("steps", [1, 3])
def test_a_gradient_that_is_not_zeroed_counts_in_the_next_step(steps: int) -> None:
    twins = _Twins(functools.partial(torch.optim.SGD, lr=0.01))
    for step in range(3 * steps):
        twins.backward(step)
        twins.optimizer.step()
        twins.reference.step()
        if step % steps == 0:
            twins.optimizer.zero_grad(set_to_none=False)
            twins.reference.zero_grad(set_to_none=False)
    twins.check()


def test_ranks_use_different_modules() -> None:
    """What some rank has used is averaged over all; what none has used keeps no gradient, and does not decay."""
    twins = _Twins()

    def blocks(rank: int) -> list[int]:
        return [0, 1] if rank % 2 else [0, 2]

    for step in range(3):
        twins.backward(step, blocks)
        twins.step()
        twins.check()
    untouched = _words()
    for name, value in twins.mine.state_dict().items():
        if name.startswith("blocks.3"):
            assert torch.equal(value, untouched.state_dict()[name])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_gather_once_more_for_each_half(reentrant: bool) -> None:
    twins = _Twins(checkpoints=reentrant)
    counts = []
    for step in range(4):
        before = twins.optimizer._engine.unsharder.gathered if step else 0
        twins.backward(step)
        twins.step()
        counts.append(twins.optimizer._engine.unsharder.gathered - before)
        twins.check()
    assert max(counts[1:]) <= 2 * len(twins.optimizer.buckets), (
        "forward and backward, and nothing for what is recomputed"
    )


@pytest.mark.parametrize("how", ["forward", "encode", "call"])
def test_a_model_is_used_without_calling_it(how: str) -> None:
    twins = _Twins()
    fsdp.register_fsdp_forward_method(twins.mine, "encode")

    def use(model: Words, rank: int) -> torch.Tensor:
        tokens = _tokens(0, rank)
        if how == "forward":
            return model.forward(tokens).square().mean()
        return (model.encode(tokens, [0, 1, 2, 3]) if how == "encode" else model(tokens)).square().mean()

    for _ in range(3):
        use(twins.mine, dear.rank()).backward()
        for rank in _ranks():
            (use(twins.alone, rank) / SIZE).backward()
        twins.step()
        twins.check()
        with torch.no_grad():
            torch.testing.assert_close(use(twins.mine, 7), use(twins.alone, 7), rtol=1e-10, atol=1e-11)


def test_torchs_own_functions_read_whole_states() -> None:
    """Groups keep their own settings, whatever their number."""
    twins = _Twins(groups=True)
    for step in range(2):
        twins.backward(step)
        twins.step()
    whole = StateDictOptions(full_state_dict=True)
    mine, alone = (get_model_state_dict(model, options=whole) for model in (twins.mine, twins.alone))
    for name, value in mine.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-10, atol=1e-11)
    states = (
        get_optimizer_state_dict(model, optimizer, options=whole)
        for model, optimizer in ((twins.mine, twins.optimizer), (twins.alone, twins.reference))
    )
    found, expected = states
    assert found["param_groups"] == expected["param_groups"]
    for name, each in expected["state"].items():  # type: ignore[union-attr]
        for key, value in each.items():
            torch.testing.assert_close(found["state"][name][key], value, rtol=1e-10, atol=1e-11)  # type: ignore[call-overload]


def test_gradients_travel_in_the_type_that_was_asked_for() -> None:
    """And are summed in fp32, and rounded once."""
    torch.default_generator.manual_seed(0)
    model, plain = torch.nn.Linear(64, 8, bias=False), torch.nn.Linear(64, 8, bias=False)
    plain.load_state_dict(model.state_dict())
    fsdp.fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    inputs = [1.0 + (2 * rank + 1) / 512 for rank in _ranks()]  # between two numbers of 16 bits
    model(torch.full((1, 64), inputs[dear.rank()])).sum().backward()
    optimizer.step()
    average = sum(torch.tensor(inputs).bfloat16().double()) / SIZE
    assert torch.equal(values_of(model)[0], plain.weight.detach() - float(average.bfloat16()))


def test_a_module_returns_the_type_that_was_asked_for() -> None:
    model = fsdp.fully_shard(torch.nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    assert model(torch.ones(2, 4)).dtype is torch.float64


def test_a_grad_scaler_looks_at_all_shards() -> None:
    twins = _Twins()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        infinite = step == 1  # on the last rank
        loss = _loss(twins.mine, step, dear.rank())
        scaler.scale(loss * float("inf") if infinite and dear.rank() == SIZE - 1 else loss).backward()
        for rank in _ranks():
            (_loss(twins.alone, step, rank) / SIZE).backward()
        scaler.unscale_(twins.optimizer)
        torch.nn.utils.clip_grad_norm_(twins.mine.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(twins.alone.parameters(), 0.1)
        scaler.step(twins.optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if step == 0 else 4.0)
        if not infinite:
            twins.reference.step()
        twins.optimizer.zero_grad()
        twins.reference.zero_grad()
        twins.check()


def test_an_optimizer_that_is_made_later_is_refused() -> None:
    twins = _Twins()
    twins.backward(0)
    twins.step()
    later = AdamW(twins.mine.parameters())
    twins.backward(1)
    with pytest.raises(RuntimeError, match=r"AdamW\.step\(\): parameters of this optimizer are sharded already"):
        later.step()
    twins.step()
    twins.check()


def test_copies_are_plain_modules() -> None:
    twins = _Twins()
    twins.backward(0)
    twins.step()
    with pytest.raises(RuntimeError, match=r"copied or pickled .* dear\.whole"):
        copy.deepcopy(twins.mine)
    with dear.whole(twins.mine):
        mine = copy.deepcopy(twins.mine)
    assert type(mine) is Words
    twins.alone.load_state_dict(mine.state_dict())
    twins.backward(1)


def test_settings_may_change_between_steps() -> None:
    twins = _Twins()
    for step, reshard in enumerate([True, False, False, True, True]):
        twins.mine.set_reshard_after_forward(reshard)
        before = twins.optimizer._engine.unsharder.gathered if step else 0
        twins.backward(step)
        if step == 2:
            assert twins.optimizer._engine.unsharder.gathered - before == len(twins.optimizer.buckets), "once for both"
        twins.step()
        twins.check()


def _issued(optimizer: Any) -> tuple[int, int]:
    """The numbers of gathers among all ranks, and in a group of them."""
    unsharder = optimizer._engine.unsharder
    return sum(lane.committed for lane in unsharder._lanes), unsharder._group.committed


def _shared(optimizer: Any) -> list[Any]:
    """The buckets of which this rank has a share in its group."""
    return [bucket for bucket in optimizer.buckets if bucket._share is not None and bucket._share.there]


@SEVERAL_GROUPS
@pytest.mark.parametrize(
    "options", [{}, {"checkpoints": True}, {"checkpoints": False}, {"per_parameter": True}], ids=str
)
def test_backward_gathers_within_groups_of_ranks(options: dict[str, Any]) -> None:
    twins, other = (_Twins(reshard_after_forward=number, **options) for number in (SOME, True))
    for step in range(4):
        loss = _loss(twins.mine, step, dear.rank())
        outside, inside = _issued(twins.optimizer)
        loss.backward()
        assert _issued(twins.optimizer) == (outside, inside + 3), "of five buckets, two are there since forward"
        other.backward(step)
        twins.step()
        other.step()
    other.check()
    for mine, value in zip(values_of(twins.mine), values_of(other.mine), strict=True):
        assert torch.equal(mine, value)


@SEVERAL_GROUPS
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_a_rank_has_its_share_of_a_group_between_forward_and_backward(param_dtype: torch.dtype | None) -> None:
    values = []
    for number in (SOME, True):
        torch.default_generator.manual_seed(3)
        model = torch.nn.Sequential(*(torch.nn.Linear(33, 33) for _ in range(12)))
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype)}
        for layer in model:
            fsdp.fully_shard(layer, reshard_after_forward=number, **options)
        fsdp.fully_shard(model, reshard_after_forward=number, **options)
        optimizer: Any = AdamW(model.parameters())
        while_used: list[int] = []
        model[0].weight.register_hook(
            lambda _gradient, mine=optimizer, found=while_used: found.append(len(_shared(mine)))
        )
        for step in range(3):
            output = model(torch.full((2, 33), 1.0 + step + dear.rank()))
            shared = _shared(optimizer)
            if number is not True:
                assert len(shared) >= 12 - 5, "beside what is used, four may be whole"
            for bucket in shared:
                share = bucket._share.whole
                assert share.dtype is (param_dtype or torch.float32)
                assert share.numel() == bucket.spec.padded_numel // SOME
                assert not bucket.parameters.there
                assert not bucket._used.there
            output.square().mean().backward()
            assert not _shared(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert while_used == [0] * 3, "the last one that is used in backward is whole, and all others are away"
        values.append(values_of(model))
    for mine, other in zip(*values, strict=True):
        assert torch.equal(mine, other)


@SEVERAL_GROUPS
def test_groups_of_ranks_that_leave_out_modules_and_passes() -> None:
    twins, script = _Twins(reshard_after_forward=SOME), random.Random(dear.broadcast_object(5))
    for step in range(12):
        chosen = [[block for block in range(4) if script.random() < 0.6] for _ in _ranks()]
        if step % 4 == 1:
            _loss(twins.mine, step, dear.rank())  # no backward follows
        if step % 4 == 2:
            with torch.no_grad():
                _loss(twins.mine, step, dear.rank())
        twins.backward(step, chosen.__getitem__)
        if step % 4 == 3:
            _loss(twins.mine, step, dear.rank())
        twins.step()
        assert not _shared(twins.optimizer)
        twins.check()


@SEVERAL_GROUPS
def test_ranks_out_of_data_give_their_groups_their_shares() -> None:
    model = _shard(_words(), reshard_after_forward=SOME)
    optimizer: Any = AdamW(model.parameters())
    for step in range(1 + dear.rank()):
        optimizer.zero_grad()
        _loss(model, step, dear.rank()).backward()
        optimizer.step()
    dear.join()
    assert optimizer._engine.unsharder._group.committed
    for value in model.state_dict().values():
        same_everywhere(value)


@SEVERAL_GROUPS
def test_values_that_are_loaded_between_forward_and_backward_of_others_replace_shares() -> None:
    twins = _Twins(reshard_after_forward=SOME)
    for step in range(3):
        _loss(twins.mine, step, dear.rank())  # no backward follows
        twins.mine.load_state_dict(_words().state_dict())
        twins.alone.load_state_dict(_words().state_dict())
        dear.barrier()
        twins.backward(step)
        twins.step()
        twins.check()


@SEVERAL_GROUPS
def test_one_group_for_all_modules_that_have_one() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(3)))
    fsdp.fully_shard(model[0], reshard_after_forward=SOME)
    fsdp.fully_shard(model[1], reshard_after_forward=False)
    fsdp.fully_shard(model, reshard_after_forward=True)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 9)).sum().backward()
    assert [bucket.plan.residency.name for bucket in reversed(optimizer.buckets)] == [
        "SHARDED_POST_FORWARD",
        "FREED_AFTER_BACKWARD",
        "FREED",
    ]
    model.set_reshard_after_forward(True)
    optimizer.step()
    model(torch.ones(1, 9)).sum().backward()
    assert {bucket.plan.residency.name for bucket in optimizer.buckets} == {"FREED"}
    other = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
    fsdp.fully_shard(other[0], reshard_after_forward=SOME if dear.rank() else True)
    fsdp.fully_shard(other, reshard_after_forward=SOME)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with pytest.raises(SignatureMismatch, match="post_forward"):
        other(torch.ones(1, 9))


def test_one_call_for_the_whole_model_divides_it() -> None:
    torch.default_generator.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    fsdp.fully_shard(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 512)).sum().backward()
    assert len(optimizer.buckets) >= 4


def test_a_model_is_whole_until_it_is_trained() -> None:
    model = _shard(_words())
    expected = _words()(_tokens(0, 0))
    assert torch.equal(model(_tokens(0, 0)), expected)
    model.load_state_dict(_words().state_dict())
    assert not any(bool(value.isnan().any()) for value in model.parameters())


@pytest.mark.parametrize("method", ["unshard", "reshard", "set_all_reduce_hook", "set_unshard_in_backward"])
def test_methods_that_are_not_built_say_so(method: str) -> None:
    model = fsdp.fully_shard(torch.nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match=rf"{method}\(\): "):
        getattr(model, method)()


def test_what_cannot_be_done_is_said_at_once() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    with pytest.raises(ValueError, match=r"ModuleList has no forward\(\)"):
        fsdp.fully_shard(layers)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for number in (5, 0, -1, 0.5):
        with pytest.raises(ValueError, match=rf"reshard_after_forward={number} does not divide the {SIZE} ranks"):
            fsdp.fully_shard(model, reshard_after_forward=number)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="ignored_params holds 2 parameters"):
        fsdp.fully_shard(model, ignored_params=set(model.parameters()))
    with pytest.raises(NotImplementedError, match="shard_placement_fn"):
        fsdp.fully_shard(model, shard_placement_fn=lambda _parameter: None)
    fsdp.fully_shard(model[0])
    with pytest.raises(ValueError, match="was given to fully_shard"):
        fsdp.fully_shard(model[0])
    fsdp.fully_shard(model)
    with pytest.raises(NotImplementedError, match=r"set_requires_gradient_sync\(\) of FSDPLinear, which is inside"):
        model[0].set_requires_gradient_sync(False)
    optimizers = [torch.optim.SGD([model[0].weight], 0.1), torch.optim.AdamW(model.parameters())]
    with pytest.raises(
        RuntimeError, match=r"parameter '0.weight' of .* is in two optimizers \((SGD|AdamW), (SGD|AdamW)\)"
    ):
        model(torch.ones(1, 2))
    del optimizers
    wrapped = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    with pytest.raises(RuntimeError, match="belong to a DistributedOptimizer"):
        model(torch.ones(1, 2))
    del wrapped


@pytest.mark.parametrize("way", ["fully_shard", "fsdp"])
def test_a_deferred_model_is_sharded_bucket_by_bucket(way: str) -> None:
    """Rank 0's values; ties and buffers that no checkpoint has are as in one process."""
    torch.default_generator.manual_seed(3 + dear.rank())
    with dear.deferred_init():
        model = Words().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.01)
    alone = _words()
    if way == "fully_shard":
        _shard(model)
    else:
        optimizer = fsdp.DistributedOptimizer(optimizer, model, threshold_mb=0)
    reference = torch.optim.SGD(alone.parameters(), 0.01)
    for step in range(2):
        _loss(model, step, dear.rank()).backward()
        for rank in _ranks():
            (_loss(alone, step, rank) / SIZE).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.turn, alone.turn)
    for mine, value in zip(values_of(model), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, value.detach(), rtol=1e-10, atol=1e-11)
