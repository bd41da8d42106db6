"""``python -m dear.predict``: a table of schedules, a picture, and one line for what cannot be predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dear.predict import main, methods
from overlap.plan.simulation.methods import METHODS
from overlap.plan.simulation.profile import Profile, to_text
from overlap.plan.simulation.workload import Layer


def _rows(text: str) -> dict[str, list[float]]:
    """Numbers of each method: step, best and worst in ms, efficiency in percent."""
    lines = text.partition("waits for\n")[2].partition("\n\n")[0].splitlines()
    return {line[:28].strip(): [float(word.rstrip("%")) for word in line[28:].split()[:4]] for line in lines}


def test_a_table_of_all_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "resnet50", "--workers", "64", "--network", "10gbit"]) == 0
    text = capsys.readouterr().out
    rows = _rows(text)
    assert set(rows) == {*METHODS, "mgwfbp", "oss"} == set(methods())
    for step, best, worst, efficiency in rows.values():
        assert best <= step <= worst
        assert efficiency == pytest.approx(100 * 64.4 / step, abs=0.1)
        assert step >= 189  # 97.5 MB, twice 63/64 of them, at 0.9 x 10 Gbit/s, less what is rounded
    steps = [row[0] for row in rows.values()]
    assert steps == sorted(steps)
    assert rows["dear"][0] < rows["wfbp"][0]
    assert "Simulated, not measured" in text
    assert "derived, not measured" in text


def test_one_rank_takes_what_its_layers_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workers", "1"]) == 0
    for step, *_ in _rows(capsys.readouterr().out).values():
        assert 64.3 < step < 70  # besides hooks


def test_a_profile_of_ones_own_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = tuple(Layer(f"{number}", 0.01, 0.02, (2**20,)) for number in range(10))
    own = tmp_path / "own.json"
    own.write_text(to_text(Profile("mine", "laptop", 16, "measured here", layers)))
    picture = tmp_path / "own.png"
    assert main(["--profile", str(own), "--workers", "2", "--network", "1gbit", "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "mine on laptop, 16 samples a rank: 10 layers, 10 MB" in text
    assert _rows(text)["dear"][0] == pytest.approx(300, rel=0.05)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_horovods_copies_take_time_on_cpus_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = tuple(Layer(f"{number}", 0.0001, 0.0002, (2**20, 2**12)) for number in range(10))
    steps = []
    for device in ("x86_64 cpu, 1 thread(s)", "gpu"):
        own = tmp_path / "own.json"
        own.write_text(to_text(Profile("mine", device, 16, "measured here", layers)))
        assert main(["--profile", str(own), "--workers", "2", "--network", "100gbit"]) == 0
        steps.append(_rows(capsys.readouterr().out)["Horovod"][0])
    assert steps[0] > steps[1] + 1  # ms; 10 MB are copied twice


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet51"], "no profile of resnet51@a100:32; there are none of this model"),
        (["--batch-size", "7"], "no profile of resnet50@a100:7; there are resnet50@a100:64"),
        (["--workers", "7", "--per-host", "4"], "7 workers do not fill hosts of 4"),
        (["--workers", "0"], "at least one worker, and one on each host, not 0 and 0"),
        (["--per-host", "0"], "at least one worker, and one on each host, not 8 and 0"),
        (["--profile", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
