"""One rank of ``python -m bench.steps``: trains so many steps, and writes down each; rank 0 asks for the other network."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from bench.emulation.accelerator import Accelerator
from bench.methods.registry import method
from bench.models.catalog import workload
from bench.steps.course import Course, runs
from bench.train.settings import parse

__all__ = ["ASK", "DONE", "main"]

ASK, DONE = "ask", "done"  # files in the folder of a run: rank 0 wants the other network, and has it
_NAP, _PATIENCE = 0.01, 30.0


def _other_network(folder: Path) -> None:
    (folder / ASK).touch()
    until = time.monotonic() + _PATIENCE
    while not (folder / DONE).exists():
        if time.monotonic() > until:
            raise RuntimeError(
                f"the network was not changed within {_PATIENCE:g} s: start this by python -m bench.steps, which does that"
            )
        time.sleep(_NAP)


def _digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def main(argv: list[str]) -> None:
    """Train; `argv`: a folder, the number of steps, when the network changes (0: never), and options of bench.train."""
    folder, steps, after = Path(argv[0]), int(argv[1]), int(argv[2])
    settings, _ = parse(argv[3:], None)
    assert settings.emulate_compute is not None, "computation is slept through"
    torch.set_num_threads(settings.threads)
    chosen, chosen_method = workload(settings.model), method(settings.method)
    torch.manual_seed(1)
    bare = Accelerator.named(settings.emulate_compute, settings.batch_size).model(chosen, settings.dilate)
    place = chosen_method.join(torch.device("cpu"))
    model, optimizer = chosen_method.distribute(bare, (torch.optim.SGD, {"lr": chosen.learning_rate}))
    seconds: list[float] = []
    settings_of: list[tuple[int, str]] = []
    planning: list[int] = []
    for step in range(1, steps + 1):
        if place.rank == 0 and after and step == after + 1:
            _other_network(folder)
        begun = time.perf_counter()
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        setting = chosen_method.setting(optimizer)
        if setting and (not settings_of or settings_of[-1][1] != setting):
            settings_of.append((step + 1 if settings_of else 1, setting))
        if chosen_method.tuning(optimizer):
            planning.append(step)
    chosen_method.settle(optimizer)
    if place.rank == 0:
        changed = after + 1 if after else None
        course = Course(settings.method, seconds, settings_of, runs(planning), _digest(bare), changed)
        (folder / "course.json").write_text(json.dumps(asdict(course)))
    chosen_method.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
