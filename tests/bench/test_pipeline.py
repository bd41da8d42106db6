"""Pipelines beside torch's own: what is made of the numbers, and one small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.pipeline.layers import Layer, amoebanet, unet
from bench.pipeline.published import PUBLISHED, even, simulated, step_seconds
from bench.pipeline.result import Pipelines, markdown
from bench.program import ROOT
from pipe.schedule import bubble

ABOUT = {"stages": 3, "chunks": 4, "schedule": "1f1b", "data": 2, "network": "1gbit", "mb": 12.0}
FOUND = Pipelines(ABOUT, 0.100, {"dear": [0.160, 0.150, 0.170, 0.160], "ddp": [0.200, 0.200, 0.200, 0.250]})


def test_a_step_is_computation_and_its_bubble_and_the_rest() -> None:
    assert FOUND.floor == pytest.approx(0.150)
    assert FOUND.idle("dear") == pytest.approx(1 - 0.100 / 0.160)
    assert FOUND.outside("dear") == pytest.approx(1 - 0.150 / 0.160)
    assert FOUND.ratios() == pytest.approx([0.8, 0.75, 0.85, 0.64])
    both = Pipelines(ABOUT, 0.100, {"ddp-over-dear": [0.1, 0.1, 0.2, 0.25], "ddp": FOUND.seconds["ddp"]})
    assert both.ratios("ddp-over-dear") == pytest.approx([0.5, 0.5, 1.0, 1.0])
    assert "`ddp-over-dear` / `ddp`, block by block: 0.750" in markdown(both)


def test_the_report_says_what_ran_where() -> None:
    text = markdown(FOUND)
    assert "3 stages of 12 MB × 2 ranks, 4 micro-batches, 1f1b, 1gbit" in text
    assert "the bubble is 33.3 % (150.0 ms)" in text
    assert "| pipe.Pipe, dear along the data axis | 160.0 |" in text
    assert "`dear` / `ddp`, block by block: 0.775" in text


@pytest.mark.parametrize(
    ("layers", "parameters", "unit"),
    [
        (unet(convolutions=6, channels=72), 362.2, 1e6),
        (unet(convolutions=24, channels=160), 7.80, 1e9),
        (amoebanet(18, 208), 81.5, 1e6),
        (amoebanet(18, 416), 319.0, 1e6),
        (amoebanet(72, 512), 1.84, 1e9),
    ],
)
def test_published_models_have_as_many_parameters_as_published(
    layers: list[Layer], parameters: float, unit: float
) -> None:
    assert sum(each.parameters for each in layers) / unit == pytest.approx(
        parameters, abs=0.05 if unit == 1e6 else 0.005
    )


def test_published_balances_are_of_these_layers() -> None:
    for job in PUBLISHED:
        assert sum(job.balance) == {"U-Net (5, 64)": len(unet()), "AmoebaNet-D (18, 256)": len(amoebanet())}[job.model]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_a_simulated_step_of_even_stages_has_the_bubble_that_is_explained(stages: int, micro_batches: int) -> None:
    step = step_seconds([1.0] * stages, micro_batches, 0)
    assert step == pytest.approx(3 * micro_batches / (1 - bubble(micro_batches, stages)))


def test_a_simulated_step_waits_for_the_slowest_stage() -> None:
    assert step_seconds([1.0, 2.0], 2, 0) == (1 + 2 + 2) + (4 + 4 + 2)
    assert step_seconds([1.0, 2.0], 2, 1) == (1 + 2 + 2) + (4 + 6 + 3), "the first micro-batch is computed again"
    assert all(simulated(job) <= even(job) + 1e-9 for job in PUBLISHED if job.checkpoint == "always")


@pytest.mark.full
@pytest.mark.needs_root
def test_a_small_run(tmp_path: Path) -> None:
    output = tmp_path / "pipeline.json"
    options = ["--stages", "2", "--data", "1", "--mb", "0.1", "--ms", "2", "--blocks", "4", "--steps", "2"]
    options += ["--timeline", str(tmp_path / "trace-{rank}.json")]
    command = [sys.executable, "-m", "bench.pipeline", *options, "--warm-up", "2", "--json", str(output)]
    said = subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.read_text())
    assert [len(found["seconds"][name]) for name in ("dear", "ddp")] == [4, 4]
    assert "`dear` / `ddp`, block by block:" in said
    events = json.loads((tmp_path / "trace-1.json").read_text())
    assert sum(event["name"] == "forward 7" for event in events) == 4
