"""Sharded models: what a rank holds, what it hands out whole, and that ranks may use different modules."""

from __future__ import annotations

import copy
import io
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
import fsdp
from overlap.transport.objects import SignatureMismatch
from tests.spmd.device import DEVICE
from tests.spmd.models import double_model
from tests.spmd.training import local_loss, same_everywhere, trained, values_of
from tests.spmd_plugin import SIZE

LAYERS = 8
WIDTH = 32


class Choosing(torch.nn.Module):
    """Uses those of its layers that it is told to, in the order of their definition."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        x = x * self.scale
        for number in chosen:
            x = x + torch.tanh(self.layers[number](x))
        return x


def _choosing() -> Choosing:
    torch.default_generator.manual_seed(11)
    return Choosing().double()


def _held(model: torch.nn.Module) -> int:
    """Bytes of memory behind the parameters."""
    storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("file", [False, True])
def test_what_is_loaded_counts_after_an_evaluation(file: bool, tmp_path: Path) -> None:
    """Which leaves parameters whole that the next pass uses first."""
    model, optimizer = trained("fsdp")
    folder = Path(dear.broadcast_object(str(tmp_path)))
    dear.save_checkpoint(folder, model)
    expected = values_of(model)
    dear.barrier()
    if not file:
        expected = [torch.full_like(value, 0.25) for value in expected]
    for step in range(2, 4):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    with torch.no_grad():
        local_loss(model)
    dear.barrier()
    if file:
        dear.load_checkpoint(folder, model)
    else:
        named = [name for name, _ in model.named_parameters()]
        model.load_state_dict(dict(zip(named, expected, strict=True)), strict=False)
    with torch.no_grad():
        local_loss(model)
    dear.barrier()
    for value, other in zip(values_of(model), expected, strict=True):
        assert torch.equal(value, other)


def test_between_passes_a_rank_holds_its_share() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16)))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = dear.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), model, strategy="fsdp", threshold_mb=0.02, poison=False
    )
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 64), 1.0 + dear.rank() + step)).square().mean().backward()
        buckets = optimizer.buckets
        filled = sum(bucket.nbytes for bucket in buckets if bucket.gradients.there)
        assert filled <= (4 + 1) * max(bucket.nbytes for bucket in buckets), (
            "four on their way, one that waits for step()"
        )
        assert not any(bucket.parameters.there for bucket in buckets), "backward has freed what it used"
        optimizer.step()
        if DEVICE:
            assert not any(bucket.gradients.whole.untyped_storage().nbytes() for bucket in buckets)
            ahead = sum(bucket.parameters.whole.untyped_storage().nbytes() for bucket in buckets)
            assert ahead <= 4 * max(bucket.nbytes for bucket in buckets), "gathered ahead for the next forward"
        assert len(buckets) > 8
        assert sum(bucket.parameters.shard.nbytes for bucket in buckets) <= 1.1 * whole / SIZE
        state = sum(v.nbytes for each in optimizer.held_state.values() for v in each.values() if v.dim())
        assert state <= 2.2 * whole / SIZE
    assert _held(model) < whole / 2
    assert all(bool(parameter.isnan().all()) for name, parameter in model.named_parameters() if name.startswith("15"))


def test_a_rank_alone_may_use_a_model_that_is_whole() -> None:
    model, optimizer = trained("fsdp")
    plain = double_model("Mlp")
    plain.load_state_dict(model.state_dict())
    x = torch.ones(1, 9, dtype=torch.float64)
    with dear.whole(model):
        if dear.rank() == 0:
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))
            assert torch.equal(copy.deepcopy(model).head.weight, plain.head.weight)
        with dear.whole(model), torch.no_grad():
            model.head.weight.mul_(0.5)  # on every rank
        model.head.bias.data = torch.full_like(model.head.bias, 0.25)
    saved = model.state_dict()
    assert torch.equal(saved["head.weight"], plain.head.weight * 0.5)
    assert bool((saved["head.bias"] == 0.25).all())
    for step in range(2):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    for value in values_of(model):
        same_everywhere(value)


def test_what_cannot_be_done_while_a_model_is_whole_raises() -> None:
    model, optimizer = trained("fsdp")
    optimizer.zero_grad()
    with dear.whole(model):
        local_loss(model).backward()
        with pytest.raises(RuntimeError, match=r"step\(\) inside dear\.whole"):
            optimizer.step()


def test_a_model_that_is_converted_later_says_what_to_do() -> None:
    model, _ = trained("fsdp")
    model.float()
    with pytest.raises(
        RuntimeError, match=r"converted from torch\.float64 to torch\.float32 .* before its optimizer is made"
    ):
        model(torch.ones(1, 9))


def test_a_copy_of_what_is_not_whole_raises() -> None:
    model, _ = trained("fsdp")
    with pytest.raises(RuntimeError, match=r"copied or pickled .* dear\.whole"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"copied or pickled"):
        torch.save(model, io.BytesIO())


def test_rank_0_alone_saves_while_the_others_go_on() -> None:
    model, optimizer = trained("fsdp")
    expected = values_of(model)
    optimizer.zero_grad()
    local_loss(model, 7).backward()
    if dear.rank() == 0:
        for mine, value in zip(values_of(model), expected, strict=True):
            assert torch.equal(mine, value)
        assert torch.equal(model.head.state_dict()["weight"], model.state_dict()["head.weight"])
    optimizer.step()
    assert not any(torch.equal(mine, value) for mine, value in zip(values_of(model), expected, strict=True))


def test_a_model_loads_what_it_saved() -> None:
    model, optimizer = trained("fsdp")
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    after = []
    for _ in range(2):
        optimizer.zero_grad()
        local_loss(model, 3).backward()
        optimizer.step()
        after.append(values_of(model))
        model.load_state_dict(saved)
        optimizer.load_state_dict(state)
    for first, second in zip(*after, strict=True):
        assert torch.equal(first, second)


def test_a_state_of_another_shape_is_refused_and_nothing_is_lost() -> None:
    model, optimizer = trained("fsdp")
    before, wrong = values_of(model), model.state_dict()
    wrong["head.weight"] = torch.ones(3, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"head\.weight: copying a param with shape"):
        model.load_state_dict(wrong)
    optimizer.zero_grad()
    local_loss(model).backward()
    for mine, value in zip(values_of(model), before, strict=True):
        assert torch.equal(mine, value)


def _train_choosing(seed: int, rank: int | None, steps: int) -> list[torch.Tensor]:
    """Each rank leaves out modules of its own, backward, or all of a step; one process does what all of them do."""
    script = random.Random(seed)
    model = _choosing()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if rank is not None:
        small = {"threshold_mb": script.choice([0.001, 0.01, 0.05]), "whole_mb": script.choice(["auto", 0.01, 1.0])}
        optimizer = fsdp.DistributedOptimizer(optimizer, model, **small)
    else:
        script.choice([1, 2, 3])
        script.choice([1, 2, 3])
    for step in range(steps):
        optimizer.zero_grad()
        for other in range(SIZE):
            chosen = [number for number in range(LAYERS) if script.random() < 0.6]
            part = script.choice(["all", "all", "all", "forward", "nothing"])
            generator = torch.Generator().manual_seed(100 * step + other)
            x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
            if rank in (None, other) and part != "nothing":
                loss = model(x, chosen).square().mean() / (SIZE if rank is None else 1)
                if part == "all":
                    loss.backward()
        optimizer.step()
    return values_of(model)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 258))])
def test_ranks_may_leave_out_modules(seed: int) -> None:
    expected, actual = _train_choosing(seed, None, 4), _train_choosing(seed, dear.rank(), 4)
    for mine, value in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-11, atol=1e-12)


def test_a_model_is_used_through_its_methods() -> None:
    """No forward of the whole model tells where a pass begins."""

    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x)))

    def train(distributed: bool) -> list[torch.Tensor]:
        torch.default_generator.manual_seed(5)
        model = Pair().double()
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        if distributed:
            optimizer = fsdp.DistributedOptimizer(optimizer, model, threshold_mb=0.001)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((2, WIDTH), 0.1 * step + 1, dtype=torch.float64)
            with torch.no_grad():
                model.encode(x)
            model.encode(x).square().mean().backward()
            optimizer.step()
        return values_of(model)

    for mine, value in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(SIZE == 1, reason="one rank cannot differ from itself")
def test_a_pass_on_one_rank_alone_is_told_before_anything_is_updated() -> None:
    """Where others' gathers answer it. Otherwise it waits, and the watchdog says for whom."""
    model, optimizer = trained("fsdp")
    before = values_of(model)
    engine = optimizer._engine
    optimizer.zero_grad()
    local_loss(model).backward()
    engine.unsharder.series += dear.rank()  # as if other buckets had been gathered
    with pytest.raises(SignatureMismatch, match=r"ranks have not made the same passes through the model"):
        optimizer.step()
    for mine, value in zip(values_of(model), before, strict=True):
        assert torch.equal(mine, value)


def test_what_fsdp_cannot_do_is_said() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4, max_norm=1.0), torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"'0' has max_norm=1\.0"):
        fsdp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    plain = torch.nn.Linear(4, 4)
    with pytest.raises(TypeError, match="needs the module, and was given NoneType"):
        fsdp.DistributedOptimizer(torch.optim.SGD(plain.parameters(), 0.1))
    with pytest.raises(ValueError, match="whole_mb should be above 0"):
        fsdp.DistributedOptimizer(torch.optim.SGD(plain.parameters(), 0.1), plain, whole_mb=0)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_several_backward_passes_add_up_in_shards(seed: int) -> None:
    """Each is reduced; ranks leave out modules of their own, and a step now and then keeps the gradients of the last."""

    def train(rank: int | None) -> list[torch.Tensor]:
        script = random.Random(seed)
        model = _choosing()
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if rank is not None:
            optimizer = fsdp.DistributedOptimizer(optimizer, model, threshold_mb=0.01)
        for step in range(4):
            if script.random() < 0.7:
                optimizer.zero_grad()
            for part in range(script.randint(1, 4)):
                for other in range(SIZE):
                    chosen = [number for number in range(LAYERS) if script.random() < 0.6]
                    generator = torch.Generator().manual_seed(100 * step + 10 * part + other)
                    x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
                    if rank in (None, other):
                        (model(x, chosen).square().mean() / (SIZE if rank is None else 1)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        return values_of(model)

    for mine, value in zip(train(dear.rank()), train(None), strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("passes", [1, 2])
def test_two_forward_passes_before_two_backward_passes(passes: int) -> None:
    model, optimizer = trained("fsdp")
    plain = double_model("Mlp")
    plain.load_state_dict(model.state_dict())
    reference = torch.optim.SGD(plain.parameters(), 0.05)
    optimizer.set_backward_passes_per_step(passes)
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.zero_grad()
    for loss in [local_loss(model, step) for step in range(2)]:
        loss.backward()
    optimizer.step()
    for rank in range(SIZE):
        for step in range(2):
            (local_loss(plain, step, rank) / SIZE).backward()
    reference.step()
    for mine, value in zip(values_of(model), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, value.detach(), rtol=1e-11, atol=1e-12)


def test_ranks_out_of_data_give_their_shares_to_several_backward_passes() -> None:
    def data(step: int, part: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
        return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)

    model, plain = _choosing(), _choosing()
    every, chosen = [rank + 2 for rank in range(SIZE)], [*range(LAYERS)]
    optimizer = fsdp.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, threshold_mb=0.01)
    for step in range(every[dear.rank()]):
        for part in range(3):
            model(data(step, part, dear.rank()), chosen).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dear.join()
    reference = torch.optim.AdamW(plain.parameters())
    for step in range(max(every)):
        present = [rank for rank in range(SIZE) if step < every[rank]]
        for part in range(3):
            for rank in present:
                (plain(data(step, part, rank), chosen).square().mean() / len(present)).backward()
        reference.step()
        reference.zero_grad()
    for mine, value in zip(values_of(model), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, value.detach(), rtol=1e-10, atol=1e-11)


def test_a_parameter_of_two_modules_is_one_tensor_in_the_state_dict() -> None:
    model = double_model("Tied")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, strategy="fsdp")
    local_loss(model).backward()
    optimizer.step()
    for saved in (model.state_dict(), model.state_dict()):
        assert saved["first.weight"].data_ptr() == saved["second.weight"].data_ptr()
        assert saved["first.weight"].data_ptr() != saved["head.weight"].data_ptr()
        same_everywhere(saved["second.weight"])
    kept, before = saved, saved["first.weight"].clone()
    optimizer.zero_grad()
    local_loss(model, 1).backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["first.weight"], before)
    assert torch.equal(kept["second.weight"], before), "an earlier state dict stays what it was"


@pytest.mark.parametrize("check_every", [None, 1])
def test_two_optimizers_share_a_model(check_every: int | None) -> None:
    """What the other one has freed was not changed by forward; also not where it has one element alone."""

    def train(wrap: Any) -> list[torch.Tensor]:
        torch.default_generator.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(9, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        optimizers = [wrap(torch.optim.Adam(model[part].parameters(), 0.01), model) for part in (0, 2)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.stack([local_loss(model, step, rank) for rank in ranks]).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        dear.check_replicas(model)
        return values_of(model)

    ranks: list[int] = [dear.rank()]
    options: dict[str, Any] = {"threshold_mb": 0.001, "check_every": check_every}
    mine = train(lambda optimizer, model: fsdp.DistributedOptimizer(optimizer, model, **options))
    ranks = list(range(SIZE))
    for value, expected in zip(mine, train(lambda optimizer, _model: optimizer), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(SIZE == 1, reason="one rank waits for no other")
def test_a_rank_may_read_what_slower_ranks_are_still_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they do not load again before it has."""
    model, optimizer = _trained_for_loading()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    if dear.rank() > 0:
        load = type(model[0])._load_from_state_dict

        def slowly(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.05)
            load(*args, **kwargs)

        monkeypatch.setattr(type(model[0]), "_load_from_state_dict", slowly)
    for factor in (2.0, 3.0, 4.0):
        model.load_state_dict({name: value * factor for name, value in saved.items()})
        if dear.rank() == 0:
            time.sleep(0.0 if factor == 2.0 else 0.4)  # until the others are ready for the next one
            for name, value in model.state_dict().items():
                assert torch.equal(value, saved[name] * factor), name
    del optimizer


def _trained_for_loading() -> tuple[Any, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(4)))
    optimizer = fsdp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, threshold_mb=0)
    model(torch.ones(1, 9)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer
