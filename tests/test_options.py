"""docs/options.md, strategies.md and environment.md against what the code takes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import dear
from bytescheduler_adapter.optimizer import ByteScheduler
from dear.optimizer import Dear
from dear.siblings import OwnOptions
from mgwfbp.optimizer import MgWfbp
from oss.optimizer import Oss
from overlap.optimizer.arguments import HorovodArguments, SharedArguments
from overlap.plan.cost_model import CostModel
from overlap.plan.strategy import Strategy
from overlap.plan.tuning.options import Tuning
from tests.harness import ROOT

PACKAGES = ("dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "oss", "fsdp", "osdp", "co2")
TUNED: tuple[Strategy, ...] = (
    Dear(25.0, None, "", "rsag", False, None),
    Oss(25.0, None, None),
    MgWfbp(CostModel(0, 0)),
    ByteScheduler(1, 2),
)


def _tables(name: str = "options.md") -> list[list[dict[str, str]]]:
    """The tables of a document: of each row, its cells by column."""
    blocks = re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / name).read_text(), re.MULTILINE)
    made = []
    for block in blocks:
        head, _, *rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines()]
        made.append([dict(zip(head, row, strict=True)) for row in rows])
    return made


HOROVODS, SHELLS, OWN, SEARCHED, SEARCHES = _tables()


def _named(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _default(row: dict[str, str]) -> Any:
    (text,) = _named(row["default"])
    return eval(text, vars(dear))  # what the table shows is what a script would write


def _defaults(parameters: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default


def test_horovods_options_are_all_there_in_order() -> None:
    fields = dataclasses.fields(HorovodArguments)
    assert [_named(row["option"]) for row in HOROVODS] == [[field.name] for field in fields]
    assert [_default(row) for row in HOROVODS] == [field.default for field in fields]


def test_options_of_the_wrapper_are_all_there() -> None:
    horovods = [field.name for field in dataclasses.fields(HorovodArguments)]
    fields = [field for field in dataclasses.fields(SharedArguments) if field.name not in horovods]
    assert {row["option"].strip("`"): _default(row) for row in SHELLS} == {each.name: each.default for each in fields}


@pytest.mark.parametrize("package", PACKAGES)
def test_options_of_a_strategy_are_all_there(package: str) -> None:
    parameters = inspect.signature(importlib.import_module(package).DistributedOptimizer).parameters
    shared = {field.name for field in dataclasses.fields(SharedArguments)} | {"named_parameters"}
    own = {name: default for name, default in _defaults(parameters) if name not in shared}
    told = {row["option"].strip("`"): _default(row) for row in OWN if package in _named(row["strategy"])}
    assert told == own
    assert {name for row in OWN for name in _named(row["strategy"])} <= set(PACKAGES)


def test_options_that_dear_hands_on_are_those_of_the_others() -> None:
    parameters = {
        package: inspect.signature(importlib.import_module(package).DistributedOptimizer).parameters
        for package in PACKAGES
    }
    theirs = {name: each.annotation for package in PACKAGES[1:] for name, each in parameters[package].items()}
    for name in parameters["dear"]:
        theirs.pop(name, None)
    assert {name: each.__forward_arg__ for name, each in OwnOptions.__annotations__.items()} == theirs


def test_what_is_tuned_is_told_with_its_bounds() -> None:
    bounds = [(each.name, space.name, space.low, space.high) for each in TUNED for space in each.space]
    told = [
        (row["strategy"].strip("`"), row["setting"].strip("`"), float(row["between"]), float(row["and"]))
        for row in SEARCHED
    ]
    assert told == bounds
    page = " ".join((ROOT / "docs" / "strategies.md").read_text().split())
    for _, name, low, high in bounds:
        assert re.search(f"`{name}` between {low:g} and {high:.0f} ", page), name


def test_how_to_tune_is_told_with_its_defaults() -> None:
    assert {row["option"].strip("`"): _default(row) for row in SEARCHES} == {
        field.name: getattr(Tuning(), field.name) for field in dataclasses.fields(Tuning)
    }


def test_settings_of_comm_core_are_told() -> None:
    source = (ROOT / "comm_core" / "csrc" / "settings.cpp").read_text()
    header = (ROOT / "comm_core" / "include" / "comm_core" / "settings.hpp").read_text()
    defaults = {name: eval(text) for name, text in re.findall(r"/// (COMM_CORE_\w+):[^;]*?[={] ?([\d *]+)\}?;", header)}
    settings = {
        name: (int(low), eval(high), defaults[name])
        for name, low, high in re.findall(r'read\("(\w+)", .*?, (\d+), ([\d <]+)\)', source)
    }
    assert len(settings) == source.count('read("')
    rows = [row for table in _tables("environment.md") for row in table if "range" in row]
    told = {row["variable"].strip("`"): (*map(int, row["range"].split(" to ")), int(row["default"])) for row in rows}
    assert told == settings
