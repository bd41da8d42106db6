"""Options that count something: what is no such number is an error of the command line, with status 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import plot_timeline
from bench.gpu import __main__ as gpu
from bench.gpu import kernels, layers

LAYERS = ["mlp", "--device", "cpu", "--json", "out.json"]


@pytest.mark.parametrize(
    ("main", "given", "message"),
    [
        (layers.main, [*LAYERS, "--repeat", "0"], "--repeat: should be a whole number of at least 1 and is 0"),
        (layers.main, [*LAYERS, "--size", "0"], "--size: should be a whole number of at least 1 and is 0"),
        (layers.main, [*LAYERS, "--batch-size", "0"], "--batch-size: should be a whole number of at least 1 and is 0"),
        (kernels.main, ["--repeat", "0"], "--repeat: should be a whole number of at least 1 and is 0"),
        (kernels.main, ["--repeat", "many"], "--repeat: should be a whole number of at least 1 and is many"),
        (kernels.main, ["--numel", "63"], "--numel: should be a whole number of at least 64 and is 63"),
        (plot_timeline.main, ["t.json", "--steps", "0"], "--steps: should be a whole number of at least 1 and is 0"),
        (plot_timeline.main, ["t.json", "--skip", "-1"], "--skip: should be a whole number of at least 0 and is -1"),
        (plot_timeline.main, ["t.json", "--skip", "30"], "holds 2 step(s), and 30 of them are to be skipped"),
        (plot_timeline.main, ["none.json"], "No such file or directory: 'none.json'"),
        (gpu.main, ["--wheels", "/nonexistent"], "--wheels should be a folder with wheels and is /nonexistent"),
    ],
)
def test_a_count_that_is_none_is_refused(
    main: Callable[[list[str]], Any],
    given: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = [
        {"name": "step", "cat": "phase", "ph": "X", "pid": 0, "tid": 0, "ts": 1e3 * n, "dur": 1.0} for n in range(2)
    ]
    Path("t.json").write_text(json.dumps(steps))
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path("out.json").exists()
