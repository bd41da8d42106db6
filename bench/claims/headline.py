"""``python -m bench.claims.headline``: README's picture, ``docs/results/headline.png``, of opponents at their best.

A line for each thing that was trained under torchrun: how many times longer than L = max(compute, wire) a step of dear
takes as it comes, and a step of each other method with the fastest of its settings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from bench.claims.views import RESULTS
from bench.sweep.summary import Group, group

matplotlib.use("Agg")

import matplotlib.pyplot as plt

__all__ = ["compared", "draw"]

SWEEPS = ("tuned-baselines", "launchers")
METHODS = {"dear": "#0b5fa5", "ddp": "#d9822b", "horovod": "#7f7f7f"}
LABELS = {
    "dear": "dear, no options",
    "ddp": "DDP, best of its bucket sizes",
    "horovod": "Horovod, best of its settings",
}


def compared(groups: Sequence[Group]) -> list[Group]:
    """The groups in which both dear and DDP ran over a network with a bound, by their share of communication."""
    found = [one for one in groups if one.bound and one.wire and one.compute and {"dear", "ddp"} <= one.best.keys()]
    return sorted(found, key=lambda one: (one.wire or 0) / (one.compute or 1))


def _what(one: Group) -> str:
    about = one.settings
    model = {"mlp": "100 equal layers", "resnet50": "ResNet-50", "bert_base": "BERT-Base"}[about["model"]]
    real = "" if about["emulate_compute"] else ", really computed"
    return f"{model}{real}, {about['workers']} hosts: wire / compute {(one.wire or 0) / (one.compute or 1):.2f}"


def draw(groups: Sequence[Group], path: Path) -> None:
    """Draw a line of dots for each of the `groups`, from 1, the bound, to the right."""
    figure, axis = plt.subplots(figsize=(9, 0.6 + 0.42 * len(groups)), layout="constrained")
    for place, one in enumerate(groups):
        steps = {name: one.best[name].median / (one.bound or 1) for name in METHODS if name in one.best}
        axis.plot([min(steps.values()), max(steps.values())], [place, place], color="#cccccc", lw=2, zorder=1)
        for name, step in steps.items():
            axis.plot(step, place, "o", color=METHODS[name], ms=8, zorder=2)
    for name, color in METHODS.items():
        axis.plot([], [], "o", color=color, ms=8, label=LABELS[name])
    axis.axvline(1, color="black", lw=1, ls="--")
    axis.set_yticks(range(len(groups)), [_what(one) for one in groups], fontsize=9)
    axis.set_ylim(-0.6, len(groups) - 0.4)
    axis.set_xlabel("step / max(compute, wire); no schedule of synchronous training is left of 1", fontsize=9)
    figure.legend(frameon=False, fontsize=9, loc="outside upper center", ncols=3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    runs = [run for name in SWEEPS for run in json.loads((RESULTS / name / "reports.json").read_text())["runs"]]
    path = RESULTS / "headline.png"
    draw(compared(group(run for run in runs if run["settings"]["launcher"] == "torchrun")), path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
