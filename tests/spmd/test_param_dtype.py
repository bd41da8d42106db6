"""``fully_shard()`` with a `param_dtype`: as torch's own FSDP2, in the same job, over gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.utils.checkpoint import checkpoint

import dear
import fsdp
from tests.spmd.training import same_everywhere
from tests.spmd_plugin import SIZE

BF16 = torch.bfloat16
WIDTH, WORDS = 12, 101
Shard = Callable[..., Any]


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    """torch's needs a default group, which one process has not by itself."""
    alone = not torch.distributed.is_initialized()
    if alone:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    if alone:
        torch.distributed.destroy_process_group()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        assert options["rows"][0].dtype is torch.int64
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * options["scales"][0]


class Words(torch.nn.Module):
    """Its head is its embedding, which is used at both ends of a pass, and freed in between."""

    def __init__(self, checkpoints: bool | None) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        options = {"scales": [torch.full((), 0.7)], "rows": (tokens,)}  # of float32: the cast reaches them
        for block in self.blocks:
            if self.checkpoints is None:
                x = block(x, options)
            else:
                x = checkpoint(block, x, options, use_reentrant=self.checkpoints)
        return self.head(x)


class _Run:
    """A model that `shard` shards, with what has passed through it."""

    def __init__(
        self, shard: Shard, *, checkpoints: bool | None = None, reshard: bool | None = None, **policy: Any
    ) -> None:
        torch.default_generator.manual_seed(3)
        self.model = Words(checkpoints)
        inner, outer = (
            MixedPrecisionPolicy(**{"param_dtype": BF16, **policy, **kind}) for kind in ({"output_dtype": None}, {})
        )
        options: dict[str, Any] = {} if reshard is None else {"reshard_after_forward": reshard}
        for block in self.model.blocks:
            shard(block, mp_policy=inner, **options)
        shard(self.model, mp_policy=outer, **options)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.seen: list[tuple[str, Any]] = []
        for name, module in self.model.named_modules():
            module.register_forward_hook(
                lambda module, _inputs, output, name=name: self.seen.append(
                    (name, output.dtype, [each.dtype for each in module._parameters.values() if each is not None])
                )
            )
            if isinstance(module, torch.nn.Linear):
                module.register_full_backward_hook(
                    lambda _module, _inputs, outputs, name=name: self.seen.append((f"d {name}", outputs[0].dtype))
                )

    def loss(self, step: int, part: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * part + dear.rank())
        tokens = torch.randint(WORDS, (2, 5), generator=generator)
        return torch.nn.functional.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.roll(1).flatten())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        found = self.model.state_dict()
        return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in found.items()}


def _both(train: Callable[[_Run], list[torch.Tensor]], **options: Any) -> tuple[_Run, _Run]:
    """What `train` returns is the same for both, but for the rounding of averages."""
    runs = _Run(fsdp.fully_shard, **options), _Run(torchs, **options)
    mine, other = (train(run) for run in runs)
    torch.testing.assert_close(torch.stack(mine), torch.stack(other), rtol=2e-2, atol=2e-2)
    values = runs[0].values(), runs[1].values()
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        assert value.dtype is torch.float32
        same_everywhere(value)
        torch.testing.assert_close(value, values[1][name], rtol=2e-2, atol=1e-2)
    return runs


def _steps(run: _Run) -> list[torch.Tensor]:
    losses = []
    for number in range(4):
        losses.append(run.loss(number))
        losses[-1].backward()
        run.step()
    return [each.detach() for each in losses]


@pytest.mark.parametrize("reduced", [None, torch.float32, BF16])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_losses_and_types_are_torchs(reshard: bool | None, reduced: torch.dtype | None) -> None:
    mine, other = _both(_steps, reshard=reshard, reduce_dtype=reduced, output_dtype=torch.float32)
    assert mine.seen == other.seen
    assert ("blocks.0.up", BF16, [BF16, BF16]) in mine.seen
    assert ("d blocks.0.up", BF16) in mine.seen
    for parameter in mine.model.parameters():
        assert parameter.dtype is torch.float32
        assert mine.optimizer.state[parameter]["momentum_buffer"].dtype is torch.float32
    assert "master" not in mine.optimizer.state_dict()


def test_inputs_stay_as_they_are_where_that_is_asked_for() -> None:
    class Sees(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, more: Any) -> torch.Tensor:
            seen.append((x.dtype, more[0]["y"].dtype, more[1].dtype))
            return self.layer(x.to(self.layer.weight.dtype))

    more = [{"y": torch.ones(2, dtype=torch.float64)}, torch.ones(2, dtype=torch.int32)]
    found = []
    for shard in (fsdp.fully_shard, torchs):
        for casts in (True, False):
            seen: list[Any] = []
            model = Sees()
            shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=casts))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(torch.ones(2, 4), more=more).sum().backward()
            optimizer.step()
            found.append(seen[-1])
    assert found[:2] == found[2:]
    assert found[:2] == [(BF16, BF16, torch.int32), (torch.float32, torch.float64, torch.int32)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(reentrant: bool) -> None:
    _both(_steps, checkpoints=reentrant)


@pytest.mark.parametrize("syncs", [True, False], ids=["each backward is reduced", "the last backward is reduced"])
def test_accumulation(syncs: bool) -> None:
    def train(run: _Run) -> list[torch.Tensor]:
        losses = []
        for number in range(3):
            for part in range(3):
                if not syncs:
                    run.model.set_requires_gradient_sync(part == 2)
                losses.append(run.loss(number, part))
                losses[-1].backward()
            run.step()
        return [each.detach() for each in losses]

    _both(train)


def test_the_norm_that_is_clipped_by() -> None:
    def train(run: _Run) -> list[torch.Tensor]:
        norms = []
        for number in range(3):
            run.loss(number).backward()
            norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
            norms.append(getattr(norm, "full_tensor", lambda norm=norm: norm)().detach())
            run.step()
        return norms

    _both(train)


def test_several_passes_make_one_graph_and_evaluation_comes_between() -> None:
    def train(run: _Run) -> list[torch.Tensor]:
        losses = []
        for number in range(3):
            loss = run.loss(number) + run.loss(number, 1)
            losses.append(loss.detach())
            loss.backward()
            run.step()
            with torch.no_grad():
                losses.append(run.loss(number, 2))
        return losses

    runs = _both(train)
    assert all(parameter.dtype is torch.float32 for parameter in runs[0].model.parameters())


def test_gradients_are_of_the_parameters_own_type() -> None:
    run = _Run(fsdp.fully_shard)
    for number in range(2):
        run.loss(number).backward()
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype is parameter.dtype is torch.float32
        run.optimizer.synchronize()
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            assert not bool(parameter.grad.isnan().any())
            same_everywhere(parameter.grad)
        run.step()


def test_whole_parameters_are_exact_and_copies_are_of_the_own_type() -> None:
    run = _Run(fsdp.fully_shard)
    _steps(run)
    expected = run.values()
    with dear.whole(run.model):
        for name, parameter in run.model.named_parameters():
            assert torch.equal(parameter, expected[name])
        mine = copy.deepcopy(run.model)
        run.loss(0)  # computes in float32
    assert all(torch.equal(value, expected[name]) for name, value in mine.state_dict().items())
    run.loss(1).backward()
    run.step()


def test_a_checkpoint_resumes_bit_for_bit() -> None:
    run, other = _Run(fsdp.fully_shard), _Run(fsdp.fully_shard)
    _steps(run)
    alone = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict())) if dear.rank() == 0 else None
    saved: Any = dear.broadcast_object(alone)
    other.loss(7).backward()
    other.step()
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    dear.barrier()
    for each in (run, other):
        each.loss(9).backward()
        each.step()
    mine = run.values()
    assert all(torch.equal(value, mine[name]) for name, value in other.values().items())


def test_parameters_take_half_the_memory_while_they_are_whole() -> None:
    run = _Run(fsdp.fully_shard)
    held: list[tuple[bool, bool]] = []
    buckets = lambda: run.optimizer.buckets  # noqa: E731
    run.loss(0).backward()
    run.step()
    run.model.blocks[1].register_forward_hook(
        lambda *_: held.extend((bucket.parameters.there, bucket.master.buffer.there) for bucket in buckets())
    )
    run.loss(1).backward()
    assert not any(exact for exact, _ in held)
    assert any(rounded for _, rounded in held)
    assert not any(bucket.parameters.there or bucket.master.buffer.there for bucket in buckets())


def test_what_is_not_trained_stays_as_it_is() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    frozen = model[0].weight.requires_grad_(False)
    fsdp.fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
    with pytest.raises(NotImplementedError, match=r"'0\.weight', which is not trained, stays torch\.float32: convert"):
        model(torch.ones(2, 4))
    frozen.data = frozen.data.to(BF16)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_other_types_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match=r"param_dtype is torch\.float64, and parameters are torch\.float32"):
        fsdp.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    fsdp.fully_shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    fsdp.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(NotImplementedError, match="param_dtype differs between modules"):
        model(torch.ones(1, 2))
    del optimizer
    model = fsdp.fully_shard(torch.nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    whole = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match=r"param_dtype=torch\.bfloat16 rounds .* LBFGS is not known"):
        model(torch.ones(1, 2))
    del whole


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for number in chosen:
            x = torch.tanh(self.layers[number](x))
        return x


def _branches(dtype: torch.dtype = BF16) -> tuple[Any, Any]:
    torch.default_generator.manual_seed(5)
    model, policy = Branches(), MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
    for layer in model.layers:
        fsdp.fully_shard(layer, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_ranks_use_different_modules() -> None:
    model, optimizer = _branches()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):
        model(torch.full((2, 8), 1.0 + step), [0, dear.rank() % 2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        same_everywhere(value)
        assert torch.equal(value, before[name]) is (("layers.2" in name) or (SIZE == 1 and "layers.1" in name))


def test_a_rank_out_of_data_joins() -> None:
    model, optimizer = _branches()
    for step in range(1 if dear.rank() == 0 else 3):
        model(torch.full((2, 8), 1.0 + step), [0, 1, 2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dear.join()
    for value in model.state_dict().values():
        same_everywhere(value)
        assert bool(value.isfinite().all())
    with torch.no_grad():
        same_everywhere(model(torch.ones(2, 8), [0, 1, 2]))


def test_a_grad_scaler_with_float16() -> None:
    model, optimizer = _branches(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # too large for numbers of 16 bits
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(12):
        loss = model(torch.full((2, 8), 1.0 + step % 3), [0, 1, 2]).square().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).ndim == 0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() < 2.0**20
    for name, value in model.state_dict().items():
        assert bool(value.isfinite().all())
        assert not torch.equal(value, before[name])
        same_everywhere(value)


def test_settings_may_change_between_steps() -> None:
    def train(run: _Run) -> list[torch.Tensor]:
        losses = []
        for number, reshard in enumerate((True, False, True)):
            run.model.set_reshard_after_forward(reshard)
            losses.append(run.loss(number))
            losses[-1].backward()
            run.step()
        return [each.detach() for each in losses]

    runs = _both(train)
    runs[0].model.set_reshard_after_forward(False)
    assert all(parameter.dtype is torch.float32 for parameter in runs[0].model.parameters())
