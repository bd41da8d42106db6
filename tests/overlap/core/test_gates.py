"""Every way to a parameter passes its gate."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap.core.gates.compiled import GUARDS, outside_compilation
from overlap.core.gates.gates import GatedParameters, Gates, GroupGates, ListedParameters, listed


class _Log:
    def __init__(self, module: torch.nn.Module) -> None:
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.events: list[str] = []
        self.gates = Gates(
            lambda parameter: self.events.append(self.names[id(parameter)]),
            lambda *_: self.events.append("enter"),
            lambda *_: self.events.append("leave"),
        )
        self.gates.guard(module.modules(), lambda value: value is not None)


WAYS: dict[str, Callable[[torch.nn.Linear], object]] = {
    "attribute": lambda m: m.weight,
    "get": lambda m: m._parameters.get("weight"),
    "parameters": lambda m: list(m.parameters()),
    "named_parameters": lambda m: dict(m.named_parameters()),
    "values": lambda m: list(m._parameters.values()),
    "state_dict": lambda m: m.state_dict(),
    "copy": lambda m: copy.copy(m._parameters),
    "deepcopy": lambda m: copy.deepcopy(m),
    "dict": lambda m: dict(m._parameters),
    "pickle": lambda m: pickle.dumps(m),
    "forward": lambda m: m(torch.ones(1, 2)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_passes_the_gate(way: str) -> None:
    module = torch.nn.Linear(2, 2)
    log = _Log(module)
    WAYS[way](module)
    assert "weight" in log.events


def test_forward_enters_first_and_leaves_last_even_when_it_fails() -> None:
    module = torch.nn.Linear(2, 2)
    log = _Log(module)
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3))
    assert log.events[0] == "enter"
    assert log.events[-1] == "leave"


def test_two_gates_stand_side_by_side_and_leave_separately() -> None:
    module = torch.nn.Linear(2, 2)
    first, second = _Log(module), _Log(module)
    first.gates.remove()
    first.events.clear()
    assert module.weight is not None
    assert first.events == []
    assert "weight" in second.events
    second.gates.remove()
    assert type(module._parameters) is dict
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


def test_copies_are_plain() -> None:
    module = torch.nn.Linear(2, 2)
    log = _Log(module)
    twin = pickle.loads(pickle.dumps(module))
    log.events.clear()
    twin(torch.ones(1, 2))
    assert log.events == []
    assert type(twin._parameters) is OrderedDict
    assert isinstance(module._parameters, GatedParameters)


@pytest.mark.skipif(not GUARDS, reason="before torch 2.13, gates break compiled graphs instead")
def test_compiled_code_waits_on_entry_whoever_came_first() -> None:
    module = torch.nn.Linear(2, 2)
    before = torch.compile(module, backend="eager", fullgraph=True)
    before(torch.ones(1, 2))
    log = _Log(module)
    for compiled in (before, torch.compile(module, backend="eager", fullgraph=True)):
        compiled(torch.ones(1, 2))  # traced
        log.events.clear()
        compiled(torch.ones(1, 2))
        assert log.events == ["enter", "leave"]
    log.gates.remove()
    log.events.clear()
    before(torch.ones(1, 2))
    assert log.events == []


def test_an_update_that_a_compilation_waits_for_is_not_compiled_and_what_follows_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with outside_compilation():
        assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with outside_compilation():
        assert not torch.compiler.is_compiling()
    assert torch.compiler.is_compiling()


# A process in which nothing of ours can be imported.
ELSEWHERE = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("overlap", "comm_core", "dear"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refusing())
import copy, io, pickle, torch

for name in sys.argv[1:]:
    with torch.serialization.safe_globals([torch.nn.Sequential, torch.nn.Linear]):
        model = torch.load(name, weights_only=True)
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again(torch.ones(1, 2)).shape == (1, 2)
        assert list(again.state_dict()) == ["0.weight", "0.bias"]
"""


def test_a_saved_model_is_loaded_without_dear(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    _Log(module)
    for name, saved in (("itself", module), ("a copy", copy.deepcopy(module))):
        torch.save(saved, tmp_path / name)
    command = [sys.executable, "-c", ELSEWHERE, "itself", "a copy"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_hooks_of_others_are_copied_and_their_handles_stay_good() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    handle = module.register_forward_hook(_note)
    _Log(module)
    _notes.clear()
    copy.deepcopy(module)(torch.ones(1, 2))
    pickle.loads(pickle.dumps(module))(torch.ones(1, 2))
    assert len(_notes) == 2
    handle.remove()
    module(torch.ones(1, 2))
    copy.deepcopy(module)(torch.ones(1, 2))
    assert len(_notes) == 2
    assert (
        OrderedDict([(1, 2)])
        == copy.deepcopy(OrderedDict([(1, 2)]))
        == pickle.loads(pickle.dumps(OrderedDict([(1, 2)])))
    )


_notes: list[None] = []


def _note(*_args: object) -> None:
    _notes.append(None)


class _Transit:
    """Parameters that are always on their way."""

    busy = True

    def __init__(self) -> None:
        self.waits = 0

    def arrive_all(self) -> None:
        self.waits += 1


GROUP_WAYS: dict[str, Callable[[list[torch.nn.Parameter]], object]] = {
    "loop": lambda params: [param.shape for param in params],
    "number": lambda params: params[0],
    "part": lambda params: params[1:],
    "list": lambda params: [*params],
    "reversed": lambda params: list(reversed(params)),
    "sum": lambda params: params + [],
    "sum of groups": lambda params: sum([params, params], []),  # noqa: RUF017
    "copy": lambda params: params.copy(),
    "pop": lambda params: params.pop(0),
}


def _groups() -> tuple[_Transit, GroupGates, list[torch.nn.Parameter]]:
    transit: Any = _Transit()
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    return transit, GroupGates(optimizer, transit), optimizer.param_groups[0]["params"]


@pytest.mark.parametrize("way", GROUP_WAYS)
def test_every_way_to_a_parameter_of_a_group_waits(way: str) -> None:
    transit, _gates, params = _groups()
    assert type(GROUP_WAYS[way](params)) is not ListedParameters
    assert transit.waits > 0


def test_who_does_not_look_at_values_does_not_wait_and_other_threads_do() -> None:
    transit, gates, params = _groups()
    with gates.open():
        assert len([*params]) == len(list(listed(params))) == len(params) == 2
        assert transit.waits == 0
        with ThreadPoolExecutor(1) as pool:
            pool.submit(list, params).result()
        assert transit.waits == 1
    with pytest.raises(ValueError, match="of the update"), gates.open():
        raise ValueError("of the update")
    assert params[0] is not None
    assert transit.waits == 2
