"""Draws docs/gpu-streams.png: which stream waits for which event in one step over NCCL. Lengths are drawn, not measured.

.venv/bin/python scripts/draw_gpu_streams.py docs/gpu-streams.png
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROWS = {"host": 3, "computing": 2, "reduce-scatter": 1, "all-gather": 0}
COLORS = {"host": "#bbbbbb", "computing": "#7aa6d8", "reduce-scatter": "#e8a87c", "all-gather": "#8fc08f"}


@dataclass(frozen=True)
class Block:
    """Something on a row, from begin to end."""

    row: str
    text: str
    begin: float
    end: float


BLOCKS = {
    block.text: block
    for block in (
        Block("computing", "bwd L3", 1.0, 2.6),
        Block("computing", "bwd L2", 2.6, 4.2),
        Block("computing", "bwd L1", 4.2, 5.8),
        Block("reduce-scatter", "RS b3", 2.6, 4.0),
        Block("reduce-scatter", "RS b2", 4.2, 5.6),
        Block("reduce-scatter", "RS b1", 5.8, 7.2),
        Block("computing", "upd 1", 7.2, 7.9),
        Block("computing", "upd 2", 7.9, 8.6),
        Block("computing", "upd 3", 8.6, 9.3),
        Block("all-gather", "AG b1", 7.9, 9.3),
        Block("all-gather", "AG b2", 9.3, 10.7),
        Block("all-gather", "AG b3", 10.7, 12.1),
        Block("computing", "fwd L1", 9.3, 10.7),
        Block("computing", "fwd L2", 10.7, 12.1),
        Block("computing", "fwd L3", 12.1, 13.5),
    )
}
# The end of one is an event that the beginning of the other waits for.
EVENTS = (
    ("bwd L3", "RS b3"),
    ("bwd L2", "RS b2"),
    ("bwd L1", "RS b1"),
    ("RS b1", "upd 1"),
    ("upd 1", "AG b1"),
    ("upd 2", "AG b2"),
    ("upd 3", "AG b3"),
    ("AG b1", "fwd L1"),
    ("AG b2", "fwd L2"),
    ("AG b3", "fwd L3"),
)
# The host runs ahead: it enqueues, records and orders, and returns.
ENQUEUES = (0.2, 0.5, 0.8, 1.1, 1.4, 1.7, 2.0, 2.3, 2.6, 2.9, 3.2, 3.5, 3.8, 4.1, 4.4)


def draw(path: str) -> None:
    """Write the picture."""
    figure, axes = plt.subplots(figsize=(12, 3.6))
    for block in BLOCKS.values():
        row = ROWS[block.row]
        axes.barh(
            row, block.end - block.begin, left=block.begin, height=0.5, color=COLORS[block.row], edgecolor="white"
        )
        axes.text((block.begin + block.end) / 2, row, block.text, ha="center", va="center", fontsize=8)
    for moment in ENQUEUES:
        axes.barh(ROWS["host"], 0.22, left=moment, height=0.3, color=COLORS["host"])
    axes.text(4.9, ROWS["host"], "enqueues and goes on: no wait for the device", va="center", fontsize=8)
    for before, after in EVENTS:
        source, target = BLOCKS[before], BLOCKS[after]
        down = ROWS[source.row] > ROWS[target.row]
        start = (source.end, ROWS[source.row] + (-0.25 if down else 0.25))
        stop = (max(source.end, target.begin), ROWS[target.row] + (0.25 if down else -0.25))
        axes.annotate("", xy=stop, xytext=start, arrowprops={"arrowstyle": "->", "color": "#b03030", "linewidth": 1.2})
    axes.set_yticks(list(ROWS.values()), [name if name == "host" else f"stream: {name}" for name in ROWS])
    axes.set_xticks([])
    axes.set_xlabel("time (drawn, not measured); red: an event recorded at the foot, waited for at the tip", fontsize=8)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(sys.argv[1])
