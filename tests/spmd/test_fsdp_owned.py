"""Sharded models whose optimizer needs whole parameters: each lies on one rank between uses."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dear
import fsdp
import oss
from overlap.plan.assignment import assign_owners
from overlap.plan.plan import Updates
from tests.spmd.listening import heard
from tests.spmd.loops import LOOPS
from tests.spmd.models import MODELS, WIDTH, adafactor, double_model, single_model
from tests.spmd.strategies import WRAP
from tests.spmd.training import (
    assert_close,
    halves,
    local_loss,
    loop_alone,
    same_everywhere,
    train_in_loop,
    values_of,
)
from tests.spmd_plugin import SIZE

pytestmark = pytest.mark.four_ranks

SOMETIMES = ("plain", "zeros_kept", "skipped_steps", "scaled", "scaled_and_clipped")  # loops with unused parameters


class Rows(torch.optim.Optimizer):
    """Divides each row of a gradient by what is known of its size; no slice of a parameter tells that."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                state, rows = self.state[param], param.grad.reshape(len(param), -1)
                if not state:
                    state["step"], state["squares"] = torch.tensor(0.0), param.new_zeros(len(param))
                    state["momentum"] = torch.zeros_like(param)
                state["step"] += 1
                state["squares"].mul_(0.9).add_(rows.square().mean(1), alpha=0.1)
                scale = state["squares"].sqrt().add_(1e-8).view(-1, *[1] * (param.dim() - 1))
                state["momentum"].mul_(0.9).add_(param.grad / scale)
                param.add_(state["momentum"], alpha=-group["lr"])


def _muon(params: Any) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")
    return torch.optim.Muon(params, 0.02)


KINDS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "adafactor": (lambda params: adafactor(params, 1e-2), {}),
    "muon": (_muon, {}),
    "rows": (Rows, {"per_parameter": True}),
}


class Matrices(nn.Module):
    """What Muon takes: parameters of two dimensions alone."""

    def __init__(self, width: int = WIDTH, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor, chosen: Any = None) -> torch.Tensor:
        for number in range(len(self.layers)) if chosen is None else chosen:
            x = x + torch.tanh(self.layers[number](x))
        return x


def _matrices(seed: int = 7, **sizes: int) -> Matrices:
    torch.default_generator.manual_seed(seed)
    return Matrices(**sizes)


def _wrapped(way: str, kind: str, model: nn.Module, **options: Any) -> Any:
    make, promise = KINDS[kind]
    optimizer = make(model.parameters())
    if way == "fully_shard":
        for layer in model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model, **promise)
        return optimizer
    package = oss if way == "oss" else fsdp
    return package.DistributedOptimizer(optimizer, model, threshold_mb=0.001, **promise, **options)


def _train(model: nn.Module, optimizer: Any, steps: Any = range(3), clip: float | None = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, y = halves(step, dear.rank())
        nn.functional.mse_loss(model(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def _check_owned(optimizer: Any) -> None:
    """Everything is freed, and no parameter is cut."""
    assert optimizer.strategy.updates is Updates.OWNED
    for bucket in optimizer.buckets:
        assert bucket.freed
        edges = [sum(bucket.shares[:rank]) for rank in range(SIZE)]
        for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True):
            assert not any(offset < edge < offset + slot.param.numel() for edge in edges)


def _as_one_process(model: str, optimizer: str, loop: str, strategy: str) -> None:
    expected = loop_alone(model, optimizer, loop)
    for mine, theirs in zip(train_in_loop(model, optimizer, loop, strategy), expected, strict=True):
        assert_close(mine, theirs, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_loops(loop: str) -> None:
    model = "Sometimes" if loop in SOMETIMES else "Mlp"
    _as_one_process(model, "sgd", loop, "fsdp-owned")
    if loop != "group_added":  # see test_parity
        _as_one_process(model, "adafactor", loop, "fsdp")


@pytest.mark.parametrize("model", MODELS)
def test_models(model: str) -> None:
    _as_one_process(model, "adam-steady", "plain", "fsdp-owned")
    if model not in ("OddParameters", "Attention"):  # which has gradients that are zero but for rounding
        _as_one_process(model, "adafactor", "plain", "fsdp")


@pytest.mark.parametrize("way", ["fsdp", "fully_shard"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_bit_for_bit_as_oss(kind: str, clip: float | None, way: str) -> None:
    found = []
    for each in (way, "oss"):
        model = _matrices(seed=7 + dear.rank())  # rank 0's values count
        with heard(logging.WARNING) as said:
            optimizer = _wrapped(each, kind, model)
            _train(model, optimizer, range(5), clip)
        assert not any("keeps all optimizer state" in text for text in said)
        if each != "oss":
            _check_owned(optimizer)
        found.append((values_of(model), optimizer.state_dict()["state"]))
    (mine, state), (theirs, other) = found
    for value, expected in zip(mine, theirs, strict=True):
        if clip is None:
            assert torch.equal(value, expected)
        else:  # a norm is a sum in the order of the pieces
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert_close(state, other, kind) if clip is None else None


@pytest.mark.parametrize("kind", KINDS)
def test_bit_for_bit_as_one_process(kind: str) -> None:
    """At one and two ranks."""
    if SIZE > 2:
        pytest.skip("the order of a sum of more than two numbers depends on the algorithm")
    model, alone = _matrices(), _matrices()
    optimizer, plain = _wrapped("fsdp", kind, model), KINDS[kind][0](alone.parameters())
    _train(model, optimizer, range(5))
    for step in range(5):
        gradients = []
        for rank in range(SIZE):
            plain.zero_grad()
            x, y = halves(step, rank)
            nn.functional.mse_loss(alone(x), y).backward()
            gradients.append([parameter.grad for parameter in alone.parameters()])
        for parameter, *parts in zip(alone.parameters(), *gradients, strict=True):
            parameter.grad = sum(parts[1:], parts[0]) / SIZE
        plain.step()
    for value, expected in zip(values_of(model), alone.parameters(), strict=True):
        assert torch.equal(value, expected)
    state, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert state.keys() == expected.keys()
    for number, values in expected.items():
        for key, value in values.items():
            assert torch.equal(state[number][key], value), key


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory behind `tensors`, each counted once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def test_between_passes_a_rank_holds_its_share_of_everything() -> None:
    model = _matrices(width=64, layers=16)
    parameters = list(model.parameters())
    whole = sum(parameter.nbytes for parameter in parameters)
    inner = Rows(parameters)
    optimizer = dear.DistributedOptimizer(inner, model, strategy="fsdp", per_parameter=True, threshold_mb=0.02)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 64), 1.0 + dear.rank() + step)).square().mean().backward()
        buckets = optimizer.buckets
        assert len(buckets) > 8
        assert not any(bucket.parameters.there for bucket in buckets), "backward has freed what it used"
        optimizer.step()
        assert not any(bucket.gradients.there for bucket in buckets)
        shards = [buffer.shard for bucket in buckets for buffer in (bucket.parameters, bucket.gradients)]
        state = [value for each in optimizer.held_state.values() for value in each.values()]
        held = _bytes([*shards, *state])
        assert 0.9 * 3 * whole / SIZE <= held <= 1.1 * 3 * whole / SIZE
    model(torch.ones(1, 64)).sum().backward()
    assert _bytes(parameters) <= whole / 64, "each is one number that stands for it"
    owners = assign_owners([parameter.numel() for parameter in parameters], [0] * SIZE)
    mine = [parameter for parameter, owner in zip(parameters, owners, strict=True) if owner == dear.rank()]
    assert set(optimizer.held_state) == set(mine)


def _loss(model: nn.Module, step: int, rank: int, chosen: Any = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    return model(x, chosen).square().mean()


def _alone(
    model: nn.Module, plain: torch.optim.Optimizer, steps: Iterable[int], chosen: Any = lambda _rank: None
) -> None:
    """What all ranks do, in one process."""
    for step in steps:
        plain.zero_grad()
        for rank in range(SIZE):
            (_loss(model, step, rank, chosen(rank)) / SIZE).backward()
        plain.step()


def _together(model: nn.Module, optimizer: Any, steps: Iterable[int], chosen: Any = lambda _rank: None) -> None:
    for step in steps:
        optimizer.zero_grad()
        _loss(model, step, dear.rank(), chosen(dear.rank())).backward()
        optimizer.step()


def _close(model: nn.Module, other: nn.Module) -> None:
    for mine, value in zip(values_of(model), other.parameters(), strict=True):
        torch.testing.assert_close(mine, value.detach(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("way", ["fsdp", "fully_shard"])
@pytest.mark.parametrize("layers", [1, 3, 6])
def test_ranks_use_different_matrices_and_some_own_none(layers: int, way: str) -> None:
    model, alone = _matrices(layers=layers).double(), _matrices(layers=layers).double()
    optimizer, plain = _wrapped(way, "rows", model), Rows(alone.parameters())

    def chosen(rank: int) -> list[int]:
        return [number for number in range(layers) if layers == 1 or SIZE == 1 or (number + rank) % 3 != 1]

    _together(model, optimizer, range(4), chosen)
    _alone(alone, plain, range(4), chosen)
    _close(model, alone)
    _check_owned(optimizer)
    owned = dear.allgather_object(len(optimizer.held_state))
    assert owned == [sum(number % SIZE == rank for number in range(layers)) for rank in range(SIZE)]
    for value in values_of(model):
        same_everywhere(value)


def test_all_optimizers_of_a_model_shard_it_in_their_own_way() -> None:
    """Matrices lie whole on their owners; biases, norms and the embedding are cut anywhere."""

    def train(way: str | None) -> Any:
        torch.default_generator.manual_seed(5)
        model = nn.Sequential(
            nn.Embedding(11, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.LayerNorm(WIDTH)
        )
        matrices = [layer.weight for layer in model[1:5]]
        others = [each for each in model.parameters() if not any(each is matrix for matrix in matrices)]
        optimizers: list[Any] = [KINDS["muon"][0](matrices), torch.optim.AdamW(others, 0.01)]
        if way is not None:
            optimizers = [
                dear.DistributedOptimizer(each, model, strategy=way, threshold_mb=0.001) for each in optimizers
            ]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            tokens = torch.randint(11, (6,), generator=torch.Generator().manual_seed(10 * step + dear.rank()))
            model(tokens).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        return model, optimizers

    model, (muon, adamw) = train("fsdp")
    _check_owned(muon)
    assert adamw.strategy.updates is Updates.SHARDED
    assert all(bucket.freed for bucket in adamw.buckets)
    other, theirs = train("oss")
    for mine, value in zip(values_of(model), values_of(other), strict=True):
        assert torch.equal(mine, value)
    for each, reference in zip((muon, adamw), theirs, strict=True):
        assert_close(each.state_dict()["state"], reference.state_dict()["state"], "state")
    with dear.whole(model):
        for value, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("kind", ["adafactor", "rows"])
def test_a_state_of_one_process_is_taken_up_and_given_back(kind: str) -> None:
    alone, model = _matrices().double(), _matrices().double()
    plain = KINDS[kind][0](alone.parameters())
    _alone(alone, plain, range(2))
    optimizer = _wrapped("fsdp", kind, model)
    model.load_state_dict(copy.deepcopy(alone.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    _together(model, optimizer, range(2, 4))
    _alone(alone, plain, range(2, 4))
    _close(model, alone)
    third = _matrices(seed=8).double()
    last = KINDS[kind][0](third.parameters())
    third.load_state_dict(model.state_dict())
    last.load_state_dict(optimizer.state_dict())
    _alone(third, last, range(4, 6))
    _alone(alone, plain, range(4, 6))
    for mine, value in zip(third.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", ["adafactor", "rows"])
@pytest.mark.parametrize("ways", [("fsdp", "fsdp"), ("fsdp", "oss"), ("oss", "fsdp"), ("fully_shard", "fsdp")])
def test_checkpoints(kind: str, ways: tuple[str, str], tmp_path: Path) -> None:
    folder = Path(dear.broadcast_object(str(tmp_path))) / "one"
    model = _matrices().double()
    optimizer = _wrapped(ways[0], kind, model)
    _together(model, optimizer, range(2))
    dear.save_checkpoint(folder, model, optimizer)
    other = _matrices(seed=9).double()
    fresh = _wrapped(ways[1], kind, other)
    _together(other, fresh, range(1))
    dear.load_checkpoint(folder, other, fresh)
    for each, its in ((model, optimizer), (other, fresh)):
        _together(each, its, range(2, 4))
    for mine, value in zip(values_of(other), values_of(model), strict=True):
        assert torch.equal(mine, value)


def test_a_rank_writes_what_it_owns(tmp_path: Path) -> None:
    folder = Path(dear.broadcast_object(str(tmp_path))) / "one"
    model = _matrices(width=64, layers=8).double()
    optimizer = _wrapped("fsdp", "rows", model)
    model(torch.ones(2, 64, dtype=torch.float64)).sum().backward()
    optimizer.step()
    state = dear.sharded_state_dict(model, optimizer)
    held = [value.held for value in state["model"].values()]
    assert sum(value.numel() for value in held) * SIZE == 8 * 64 * 64
    assert {value.numel() for value in held} <= {0, 64 * 64}
    dear.save_checkpoint(folder, model, optimizer)
    mine = sum(file.stat().st_size for file in folder.glob(f"__{dear.rank()}_*"))
    assert mine <= 1.3 * 2 * 8 * 64 * 64 * 8 / SIZE


@pytest.mark.parametrize("way", ["fsdp", "fully_shard"])
def test_a_deferred_model_gets_its_values_from_rank_0(way: str) -> None:
    torch.default_generator.manual_seed(7 + dear.rank())
    with dear.deferred_init():
        model = Matrices().double()
    alone = _matrices().double()
    optimizer, plain = _wrapped(way, "adafactor", model), KINDS["adafactor"][0](alone.parameters())
    _together(model, optimizer, range(3))
    _alone(alone, plain, range(3))
    _close(model, alone)
    _check_owned(optimizer)


def test_an_owned_parameter_of_another_layout_is_updated_in_its_own_shape() -> None:
    def train(distributed: bool) -> Any:
        torch.default_generator.manual_seed(5)
        model = nn.Conv2d(3, 5, 3).double().to(memory_format=torch.channels_last)
        optimizer: Any = Rows(model.parameters())
        if distributed:
            optimizer = fsdp.DistributedOptimizer(optimizer, model, per_parameter=True)
        for step in range(3):
            optimizer.zero_grad()
            for rank in [dear.rank()] if distributed else range(SIZE):
                x = torch.randn(
                    2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
                )
                (model(x).square().mean() / (1 if distributed else SIZE)).backward()
            optimizer.step()
        if distributed:
            model.load_state_dict(model.state_dict())
        return model.state_dict(), optimizer.state_dict()

    for mine, theirs in zip(train(True), train(False), strict=True):
        assert_close(mine, theirs, "channels_last")


def test_what_is_written_while_a_model_is_whole_counts() -> None:
    model, alone = _matrices().double(), _matrices().double()
    optimizer, plain = _wrapped("fsdp", "rows", model), Rows(alone.parameters())
    _together(model, optimizer, range(2))
    _alone(alone, plain, range(2))
    with dear.whole(model), torch.no_grad():
        for each in (model, alone):
            each.layers[1].weight.mul_(0.5)
        model.layers[2].weight.data = alone.layers[2].weight + 0
        assert torch.equal(copy.deepcopy(model).layers[1].weight, model.layers[1].weight)
    _together(model, optimizer, range(2, 4))
    _alone(alone, plain, range(2, 4))
    _close(model, alone)


@pytest.mark.parametrize("syncs", [True, False])
def test_accumulation(syncs: bool) -> None:
    """Each backward pass is reduced, and they add up at the owners; or they add up whole, and the last one is reduced."""
    model, alone = _matrices().double(), _matrices().double()
    optimizer, plain = _wrapped("fsdp", "rows", model), Rows(alone.parameters())
    for step in range(3):
        for each in (optimizer, plain):
            each.zero_grad()
        for part in range(3):
            if syncs or part == 2:
                _loss(model, 10 * step + part, dear.rank()).backward()
            else:
                with optimizer.no_sync():
                    _loss(model, 10 * step + part, dear.rank()).backward()
            for rank in range(SIZE):
                (_loss(alone, 10 * step + part, rank) / SIZE).backward()
        for each in (model, alone):
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05)
        optimizer.step()
        plain.step()
    _close(model, alone)


def test_ranks_out_of_data_give_what_they_own() -> None:
    model, alone = _matrices().double(), _matrices().double()
    optimizer, plain = _wrapped("fsdp", "rows", model), Rows(alone.parameters())
    every = [rank + 2 for rank in range(SIZE)]
    _together(model, optimizer, range(every[dear.rank()]))
    dear.join()
    for step in range(max(every)):
        plain.zero_grad()
        present = [rank for rank in range(SIZE) if step < every[rank]]
        for rank in present:
            (_loss(alone, step, rank) / len(present)).backward()
        plain.step()
    _close(model, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_for_passes_and_exact_at_the_owner(dtype: torch.dtype) -> None:
    """As `oss`, which rounds after the first step, where both begin with rounded values."""
    found = []
    for way in ("fsdp", "oss"):
        model = _matrices()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()
        optimizer = _wrapped(way, "rows", model, gather_dtype=dtype, compression=dear.Compression.bf16)
        _train(model, optimizer)
        found.append(optimizer.state_dict() if way == "oss" else values_of(model))
    mine, theirs = found
    for number, value in enumerate(mine):
        assert torch.equal(value, theirs["master"][number])


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="takes a newer torch")
def test_used_in_16_bits() -> None:
    """Parameters are of 16 bits in passes, and exact in the optimizer."""
    model = _matrices()
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16)
    fsdp.fully_shard(model, mp_policy=policy)
    optimizer = adafactor(model.parameters(), 1e-2)
    types = []
    model.layers[0].register_forward_hook(lambda module, _inputs, _output: types.append(module.weight.dtype))
    _train(model, optimizer)
    _check_owned(optimizer)
    assert set(types) == {torch.bfloat16}
    assert {value.dtype for value in values_of(model)} == {torch.float32}
    for value in values_of(model):
        same_everywhere(value)


@pytest.mark.parametrize("passes", [1, 3])
def test_parameters_are_unfrozen_and_added(passes: int) -> None:
    def train(rank: int | None) -> list[torch.Tensor]:
        model = _matrices().double()
        first, last = model.layers[0].weight, model.layers[4].weight
        first.requires_grad_(False)
        optimizer: Any = Rows([each for each in model.parameters() if each is not last])
        if rank is not None:
            optimizer = fsdp.DistributedOptimizer(optimizer, model, per_parameter=True, threshold_mb=0.001)
        step_on = _together if rank is not None else _alone
        step_on(model, optimizer, range(passes))
        first.requires_grad_(True)
        step_on(model, optimizer, range(passes, 2 * passes))
        optimizer.add_param_group({"params": [last]})
        step_on(model, optimizer, range(2 * passes, 3 * passes))
        if rank is not None:
            _check_owned(optimizer)
        return values_of(model)

    for mine, value in zip(train(dear.rank()), train(None), strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("promise", "updates"),
    [({}, None), ({"per_parameter": True}, Updates.OWNED), ({"elementwise": True}, Updates.SHARDED)],
)
def test_an_unknown_optimizer_needs_a_promise(promise: dict[str, Any], updates: Updates | None) -> None:
    model, plain = single_model(), single_model()
    with heard(logging.WARNING) as said:
        optimizer = fsdp.DistributedOptimizer(_Unknown(model.parameters(), 0.05), model, **promise)
    told = any("_Unknown is not known to update each parameter from its own gradient" in text for text in said)
    assert told is (dear.rank() == 0 and updates is None)
    _train(model, optimizer)
    assert {bucket.freed for bucket in optimizer.buckets} == {updates is not None}
    if updates is not None:
        assert optimizer.strategy.updates is updates
    wrapped = oss.DistributedOptimizer(torch.optim.SGD(plain.parameters(), 0.05), plain)
    _train(plain, wrapped)
    for mine, value in zip(values_of(model), values_of(plain), strict=True):
        torch.testing.assert_close(mine, value)


class _Unknown(torch.optim.SGD):
    """Might look at all parameters at once, for all we know."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_what_needs_all_parameters_at_once_keeps_them_with_a_warning() -> None:
    model = double_model("Mlp")
    with heard(logging.WARNING) as said:
        optimizer = WRAP["fsdp"](torch.optim.LBFGS(model.parameters(), 0.1, 4), model)
    assert any("strategy 'fsdp' keeps all optimizer state on every rank" in text for text in said) is (dear.rank() == 0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = local_loss(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not any(bucket.freed for bucket in optimizer.buckets)


@pytest.mark.parametrize("owned", [True, False])
def test_a_parameter_outside_the_model_stays_whole_beside_others(owned: bool) -> None:
    model, alone = _matrices().double(), _matrices().double()
    found = []
    for each, ranks in ((model, [dear.rank()]), (alone, range(SIZE))):
        extra = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.float64))
        parameters = [*each.parameters(), extra]
        optimizer: Any = Rows(parameters) if owned else torch.optim.AdamW(parameters)
        if each is model:
            optimizer = fsdp.DistributedOptimizer(optimizer, each, per_parameter=owned)
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                loss = _loss(each, step, rank) + (extra * (rank + 1)).square().mean()
                (loss / len(ranks)).backward()
            optimizer.step()
        found.append(extra.detach())
    _close(model, alone)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)


def test_promises_are_checked() -> None:
    model = _matrices()
    inner = torch.optim.AdamW(model.parameters())
    assert dear.DistributedOptimizer(inner, model, strategy="fsdp").strategy.updates is Updates.SHARDED
    sharded = _matrices()
    fsdp.fully_shard(sharded.layers[0], per_parameter=True)
    fsdp.fully_shard(sharded, per_parameter=False)
    _optimizer = Rows(sharded.parameters())
    with pytest.raises(ValueError, match="per_parameter is True for some modules of a model and False for others"):
        sharded(torch.ones(1, WIDTH))
