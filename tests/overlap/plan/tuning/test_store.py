"""Results come back for the place they were found in, and for no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from overlap.plan.cost_model import CostModel
from overlap.plan.tuning.campaign import Result
from overlap.plan.tuning.store import Place, load, save, signature

HERE = Place("dear", signature(["weight (3, 4) float32"]), 48, 2, 2, "mpi", CostModel(1e-4, 8e-9))
FOUND = Result({"threshold_mb": 7.5}, 0.9, {"threshold_mb": 25.0}, 1.0, 0.9, False)


def test_a_result_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    assert load(path, HERE) is None
    save(path, HERE, FOUND)
    assert load(path, HERE) == {"threshold_mb": 7.5}
    measured_again = replace(HERE, link=CostModel(1.2e-4, 7e-9))
    assert load(path, measured_again) == {"threshold_mb": 7.5}


@pytest.mark.parametrize(
    "other",
    [
        replace(HERE, strategy="mgwfbp"),
        replace(HERE, model=signature(["weight (3, 5) float32"])),
        replace(HERE, ranks=4),
        replace(HERE, hosts=1),
        replace(HERE, backend="gloo"),
        replace(HERE, link=CostModel(1e-5, 1e-9)),
    ],
)
def test_another_place_has_its_own_result(tmp_path: Path, other: Place) -> None:
    path = tmp_path / "tuned.json"
    save(path, HERE, FOUND)
    assert load(path, other) is None
    save(path, other, replace(FOUND, setting={"threshold_mb": 2.0}))
    assert load(path, other) == {"threshold_mb": 2.0}
    assert load(path, HERE) == {"threshold_mb": 7.5}
    assert [entry.name for entry in tmp_path.iterdir()] == ["tuned.json"]


def test_a_newer_result_replaces_the_older(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    save(path, HERE, FOUND)
    size = path.stat().st_size
    save(path, HERE, replace(FOUND, setting={"threshold_mb": 3.5}))
    assert load(path, HERE) == {"threshold_mb": 3.5}
    assert path.stat().st_size == size


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "results": []}', '{"format": 1, "results": [{"setting": {}}]}']
)
def test_a_strange_file_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.json"
    path.write_text(text)
    for use in (lambda: load(path, HERE), lambda: save(path, HERE, FOUND)):
        with pytest.raises(ValueError, match=r"notes\.json holds no results of tuning in format 1"):
            use()
    assert path.read_text() == text
