"""The results of a run's steps, and how methods compare in total. Pure, but for the picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Course", "draw", "followed", "markdown", "runs", "usual"]

_LAST = 15  # steps whose median is what a step takes in the end


@dataclass(frozen=True)
class Course:
    """The seconds of all steps of a method, in order.

    `settings`: the step from which on each was in force, and what it was.

    `planned`: the first and the last step of each time that the method measured, and planned by it. `parameters`: a digest
    of them after the last step. `changed`: the first step on the other network; None: there was none.
    """

    method: str
    seconds: list[float]
    settings: list[tuple[int, str]]
    planned: list[tuple[int, int]]
    parameters: str
    changed: int | None = None

    @property
    def total(self) -> float:
        return sum(self.seconds)


def runs(steps: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last number of each row of consecutive ones."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and found[-1][1] == step - 1:
            found[-1] = found[-1][0], step
        else:
            found.append((step, step))
    return found


def usual(course: Course) -> float:
    """The seconds that a step takes at the end of a run."""
    return statistics.median(course.seconds[-_LAST:])


def followed(course: Course) -> int | None:
    """The number of steps from a change of the network to the end of its plan; None where nothing was planned then."""
    changed = course.changed
    ends = [last for first, last in course.planned if changed is not None and first >= changed]
    return None if changed is None or not ends else min(ends) - changed + 1


def markdown(about: str, courses: Sequence[Course], picture: str | None) -> str:
    """A table with a row for each method, and what was in force when."""
    first = courses[0]
    changes = first.changed is not None
    head = ["method", f"all {len(first.seconds)} steps, s", f"of {first.method}'s", "in the end, ms a step"]
    head += [*(["steps until planned anew"] if changes else []), "parameters"]
    lines = ["# Every step", "", about, ""]
    if picture is not None:
        lines += [f"![Seconds of each step]({picture})", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for course in courses:
        same = "the same" if course.parameters == first.parameters else "others"
        cells = [
            course.method,
            f"{course.total:.1f}",
            f"{course.total / first.total:.3f}",
            f"{1e3 * usual(course):.0f}",
        ]
        if changes:
            after = followed(course)
            cells.append("" if after is None else str(after))
        lines.append("| " + " | ".join([*cells, "" if course is first else same]) + " |")
    lines.append("")
    for course in courses:
        if len(course.settings) > 1:
            said = "; ".join(f"from step {step} on {what}" for step, what in course.settings)
            lines.append(f"* {course.method}: {said}.")
    return "\n".join([*lines, ""])


def draw(courses: Sequence[Course], path: Path) -> None:
    """Draw seconds over the number of the step, a line for each method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for number, course in enumerate(courses):
        axes.plot(range(1, len(course.seconds) + 1), course.seconds, lw=1.2, color=f"C{number}", label=course.method)
        for step, _ in course.settings[1:]:
            axes.plot(step, course.seconds[step - 1], "o", ms=5, color=f"C{number}")
    if courses[0].changed is not None:
        axes.axvline(courses[0].changed, color="black", ls="--", lw=0.8)
    axes.set(xlabel="step (a dot: a new plan)", ylabel="seconds", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
