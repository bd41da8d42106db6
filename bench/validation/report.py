"""A report of predictions and measurements: Markdown (pure), and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.sweep.failures import Failure
from bench.sweep.report import BUSY_MARK, BUSY_NOTE
from bench.train.settings import Settings
from bench.validation.judge import CLOSE, GOALS, Cell, order, summary

__all__ = ["draw", "markdown"]

_HEAD = (
    "| method | computation | hosts | network | predicted ms | measured ms | error | cores busy |\n" + "|---" * 8 + "|"
)


def computation(settings: Settings) -> str:
    """The kind of computation in a cell, as a word."""
    return settings.emulate_compute or f"{settings.model}, real, batch {settings.batch_size}"


def _network(settings: Settings) -> str:
    return settings.network + (f", dilated {settings.dilate:g}" if settings.dilate != 1 else "")


def _row(cell: Cell) -> str:
    about = cell.settings
    error = f"{cell.error:+.1%}"
    busy = "" if cell.cores_busy is None else f"{cell.cores_busy:.0%}"
    cells = [about.method + BUSY_MARK * cell.disturbed, computation(about), str(about.workers), _network(about)]
    cells += [f"{1e3 * cell.predicted:.0f}", f"{1e3 * cell.measured:.0f}"]
    cells += [error if abs(cell.error) <= CLOSE else f"**{error}**"]
    cells += [f"{busy}: the limit" if cell.limited_by_cores else busy]
    return "| " + " | ".join(cells) + " |"


def _kind(name: str, cells: Sequence[Cell]) -> list[str]:
    found = summary(cells)
    if found is None:
        return []
    return [
        f"* {name}: {found.count} cells, median error {found.median:.1%}, {found.within} within {CLOSE:.0%} "
        f"({found.within / found.count:.0%}), the worst {found.worst:+.1%}; {found.fast} predicted too fast, "
        f"{found.slow} too slow, mean error {found.mean:+.1%}."
    ]


def _goals(cells: Sequence[Cell]) -> list[str]:
    found = summary(cells)
    if found is None:
        return []
    median, share = ("met" if met else "**missed**" for met in found.met)
    return [
        f"* Goals, for all cells: a median error of at most {GOALS[0]:.0%}, {median}; {GOALS[1]:.0%} within {CLOSE:.0%}, "
        f"{share}."
    ]


def markdown(title: str, about: str, cells: Sequence[Cell], failures: Sequence[Failure], picture: Path | None) -> str:
    """The whole report. `about`: where the numbers come from, a sentence. Nothing is left out."""
    lines = [f"# {title}", "", about, ""]
    lines += [
        "Steps, predicted from what was known before the run, and measured (median). Below 0 % the prediction is too "
    ]
    lines[-1] += "fast. Where cores were busy all the time they may have been the limit, and not the links."
    lines.append("")
    if picture is not None:
        lines += [f"![predicted over measured]({picture.name})", ""]
    lines += _kind("All", cells)
    lines += _goals(cells)
    lines += _kind("Slept computation", [cell for cell in cells if not cell.real])
    limited = [cell for cell in cells if not cell.real and not cell.limited_by_cores]
    if limited and len(limited) < sum(not cell.real for cell in cells):
        lines += _kind("Of these, where cores were not the limit", limited)
    calm = [cell for cell in cells if not cell.disturbed]
    if calm and len(calm) < len(cells):
        lines += _kind("Where others left the machine alone", calm)
    lines += _kind("Real computation", [cell for cell in cells if cell.real])
    found = order(cells)
    lines.append(
        f"* Order: of {found.pairs} pairs of methods that differ by more than {CLOSE:.0%}, "
        f"{found.pairs - len(found.wrong)} are predicted in the right order."
    )
    for fast, slow in found.wrong:
        lines.append(
            f"    * {fast.settings.method} is faster than {slow.settings.method} ({computation(fast.settings)}, "
            f"{fast.settings.workers} hosts, {_network(fast.settings)}): measured {1e3 * fast.measured:.0f} and "
            f"{1e3 * slow.measured:.0f} ms, predicted {1e3 * fast.predicted:.0f} and {1e3 * slow.predicted:.0f} ms."
        )
    lines += ["", *_HEAD.splitlines(), *(_row(cell) for cell in cells), ""]
    if any(cell.disturbed for cell in cells):
        lines += [BUSY_NOTE, ""]
    if failures:
        lines += ["## Without a result", ""]
        for one in failures:
            at = f"{computation(one.settings)}, {one.settings.workers} hosts, {_network(one.settings)}"
            lines.append(f"* {one.settings.method}, {at}: {one.reason}")
        lines.append("")
    return "\n".join(lines)


def draw(cells: Sequence[Cell], path: Path) -> Path:
    """Draw predicted over measured seconds, with lines 5 % above and below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 6.5), layout="constrained")
    methods = list(dict.fromkeys(cell.settings.method.partition(":")[0] for cell in cells))
    for number, method in enumerate(methods):
        for real, marker in ((False, "o"), (True, "^")):
            some = [c for c in cells if c.real is real and c.settings.method.partition(":")[0] == method]
            label = f"{method}, real computation" if real else method
            if some:
                points = [c.measured for c in some], [c.predicted for c in some]
                axes.plot(*points, marker, color=f"C{number}", ms=5, alpha=0.7, label=label)
    ends = [
        0.8 * min(min(c.measured, c.predicted) for c in cells),
        1.25 * max(max(c.measured, c.predicted) for c in cells),
    ]
    axes.plot(ends, ends, color="black", lw=0.8)
    for factor in (1 - CLOSE, 1 + CLOSE):
        axes.plot(ends, [factor * end for end in ends], "--", color="black", lw=0.6)
    axes.set(
        xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured s", ylabel="predicted s", aspect="equal"
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
