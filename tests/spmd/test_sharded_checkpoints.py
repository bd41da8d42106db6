"""Sharded checkpoints: each rank writes what it holds, torch loads them anywhere, and ours loads torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import co2
import dear
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.state.chunks import Chunked
from overlap.state.regions import region_of
from tests.spmd.models import double_model
from tests.spmd.strategies import OPTIMIZERS, OWNED
from tests.spmd.strategies import WRAP as WAYS
from tests.spmd.training import assert_close, local_loss, same_everywhere, values_of
from tests.spmd_plugin import SIZE

WRAP = WAYS | OWNED
STRATEGIES = ("fsdp", "fsdp-owned", "dear", "oss", "wfbp")
SEVERAL = pytest.mark.skipif(SIZE == 1, reason="takes several ranks")


class Mixed(torch.nn.Module):
    """Shapes that ranks' borders cut: of several dimensions, of none, in another layout, tied; a buffer, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(9, 13), torch.nn.Linear(13, 9)
        self.conv = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.tied = torch.nn.Linear(9, 13)
        self.tied.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("count", torch.zeros(1))
        self.told: Any = {"epoch": 0}

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pictures = self.conv(x.repeat(1, 12).view(-1, 3, 6, 6)).sum((1, 2, 3))
        y = torch.tanh(self.first(x)) + self.tied(x)
        return self.second(y) * self.scale + pictures[:, None] * 0.01


def _model(seed: int = 5) -> Mixed:
    torch.default_generator.manual_seed(seed)
    model = Mixed().double()
    model.conv.to(memory_format=torch.channels_last)
    return model


def _optimizer(model: torch.nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    second = {"params": params[1::2], "lr": lr / 2, "betas": (0.8, 0.99), "weight_decay": 0.1}
    return torch.optim.AdamW([{"params": params[::2]}, second], lr)


def _train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    """One process does what all ranks do."""
    alone = not isinstance(optimizer, DistributedOptimizer)
    for step in steps:
        optimizer.zero_grad()
        for rank in range(SIZE) if alone else (dear.rank(),):
            (local_loss(model, step, rank) / (SIZE if alone else 1)).backward()
        optimizer.step()


def _trained(strategy: str | None, steps: int = 3, seed: int = 5, lr: float = 1e-2) -> tuple[Mixed, Any]:
    model = _model(seed)
    optimizer: Any = _optimizer(model, lr)
    if strategy is not None:
        optimizer = WRAP[strategy](optimizer, model)
    _train(model, optimizer, range(steps))
    return model, optimizer


def _state(model: torch.nn.Module, optimizer: Any) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def _equal(one: Any, other: Any) -> None:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            _equal(mine, theirs)
    else:
        assert one == other


def _alone(load: Callable[[], None]) -> None:
    """On rank 0, while the others wait."""
    if dear.rank() == 0:
        load()
    dear.barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_saved_is_loaded_bit_for_bit(strategy: str, folder: Path) -> None:
    model, optimizer = _trained(strategy)
    model.told = {"epoch": 7}
    expected = _state(model, optimizer)
    dear.save_checkpoint(folder / "one", model, optimizer, extra={"step": 3, "milestones": {30: 1}, "empty": {}})
    other, fresh = _trained(strategy, 0 if strategy == "dear" else 1, seed=6, lr=0.5)
    extra = dear.load_checkpoint(folder / "one", other, fresh)
    assert extra == {"step": 3, "milestones": {30: 1}, "empty": {}}
    _equal(_state(other, fresh), expected)
    _train(model, optimizer, range(3, 5))
    _train(other, fresh, range(3, 5))
    _equal(_state(other, fresh), _state(model, optimizer))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_torch_loads_it_in_one_process(strategy: str, folder: Path) -> None:
    model, optimizer = _trained(strategy)
    expected = _state(model, optimizer)
    dear.save_checkpoint(folder / "one", model, optimizer)

    def load() -> None:
        plain, inner = _trained(None, 1, seed=6, lr=0.5)
        own, osd = get_state_dict(plain, inner)
        state = {"model": own, "optim": osd}
        dcp.load(state, checkpoint_id=folder / "one", no_dist=True)
        set_state_dict(plain, inner, model_state_dict=state["model"], optim_state_dict=state["optim"])
        _equal(_state(plain, inner), expected)

    _alone(load)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_of_torch_has_saved_it(strategy: str, folder: Path) -> None:
    plain, inner = _trained(None)

    def save() -> None:
        own, osd = get_state_dict(plain, inner)
        dcp.save({"model": own, "optim": osd}, checkpoint_id=folder / "one", no_dist=True)

    _alone(save)
    model, optimizer = _trained(strategy, 1, seed=6, lr=0.5)
    assert dear.load_checkpoint(folder / "one", model, optimizer) == {}
    _equal(_state(model, optimizer), _state(plain, inner))
    _train(model, optimizer, range(3, 5))
    _train(plain, inner, range(3, 5))
    assert_close(_state(model, optimizer), _state(plain, inner), strategy)


def _sharded_by_torch(seed: int, steps: int) -> tuple[Any, Any]:
    torch.default_generator.manual_seed(seed)
    model = double_model("Mlp")
    for module in (model.inner[0], model.inner[3]):
        fully_shard(module)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    return model, optimizer


def _mlp(strategy: str, steps: int) -> tuple[Any, Any]:
    model = double_model("Mlp")
    optimizer = WRAP[strategy](torch.optim.AdamW(model.parameters(), 1e-2), model)
    for step in range(steps):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    return model, optimizer


@SEVERAL
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_checkpoints_of_fsdp2(folder: Path, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    theirs, optimizer = _sharded_by_torch(1, 2)
    own, osd = get_state_dict(theirs, optimizer, options=options)
    dcp.save({"model": own, "optim": osd}, checkpoint_id=folder / "theirs")
    full = {name: value.full_tensor() for name, value in theirs.state_dict().items()}
    model, wrapped = _mlp("fsdp", 1)
    dear.load_checkpoint(folder / "theirs", model, wrapped)
    _equal(dict(model.state_dict()), full)
    for number, (name, _) in enumerate(theirs.named_parameters()):
        moment = osd[f"state.{name}.exp_avg"] if flat else osd["state"][name]["exp_avg"]
        assert torch.equal(wrapped.state_dict()["state"][number]["exp_avg"], moment.full_tensor())


def test_one_file_is_made_of_it(folder: Path) -> None:
    model, optimizer = _trained("fsdp")
    dear.save_checkpoint(folder / "one", model, optimizer)
    expected = _state(model, optimizer)

    def convert() -> None:
        dcp_to_torch_save(folder / "one", folder / "one.pt")
        saved = torch.load(folder / "one.pt", weights_only=False)
        plain, inner = _trained(None, 1, seed=6)
        set_state_dict(plain, inner, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
        _equal(_state(plain, inner), expected)

    _alone(convert)


@SEVERAL
def test_ddp_loads_ours_and_we_load_its(folder: Path) -> None:
    def make() -> tuple[Any, Any]:
        model = _model(6)
        return torch.nn.parallel.DistributedDataParallel(model), _optimizer(model)

    model, optimizer = _trained("fsdp")
    dear.save_checkpoint(folder / "ours", model, optimizer)
    theirs, inner = make()
    own, osd = get_state_dict(theirs, inner)
    state = {"model": own, "optim": osd}
    dcp.load(state, checkpoint_id=folder / "ours")
    set_state_dict(theirs, inner, model_state_dict=state["model"], optim_state_dict=state["optim"])
    _equal(_state(theirs.module, inner), _state(model, optimizer))
    own, osd = get_state_dict(theirs, inner)
    dcp.save({"model": own, "optim": osd}, checkpoint_id=folder / "theirs")
    other, fresh = _trained("fsdp", 1, seed=7)
    dear.load_checkpoint(folder / "theirs", other, fresh)
    _equal(_state(other, fresh), _state(model, optimizer))


@SEVERAL
def test_fsdp2_loads_ours(folder: Path) -> None:
    model, optimizer = _mlp("fsdp", 2)
    dear.save_checkpoint(folder / "ours", model, optimizer)
    theirs, other = _sharded_by_torch(1, 1)
    own, osd = get_state_dict(theirs, other)
    state = {"model": own, "optim": osd}
    dcp.load(state, checkpoint_id=folder / "ours")
    set_state_dict(theirs, other, model_state_dict=state["model"], optim_state_dict=state["optim"])
    expected = model.state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(value.full_tensor(), expected[name]), name


@SEVERAL
def test_what_two_ranks_have_saved(folder: Path) -> None:
    """Chunks of two ranks, cut elsewhere than here."""
    plain, inner = _trained(None)
    own, osd = get_state_dict(plain, inner)
    group = torch.distributed.new_group([0, 1])
    if dear.rank() < 2:

        def cut(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.numel() < 2:
                return value
            flat, middle = value.detach().contiguous().view(-1), value.numel() // 2 + 1
            part = flat[:middle] if dear.rank() == 0 else flat[middle:]
            return Chunked(value.contiguous(), 0 if dear.rank() == 0 else middle, part, region_of(value))

        state = {
            "model": {name: cut(value) for name, value in own.items()},
            "optim": {
                "state": {name: {k: cut(v) for k, v in each.items()} for name, each in osd["state"].items()},
                "param_groups": osd["param_groups"],
            },
        }
        dcp.save(state, checkpoint_id=folder / "two", process_group=group)
    dear.barrier()
    model, optimizer = _trained("fsdp", 1, seed=6)
    dear.load_checkpoint(folder / "two", model, optimizer)
    _equal(_state(model, optimizer), _state(plain, inner))


def test_a_rank_writes_its_share(folder: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = WRAP["fsdp"](torch.optim.AdamW(model.parameters()), model)
    optimizer.zero_grad()
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    state = dear.sharded_state_dict(model, optimizer)
    held = [value.held for value in state["model"].values()]
    whole = sum(value.numel() for value in state["model"].values())
    assert sum(value.numel() for value in held) <= 1.1 * whole / SIZE
    dear.save_checkpoint(folder / "shares", model, optimizer)
    mine = sum(file.stat().st_size for file in (folder / "shares").glob(f"__{dear.rank()}_*"))
    assert 3 * whole * 4 / SIZE * 0.9 < mine < 3 * whole * 4 / SIZE * 1.3


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["ours", "torch"])
def test_in_the_background_the_values_of_the_call_are_saved(strategy: str, how: str, folder: Path) -> None:
    model, optimizer = _trained(strategy)
    expected = _state(model, optimizer)
    if how == "ours":
        future: Any = dear.save_checkpoint(folder / "one", model, optimizer, background=True)
    else:
        future = dcp.async_save(dear.sharded_state_dict(model, optimizer), checkpoint_id=folder / "one")
    with dear.whole(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    _train(model, optimizer, range(3, 6))
    future.result()
    dear.barrier()
    other, fresh = _trained(strategy, 1, seed=6)
    dear.load_checkpoint(folder / "one", other, fresh)
    _equal(_state(other, fresh), expected)


def test_several_in_the_background(folder: Path) -> None:
    model, optimizer = _trained("fsdp")
    saved = []
    for step in range(3):
        saved.append(
            (dear.save_checkpoint(folder / str(step), model, optimizer, background=True), _state(model, optimizer))
        )
        _train(model, optimizer, range(3 + step, 4 + step))
    for step, (future, expected) in enumerate(saved):
        future.result()
        dear.barrier()
        dear.load_checkpoint(folder / str(step), model, optimizer)
        _equal(_state(model, optimizer), expected)


def test_what_one_rank_cannot_write_or_read_all_are_told(folder: Path) -> None:
    model, optimizer = _trained("fsdp")
    (folder / "file").touch()
    dear.barrier()
    with pytest.raises(RuntimeError, match=r"rank 0 could not write the checkpoint in .*file: \w*Error: "):
        dear.save_checkpoint(folder / "file", model, optimizer)
    future = dear.save_checkpoint(folder / "file", model, optimizer, background=True)
    with pytest.raises(RuntimeError, match=r"rank 0 could not write the checkpoint in .*file: \w*Error: "):
        future.result()
    expected = _state(model, optimizer)
    dear.save_checkpoint(folder / "one", model, optimizer, background=True).result()
    dear.barrier()
    dear.load_checkpoint(folder / "one", model, optimizer)
    _equal(_state(model, optimizer), expected)
    dear.barrier()
    if dear.rank() == 0:
        (folder / "one" / "__0_0.distcp").unlink()
    dear.barrier()
    with pytest.raises(RuntimeError, match=r"rank 0 could not read the checkpoint in .*one: FileNotFoundError: "):
        dear.load_checkpoint(folder / "one", model, optimizer)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "nadam", "asgd", "rprop", "adafactor"])
@pytest.mark.parametrize("strategy", ["fsdp", "oss"])
def test_the_state_of_other_optimizers(kind: str, strategy: str, folder: Path) -> None:
    def make(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = double_model("Mlp")
        optimizer = WRAP[strategy](OPTIMIZERS[kind](list(model.parameters())), model)
        for step in range(2):
            optimizer.zero_grad()
            local_loss(model, step + seed).backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = make(1)
    dear.save_checkpoint(folder / "one", model, optimizer)
    other, fresh = make(2)
    dear.load_checkpoint(folder / "one", other, fresh)
    _equal(_state(other, fresh), _state(model, optimizer))


def test_exact_values_of_rounded_parameters(folder: Path) -> None:
    def make(seed: int, steps: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 9))
        optimizer = dear.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), 1e-3), model, gather_dtype=torch.bfloat16
        )
        for step in range(steps):
            optimizer.zero_grad()
            local_loss(model, step, dtype=torch.float32).backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = make(1, 3)
    dear.save_checkpoint(folder / "one", model, optimizer)
    expected = _state(model, optimizer)
    assert expected[1]["master"]
    for steps in (0, 2):
        other, fresh = make(2, steps)
        dear.load_checkpoint(folder / "one", other, fresh)
        _equal(_state(other, fresh), expected)


def test_after_a_plain_load_and_before_the_first_step(folder: Path) -> None:
    """What load_state_dict() has left for ranks that have not loaded does not hide what comes after it."""
    model, optimizer = _trained("fsdp")
    expected = _state(model, optimizer)
    dear.save_checkpoint(folder / "one", model, optimizer)
    _train(model, optimizer, range(3, 4))
    optimizer.load_state_dict(optimizer.state_dict())
    dear.load_checkpoint(folder / "one", model, optimizer)
    _equal(_state(model, optimizer), expected)
    fresh_model = _model(8)
    fresh = WRAP["fsdp"](_optimizer(fresh_model), fresh_model)
    dear.save_checkpoint(folder / "fresh", fresh_model, fresh)
    dear.load_checkpoint(folder / "fresh", model, optimizer)
    _equal(_state(model, optimizer), _state(fresh_model, fresh))


def test_several_optimizers_and_a_compiled_model(folder: Path) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, list[Any]]:
        torch.default_generator.manual_seed(seed)
        model = _model(seed)
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() != 2 and parameter.requires_grad]
        optimizers = [
            WRAP["dear"](torch.optim.SGD(matrices, 0.1, momentum=0.9), model),
            WRAP["dear"](torch.optim.AdamW(others, 1e-2), model),
        ]
        for step in range(2):
            local_loss(model, step + seed).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return model, optimizers

    model, optimizers = make(1)
    dear.save_checkpoint(folder / "one", torch.compile(model), optimizers)
    other, fresh = make(2)
    dear.load_checkpoint(folder / "one", other, fresh)
    _equal(dict(other.state_dict()), dict(model.state_dict()))
    for mine, theirs in zip(fresh, optimizers, strict=True):
        _equal(mine.state_dict(), theirs.state_dict())
    compiled: Any = torch.compile(make(3)[0])
    dear.load_checkpoint(folder / "one", compiled)
    _equal(list(compiled.state_dict().values()), list(model.state_dict().values()))


@SEVERAL
@pytest.mark.usefixtures("sets_of_a_test")
def test_the_ranks_of_a_process_set_are_refused(folder: Path) -> None:
    ranks = dear.add_process_set([0])
    model = double_model("Mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = dear.DistributedOptimizer(optimizer, model, process_set=ranks)
    with pytest.raises(ValueError, match=rf"by all {SIZE} ranks of the job, and the optimizer has a process set of 1"):
        dear.save_checkpoint(folder / "one", model, wrapped)


def test_what_scripts_have_written_is_saved(folder: Path) -> None:
    model, optimizer = _trained("fsdp")
    optimizer.state[model.first.weight]["exp_avg"].fill_(2.0)
    optimizer.param_groups[1]["lr"] = 0.125
    dear.save_checkpoint(folder / "one", model, optimizer)
    other, fresh = _trained("fsdp", 1, seed=6)
    dear.load_checkpoint(folder / "one", other, fresh)
    assert bool((fresh.state[other.first.weight]["exp_avg"] == 2.0).all())
    assert fresh.param_groups[1]["lr"] == 0.125


def test_the_model_alone_and_while_it_is_whole(folder: Path) -> None:
    model, optimizer = _trained("fsdp")
    with dear.whole(model):
        dear.save_checkpoint(folder / "one", model)
    other, fresh = _trained("fsdp", 1, seed=6)
    before = copy.deepcopy(fresh.state_dict())
    with dear.whole(other):
        dear.load_checkpoint(folder / "one", other)
    dear.barrier()  # others may not have taken their shares of it yet
    _equal(dict(other.state_dict()), dict(model.state_dict()))
    _equal(fresh.state_dict(), before)
    with pytest.raises(ValueError, match="no state of an optimizer"):
        dear.load_checkpoint(folder / "one", other, fresh)
    del optimizer


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_lost(folder: Path) -> None:
    model, optimizer = _trained("fsdp")
    dear.save_checkpoint(folder / "one", model, optimizer)
    other = _model(6)
    other.second = torch.nn.Linear(13, 8).double()
    other.more = torch.nn.Linear(2, 2).double()
    del other.scale
    other.scale = 1.0
    wrapped = WRAP["fsdp"](_optimizer(other), other)
    before = values_of(other)
    with pytest.raises(
        ValueError, match=r"of another model: it has no 'more.weight', 'more.bias'; the model has no 'scale'; "
    ) as found:
        dear.load_checkpoint(folder / "one", other, wrapped)
    assert "'second.weight' is (9, 13) there and (8, 13) here" in str(found.value)
    for value, was in zip(values_of(other), before, strict=True):
        assert torch.equal(value, was)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        dear.load_checkpoint(folder / "nowhere", model, optimizer)
    with pytest.raises(ValueError, match="under which the model and the optimizer are saved"):
        dear.save_checkpoint(folder / "two", model, optimizer, extra={"model": 1})


def test_groups_that_do_not_fit_are_refused(folder: Path) -> None:
    model, optimizer = _trained("fsdp")
    dear.save_checkpoint(folder / "one", model, optimizer)
    other = _model(6)
    params = [parameter for parameter in other.parameters() if parameter.requires_grad]
    one_group = WRAP["fsdp"](torch.optim.AdamW(params), other)
    with pytest.raises(ValueError, match="in one parameter group, and in the checkpoint in groups with different"):
        dear.load_checkpoint(folder / "one", other, one_group)


def test_ranks_with_parameters_of_their_own_are_refused(folder: Path) -> None:
    model = double_model("Mlp")
    optimizer = co2.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    with pytest.raises(ValueError, match="co2's ranks have parameters and state of their own"):
        dear.save_checkpoint(folder / "one", model, optimizer)
    with pytest.raises(TypeError, match="should be a DistributedOptimizer and is SGD"):
        dear.save_checkpoint(folder / "one", model, torch.optim.SGD(double_model("Mlp").parameters(), 0.1))


def test_a_share_is_for_checkpoints_alone() -> None:
    model, optimizer = _trained("fsdp", 1)
    share = dear.sharded_state_dict(model, optimizer)["model"]["second.weight"]
    assert share.shape == (9, 13)
    with pytest.raises(TypeError, match="holds a share of the tensor"):
        share.sum()
    same_everywhere(torch.tensor(share.shape))
