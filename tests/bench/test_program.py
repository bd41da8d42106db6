"""What all commands share: options that count are checked, and who is told to end does so in order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import plot_timeline
from bench.gpu import __main__ as gpu
from bench.gpu import kernels, layers
from tests.harness import ROOT

SCRIPT = """
import os, signal
from bench.program import end_in_order
signal.signal(signal.SIGHUP, signal.SIG_IGN if {ignored} else signal.SIG_DFL)  # nohup may have started the tests
end_in_order()
try:
    os.kill(os.getpid(), signal.{number})
    print("goes on")
finally:
    print("hosts are removed")
"""


@pytest.mark.parametrize(
    ("number", "ignored", "code", "said"),
    [
        ("SIGTERM", False, 143, "hosts are removed"),
        ("SIGHUP", False, 129, "hosts are removed"),
        ("SIGHUP", True, 0, "goes on\nhosts are removed"),
    ],
)
def test_who_is_told_to_end_leaves_in_order(number: str, ignored: bool, code: int, said: str) -> None:
    script = SCRIPT.format(number=number, ignored=ignored)
    job = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (job.returncode, job.stdout.strip()) == (code, said)


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
        (gpu.main, ["--carried", "/nonexistent"], "--carried should be a folder and is /nonexistent"),
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
