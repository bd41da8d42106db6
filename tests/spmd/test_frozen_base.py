"""A frozen base under small adapters: its bytes travel once, and are once in the memory of a host."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dear
import fsdp
from overlap.job.memory.pages import in_pages
from overlap.job.session import current
from overlap.optimizer.once_per_host import frozen_memory, share_from_rank_0
from overlap.transport.communicator import Communicator, Work
from tests.spmd.lora import WIDTH, Adapted, adapters, base, bytes_in_memory, lora, loss_of
from tests.spmd.strategies import WRAP
from tests.spmd.training import assert_close, same_everywhere
from tests.spmd_plugin import SIZE

STRATEGIES = ("fsdp", "osdp")
several = pytest.mark.skipif(SIZE == 1, reason="takes several ranks")


def _train(model: nn.Module, optimizer: Any, steps: range, rank: int | None = None) -> None:
    """With the data of `rank`, or of all ranks."""
    for step in steps:
        optimizer.zero_grad()
        if rank is None:
            (sum(loss_of(model, step, each) for each in range(SIZE)) / SIZE).backward()  # type: ignore[union-attr]
        else:
            loss_of(model, step, rank).backward()
        optimizer.step()


def _alone(steps: range) -> dict[str, torch.Tensor]:
    model = lora()
    _train(model, torch.optim.AdamW(adapters(model), 1e-2), steps)
    return model.state_dict()


def _wrapped(strategy: str, **options: Any) -> tuple[nn.Sequential, Any]:
    model = lora(seed=dear.rank(), **options)  # others take rank 0's values
    return model, WRAP[strategy](torch.optim.AdamW(adapters(model), 1e-2), model)


def _frozen(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if not each.requires_grad and each.ndim == 2]


def _once_on_this_host(parameters: list[nn.Parameter]) -> None:
    """All ranks map `parameters`, which are in one place, and nobody has written to them. On every rank."""
    total = sum(each.nbytes for each in parameters)
    for each in parameters:
        each.detach().sum()  # so that all have read them
    dear.barrier()
    everyones = dear.allgather_object(bytes_in_memory(parameters[0]))
    assert all(each["Rss"] >= total for each in everyones)
    assert all(each["Anonymous"] == 0 for each in everyones)
    assert total <= sum(each["Pss"] for each in everyones) <= 1.1 * total + SIZE * 8192
    dear.barrier()


@pytest.mark.parametrize("everything", [False, True], ids=["adapters", "all parameters"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "dear"])
def test_training_is_that_of_one_process(strategy: str, everything: bool) -> None:
    """Also where the optimizer has the frozen parameters, too."""
    model = lora(seed=dear.rank())
    known = {name: id(parameter) for name, parameter in model.named_parameters()}
    inner = torch.optim.AdamW(model.parameters() if everything else adapters(model), 1e-2)
    optimizer = WRAP[strategy](inner, model)
    assert known == {name: id(parameter) for name, parameter in model.named_parameters()}
    _train(model, optimizer, range(3), dear.rank())
    assert_close(dict(model.state_dict()), dict(_alone(range(3))), strategy)


@several
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_base_is_once_in_the_memory_of_a_host(strategy: str) -> None:
    model, optimizer = _wrapped(strategy)
    assert all(in_pages(each) and not each.is_shared() for each in _frozen(model))
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in _frozen(model))
    _train(model, optimizer, range(2), dear.rank())
    _once_on_this_host(_frozen(model))


@several
@pytest.mark.parametrize("strategy", ["dear", "fsdp", "osdp"])
def test_only_adapters_travel(strategy: str) -> None:
    """After the first step: one reduction of them, and one gathering of what is updated; fsdp gathers for backward, too."""
    heard: list[int] = []

    def hear(_comm: Communicator, work: Work) -> Work:
        heard.append(work.nbytes)
        return work

    model = lora(seed=dear.rank(), layers=6, rank=16)
    parts = [each.detach().clone() for each in adapters(model)]
    optimizer = WRAP[strategy](torch.optim.AdamW(adapters(model), 1e-2), model)
    _train(model, optimizer, range(1), dear.rank())
    dear.barrier()
    Communicator.listener = hear  # type: ignore[assignment]
    try:
        _train(model, optimizer, range(1, 2), dear.rank())
    finally:
        Communicator.listener = None
    trained = sum(each.nbytes for each in parts)
    assert sum(each.nbytes for each in _frozen(model)) > 5 * trained
    times = 2 if strategy == "dear" else 3
    assert trained <= sum(heard) <= 1.1 * times * trained


@several
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_writes_gets_memory_of_its_own(strategy: str) -> None:
    model, _optimizer = _wrapped(strategy)
    weight, other = _frozen(model)[:2]
    before = weight.detach().clone()
    same_everywhere(before)
    dear.barrier()
    if dear.rank() == 0:
        with torch.no_grad():
            weight.copy_(torch.ones_like(weight))
            other.data[3] += 1
    dear.barrier()
    if dear.rank() == 0:
        assert weight.eq(1).all()
    else:
        assert torch.equal(weight, before), "others have not seen it"
    dear.barrier()


@pytest.mark.parametrize("way", ["the group is new", "the optimizer has it"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "dear"])
def test_what_is_unfrozen_is_trained(strategy: str, way: str) -> None:
    def train(distributed: bool) -> dict[str, torch.Tensor]:
        model = lora(seed=dear.rank() if distributed else 0)
        new = way == "the group is new"
        optimizer: Any = torch.optim.AdamW(adapters(model) if new else model.parameters(), 1e-2)
        if distributed:
            optimizer = WRAP[strategy](optimizer, model)
        rank = dear.rank() if distributed else None
        _train(model, optimizer, range(2), rank)
        layer = model[1]
        assert isinstance(layer, Adapted)
        layer.inner.requires_grad_(True)
        if new:
            optimizer.add_param_group({"params": list(layer.inner.parameters()), "lr": 1e-3})
        _train(model, optimizer, range(2, 5), rank)
        layer.inner.requires_grad_(False)
        _train(model, optimizer, range(5, 6), rank)
        return dict(model.state_dict())

    assert_close(train(True), train(False), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plain_optimizer_may_train_what_is_unfrozen(strategy: str) -> None:
    """Each rank by itself: in memory of its own."""
    model, _optimizer = _wrapped(strategy)
    weight = _frozen(model)[0].requires_grad_(True)
    before = weight.detach().clone()
    dear.barrier()
    weight.grad = torch.full_like(weight, float(dear.rank()))
    torch.optim.SGD([weight], 1.0).step()
    dear.barrier()
    assert torch.equal(weight.detach(), before - dear.rank())
    dear.barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ties_stay(strategy: str) -> None:
    """One parameter in two places, and two over one memory; a buffer that shows one stays with it, and both stay away."""
    model = lora(seed=dear.rank())
    first, second, third = (layer.inner for layer in model)  # type: ignore[union-attr]
    second.weight = first.weight  # type: ignore[union-attr, assignment]
    shown = nn.Parameter(first.weight.detach()[: WIDTH // 2], requires_grad=False)  # type: ignore[union-attr, index]
    model.register_parameter("shown", shown)
    third.register_buffer("copy", third.weight.data)  # type: ignore[union-attr, operator]
    optimizer = WRAP[strategy](torch.optim.AdamW(adapters(model), 1e-2), model)
    assert first.weight is second.weight  # type: ignore[union-attr]
    assert shown.data_ptr() == first.weight.data_ptr()  # type: ignore[union-attr]
    assert third.copy.data_ptr() == third.weight.data_ptr()  # type: ignore[union-attr]
    assert in_pages(shown) is (SIZE > 1)
    assert not in_pages(third.weight)  # type: ignore[union-attr, arg-type]
    same_everywhere(first.weight.detach())  # type: ignore[union-attr, operator]
    same_everywhere(third.weight.detach())  # type: ignore[union-attr, operator]
    _train(model, optimizer, range(1), dear.rank())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_are_plain(strategy: str) -> None:
    model, _optimizer = _wrapped(strategy)
    weight = _frozen(model)[0]
    copied, pickled = copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))
    saved = copy.deepcopy(model.state_dict())["0.inner.weight"]
    for each in (copied, pickled, saved):
        assert torch.equal(each, weight)
        assert not in_pages(each)
        assert each.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_is_loaded(strategy: str, folder: Path) -> None:
    model, optimizer = _wrapped(strategy)
    _train(model, optimizer, range(2), dear.rank())
    dear.save_checkpoint(folder / "one", model, optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    dear.barrier()
    _train(model, optimizer, range(2, 3), dear.rank())
    expected = dict(model.state_dict())
    other, again = _wrapped(strategy)
    dear.load_checkpoint(folder / "one", other, again)
    assert_close(dict(other.state_dict()), saved, "loaded")
    if SIZE > 1:
        _once_on_this_host(_frozen(other))
    other.load_state_dict(saved)
    dear.barrier()
    _train(other, again, range(2, 3), dear.rank())
    assert_close(dict(other.state_dict()), expected, "continued")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_that_a_rank_forks_read_and_write_alone(strategy: str) -> None:
    """As workers of a DataLoader do."""
    model, _optimizer = _wrapped(strategy)
    weight = _frozen(model)[0]
    before = weight.detach().clone()
    child = os.fork()
    if child == 0:
        ok = bool((weight.detach().numpy() == before.numpy()).all())
        weight.detach().numpy()[:] = 7
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    dear.barrier()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_base_without_memory_gets_it_once_per_host(strategy: str) -> None:
    with dear.deferred_init():
        model = lora(seed=dear.rank())
    optimizer = WRAP[strategy](torch.optim.AdamW(adapters(model), 1e-2), model)
    assert all(in_pages(each) is (SIZE > 1) for each in _frozen(model))
    _train(model, optimizer, range(3), dear.rank())
    assert_close(dict(model.state_dict()), dict(_alone(range(3))), strategy)


@pytest.fixture
def file(folder: Path) -> Path:
    """The weights of a model like that of :func:`lora`, of another seed."""
    dear.save_pretrained(lora(seed=9), folder)
    return folder / "model.safetensors"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_base_is_mapped_from_its_file(strategy: str, when: str, file: Path) -> None:
    expected, content = lora(seed=9).state_dict(), file.read_bytes()
    model = lora(seed=dear.rank())
    if when == "before":
        dear.load_pretrained(model, file)
    optimizer = WRAP[strategy](torch.optim.AdamW(adapters(model), 1e-2), model)
    if when == "after":
        dear.load_pretrained(model, file)
    assert_close(dict(model.state_dict()), dict(expected), "loaded")
    assert str(file) in Path("/proc/self/maps").read_text()
    if SIZE > 1:
        _once_on_this_host(_frozen(model))
    alone = lora(seed=9)
    _train(alone, torch.optim.AdamW(adapters(alone), 1e-2), range(2))
    _train(model, optimizer, range(2), dear.rank())
    assert_close(dict(model.state_dict()), dict(alone.state_dict()), "trained")
    with torch.no_grad():
        _frozen(model)[0].zero_()
    dear.barrier()
    assert file.read_bytes() == content, "the file is never written to"
    dear.save_pretrained(model, file.parent)  # in its place
    assert not _frozen(model)[0].any()
    assert torch.equal(_frozen(model)[1], expected["1.inner.weight"])
    dear.barrier()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["mapped", "rounded"])
def test_a_base_without_memory_is_loaded_before_it_gets_adapters(dtype: torch.dtype, folder: Path) -> None:
    dear.save_pretrained(base(seed=9), folder)
    with dear.deferred_init():
        model = base(seed=dear.rank(), dtype=dtype)
    model.requires_grad_(False)
    dear.load_pretrained(model, folder)
    torch.default_generator.manual_seed(dear.rank())
    model = nn.Sequential(*(Adapted(layer) for layer in model))
    optimizer = WRAP["fsdp"](torch.optim.AdamW(adapters(model), 1e-2), model)
    assert (str(folder) in Path("/proc/self/maps").read_text()) is (dtype is torch.float64)
    for each, expected in zip(_frozen(model), _frozen(base(seed=9).requires_grad_(False)), strict=True):
        assert torch.equal(each, expected.to(dtype))
    if SIZE > 1:
        _once_on_this_host(_frozen(model))
    _train(model, optimizer, range(2), dear.rank())
    dear.barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_has_another_type_is_read_by_one_rank_of_a_host(strategy: str, file: Path) -> None:
    model, optimizer = _wrapped(strategy, dtype=torch.float32)
    dear.load_pretrained(model, file)
    assert_close(dict(model.state_dict()), {n: v.float() for n, v in lora(seed=9).state_dict().items()}, "loaded")
    if SIZE > 1:
        _once_on_this_host(_frozen(model))
    _train(model, optimizer, range(1), dear.rank())


@several
def test_a_host_that_maps_nothing_has_copies(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    def refused(_name: str) -> int:
        raise OSError("no such call")

    if dear.rank() == 0:
        monkeypatch.setattr(os, "memfd_create", refused)
    with dear.deferred_init():
        model = lora(seed=dear.rank())
    optimizer = WRAP["fsdp"](torch.optim.AdamW(adapters(model), 1e-2), model)
    other, _ = _wrapped("fsdp", dtype=torch.float32)
    assert not any(in_pages(each) for each in (*_frozen(model), *_frozen(other)))
    same_everywhere(_frozen(other)[0].detach())
    _train(model, optimizer, range(3), dear.rank())
    assert_close(dict(model.state_dict()), dict(_alone(range(3))), "trained")


@several
@pytest.mark.usefixtures("sets_of_a_test")
def test_ranks_of_a_process_set_share_among_themselves() -> None:
    half = SIZE // 2
    sets = [dear.add_process_set(range(half)), dear.add_process_set(range(half, SIZE))]
    mine = sets[dear.rank() >= half]
    model = lora(seed=dear.rank())
    optimizer = WRAP["fsdp"](torch.optim.AdamW(adapters(model), 1e-2), model, process_set=mine)
    first = 0 if dear.rank() < half else half
    assert torch.equal(_frozen(model)[0], _frozen(lora(seed=first))[0])
    assert in_pages(_frozen(model)[0]) is (half > 1)
    _train(model, optimizer, range(2), dear.rank())
    dear.barrier()


def test_modules_that_are_sharded_in_torchs_way() -> None:
    model = lora(seed=dear.rank())
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(adapters(model), 1e-2)
    _train(model, optimizer, range(3), dear.rank())
    assert all(in_pages(each) is (SIZE > 1) for each in _frozen(model))
    assert_close(dict(model.state_dict()), dict(_alone(range(3))), "trained")


@several
def test_what_only_some_ranks_may_move_travels_as_ever() -> None:
    """On the last rank a buffer shows it."""
    model = lora(seed=dear.rank())
    if dear.rank() == SIZE - 1:
        model[0].shown = _frozen(model)[0].data
    _optimizer = WRAP["fsdp"](torch.optim.AdamW(adapters(model), 1e-2), model)
    assert [in_pages(each) for each in _frozen(model)] == [False, True, True]
    same_everywhere(_frozen(model)[0].detach())


@pytest.mark.skipif(SIZE < 4, reason="takes two hosts of two ranks")
def test_each_host_has_a_copy() -> None:
    """Hosts are pairs of ranks here."""
    session = current()
    host = session.subset(dear.rank() // 2)
    model = base(seed=dear.rank()).requires_grad_(False)
    memories = frozen_memory(session, model)
    assert len(memories) == 3, "biases have less than a page"
    share_from_rank_0(session.comm, host, memories)
    for each, expected in zip(_frozen(model), _frozen(base().requires_grad_(False)), strict=True):
        assert torch.equal(each, expected)
    total = sum(each.nbytes for each in _frozen(model))
    dear.barrier()
    everyones = dear.allgather_object(bytes_in_memory(_frozen(model)[0]))
    assert 2 * total <= sum(each["Pss"] for each in everyones) <= 2.2 * total + SIZE * 8192
    dear.barrier()
