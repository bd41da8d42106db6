"""A process of one of three jobs, which train one after the other from the checkpoints that the one before has left.

python -m tests.integrations.resumed_trainer_job FOLDER begun      # ranks of DearTrainer
python -m tests.integrations.resumed_trainer_job FOLDER alone      # one process: a plain Trainer, and DearTrainer
python -m tests.integrations.resumed_trainer_job FOLDER ended      # ranks of DearTrainer, as if nothing had been in between
"""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

import dear
from dear.integrations.transformers import DearTrainer
from tests.integrations.trainer_job import Trained, train


class Until(TrainerCallback):
    """The job is stopped, by whoever, behind this step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, _args: Any, state: Any, control: Any, **_rest: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


def same_values(mine: Trained, folder: Path, name: str) -> None:
    expected = torch.load(folder / f"{name}.pt")["values"]
    assert mine["values"].keys() == expected.keys()
    for key, value in mine["values"].items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


def begun(folder: Path) -> None:
    """Nine steps without a stop, and two of them; three are an epoch."""
    for name, stop in (("resumed", 2), ("fsdp resumed", 2), ("lora", 6)):
        whole = train(name, DearTrainer, folder / f"whole-{name}")
        if dear.rank() == 0:
            torch.save(whole, folder / f"{name}.pt")
        train(name, DearTrainer, folder / name, callbacks=[Until(stop)])
    dear.barrier()
    if dear.rank() == 0:
        shutil.copytree(folder / "resumed", folder / "resumed-by-dear")


def alone(folder: Path) -> None:
    for name, kind in (("resumed", Trainer), ("resumed-by-dear", DearTrainer), ("fsdp resumed", Trainer)):
        train("resumed", kind, folder / name, callbacks=[Until(4)], resume_from_checkpoint=True)
    same_values(train("lora", Trainer, folder / "lora", resume_from_checkpoint=True), folder, "lora")


def ended(folder: Path) -> None:
    for name in ("resumed", "resumed-by-dear", "fsdp resumed"):
        scenario = "fsdp resumed" if name.startswith("fsdp") else "resumed"
        same_values(train(scenario, DearTrainer, folder / name, resume_from_checkpoint=True), folder, scenario)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"begun": begun, "alone": alone, "ended": ended}[sys.argv[2]](Path(sys.argv[1]))
    print(f"{sys.argv[2]}: done", flush=True)
