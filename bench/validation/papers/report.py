"""A report of published and predicted orders of methods: Markdown (pure), and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.validation.judge import CLOSE
from bench.validation.papers.judge import ALIKE, Compared, Pair, Verdict, by_methods, median_error, pairs, speedups
from bench.validation.papers.published import Claim, Paper, Published, Source
from bench.validation.papers.simulation import Claimed

__all__ = ["draw", "markdown", "rate"]

_AT_ONCE = "one all-reduce"
_NOTHING = 0.01  # of a step: less is not told from noise
_MOST = 0.75  # of the pairs that are not in order


def markdown(
    about: str,
    published: Published,
    compared: Sequence[Compared],
    own_pace: Sequence[Compared],
    claims: Sequence[Claimed],
    picture: Path | None,
) -> str:
    """The whole report. `about`: where the predictions come from, a sentence. `own_pace`: the same jobs with the profiles'
    own pace, as far as there are profiles.
    """
    lines = ["# Held to the papers", "", about, ""]
    lines += [
        "Published figures beside the simulation of `dear.predict`. It was told a job's model, GPUs, network and methods, "
        "and how long a step takes on one GPU, where that is published. No number is fitted. That one ring goes through "
        "all GPUs of all hosts, and not one within each host first, was learnt from these figures. Pairs of methods that "
        f"differ by {CLOSE:.0%} or less as published are not judged; pairs predicted to differ by {ALIKE:.0%} or less are "
        "alike."
    ]
    lines.append("")
    if picture is not None:
        lines += [f"![predicted and published speedups]({picture.name})", ""]
    for source in published.sources:
        lines += _summary(source, _of(source, compared))
    for claim in published.claims:
        lines += _claim_in_short(claim, claims)
    lines += ["", "## Orders", "", *_orders(published, compared)]
    lines += ["", "## Jobs", "", *_jobs(compared)]
    for claim in published.claims:
        lines += ["", f"## {claim.name}", "", *_claim(claim, claims)]
    lines += ["", "## Where differences come from", "", *_paces(published, compared, own_pace), ""]
    lines += [*_networks(published, compared), ""]
    papers: list[Paper] = [*published.sources, *published.claims]
    for each in papers:
        lines += [f"* {each.name}: {what}" for what in each.findings]
    lines += ["", "## What cannot be known", ""]
    for each in papers:
        lines += [f"{each.name}: {each.title}; {each.where}.", "", *(f"* {what}" for what in each.unknown), ""]
    return "\n".join(lines)


def _of(source: Source, compared: Sequence[Compared]) -> list[Compared]:
    return [one for one in compared if one.cell.source == source.name]


def _pairs(compared: Sequence[Compared]) -> list[Pair]:
    return [pair for one in compared for pair in pairs(one.cell, one.steps)]


def _counted(found: Sequence[Pair]) -> list[str]:
    """How many there are of each verdict."""
    return [str(sum(pair.verdict is verdict for pair in found)) for verdict in Verdict]


def _summary(source: Source, compared: Sequence[Compared]) -> list[str]:
    found = _pairs(compared)
    in_order, alike, opposite = _counted(found)
    within, steps = sum(one.within for one in compared), sum(len(one.steps) for one in compared)
    lines = [
        f"* {source.name}, {len(compared)} jobs: of {len(found)} pairs, {in_order} are predicted in the published order, "
        f"{alike} alike, {opposite} opposite. Speedups over {source.base} are off by {median_error(compared):.0%} in the "
        f"median; {within} of {steps} published steps are in the predicted range."
    ]
    wrong = [pair for pair in found if pair.verdict is not Verdict.IN_ORDER]
    often = [name for name in source.methods if _share(name, wrong) > _MOST]
    if len(often) == 1:
        rest = [pair for pair in found if often[0] not in (pair.fast, pair.slow)]
        lines.append(f"    * Without {often[0]}, of {len(rest)} pairs: {' / '.join(_counted(rest))}.")
    return lines


def _share(method: str, found: Sequence[Pair]) -> float:
    return sum(method in (pair.fast, pair.slow) for pair in found) / len(found) if found else 0.0


def _claim_in_short(claim: Claim, rows: Sequence[Claimed]) -> list[str]:
    lines = []
    for network, up_to in claim.up_to.items():
        there = [row for row in rows if row.network == network]
        best = max(there, key=lambda row: max(row.speedups.values()))
        name, most = max(best.speedups.items(), key=lambda item: item[1])
        fastest: dict[str, Claimed] = {}
        for row in sorted(there, key=lambda row: min(row.speedups.values())):
            fastest[row.method.method] = row
        over = "; ".join(f"{name} {min(row.speedups.values()):.2f} ({row.model})" for name, row in fastest.items())
        lines += [
            f"* {claim.name}, {claim.workers} GPUs, {network}: up to {up_to:.2f} published over others. The largest "
            f"predicted is {most:.2f}, of {best.method.method} over {name} on {best.model}.",
            f"    * Over the fastest other of its group at most: {over}.",
        ]
    return lines


def _orders(published: Published, compared: Sequence[Compared]) -> list[str]:
    lines = [
        "The last column has what is not predicted in order: by how many times the slower method takes longer, published → "
        "predicted (below 1 it is predicted to be the faster one).",
        "",
        f"| source | methods | {' | '.join(verdict.value for verdict in Verdict)} | not in order |",
        "|---|---|---|---|---|---|",
    ]
    for source in published.sources:
        for methods, found in by_methods(_pairs(_of(source, compared))).items():
            listed = "; ".join(map(_wrong, (pair for pair in found if pair.verdict is not Verdict.IN_ORDER)))
            lines.append(f"| {source.name} | {', '.join(methods)} | {' | '.join(_counted(found))} | {listed} |")
    return lines


def _wrong(pair: Pair) -> str:
    cell = pair.cell
    return f"{cell.model}, {cell.workers} × {cell.network}: {pair.fast} faster, {pair.published:.2f} → {pair.predicted:.2f}"


def _ordered(steps: Mapping[str, float], base: str) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in speedups(steps, base).items())


def _jobs(compared: Sequence[Compared]) -> list[str]:
    lines = [
        "Methods, the fastest first, with their speedup over WFBP; pairs in order, alike and opposite; milliseconds of "
        "WFBP's step. The survey's 4 GPUs are one host, without a network.",
        "",
        "| source | model, batch | GPUs | network | published | predicted | pairs | WFBP ms, published | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in compared:
        cell, found = one.cell, pairs(one.cell, one.steps)
        columns = [cell.source, f"{cell.model}, {cell.batch_size}"]
        columns += [f"{cell.workers}, {cell.per_host} a host", cell.network]
        columns += [_ordered(cell.steps, one.base), _ordered(one.steps, one.base)]
        columns += [" / ".join(_counted(found)) if found else "none judged"]
        step, least, most = (1e3 * seconds for seconds in one.predicted[one.base])
        columns += [f"{1e3 * cell.steps[one.base]:.0f}", f"{step:.0f} ({least:.0f} to {most:.0f})"]
        lines.append(f"| {' | '.join(columns)} |")
    return lines


def _paces(published: Published, compared: Sequence[Compared], own_pace: Sequence[Compared]) -> list[str]:
    lines = [
        "How much hangs on the pace of computation: pairs in order, alike and opposite, and the median error of speedups.",
        "",
        "| | " + " | ".join(source.name for source in published.sources) + " |",
        "|---" * (1 + len(published.sources)) + "|",
    ]
    for title, found in (("one GPU's step as published", compared), ("the profile's own pace", own_pace)):
        columns = [title]
        for source in published.sources:
            some = _of(source, found)
            counts = " / ".join(_counted(_pairs(some)))
            columns.append(f"{counts}, {median_error(some):.0%}" if some else "no profile of its GPU")
        lines.append(f"| {' | '.join(columns)} |")
    steps: dict[tuple[str, int], float] = {}
    for one in own_pace:
        steps.setdefault(
            (f"{one.cell.source}, {one.cell.model}", one.cell.batch_size), one.alone / one.cell.one_gpu - 1
        )
    listed = "; ".join(f"{name}, batch {batch}: {error:+.0%}" for (name, batch), error in steps.items())
    return [*lines, "", f"A step on one GPU, as the profile has it, over the published one: {listed}."]


def rate(nbytes: float, workers: int, seconds: float) -> float:
    """The Gbit/s of each link of a ring through all workers whose all-reduce of so many bytes takes so long."""
    return 2 * (workers - 1) / workers * nbytes * 8e-9 / seconds


def _networks(published: Published, compared: Sequence[Compared]) -> list[str]:
    """What an all-reduce takes where nothing hides it: what was published of the network by itself."""
    lines = [
        "Where one all-reduce follows backward (BSP, SyncEASGD), a step less that of one GPU is what it takes. "
        "Milliseconds, and what that is in Gbit/s of a ring through all GPUs:",
        "",
        "| source | model | GPUs | network | published ms | predicted | published Gbit/s | predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours = {source.name: source.methods for source in published.sources}
    for one in compared:
        cell = one.cell
        for name in cell.steps:
            seconds = [each[name] - cell.one_gpu for each in (cell.steps, one.steps)]
            if ours[cell.source][name] != _AT_ONCE or min(seconds) < _NOTHING * cell.one_gpu:
                continue
            columns = [cell.source, cell.model, str(cell.workers), cell.network]
            columns += [f"{1e3 * each:.0f}" for each in seconds]
            columns += [f"{rate(one.nbytes, cell.workers, each):.1f}" for each in seconds]
            lines.append(f"| {' | '.join(columns)} |")
    return lines


def _claim(claim: Claim, rows: Sequence[Claimed]) -> list[str]:
    lines = [
        f"{claim.workers} GPUs, {claim.per_host} a host, with the profiles' own pace. How many times longer others take:",
        "",
        "| network | model | | step ms | over |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        over = "; ".join(f"{name}: {ratio:.2f}" for name, ratio in row.speedups.items())
        columns = [row.network, row.model, f"{row.method.method}, {row.group}", f"{1e3 * row.method.step:.0f}", over]
        lines.append(f"| {' | '.join(columns)} |")
    return lines


def draw(published: Published, compared: Sequence[Compared], claims: Sequence[Claimed], path: Path) -> Path:
    """Draw predicted over published speedups, and the speedups predicted for what is claimed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 7), layout="constrained")
    methods = dict.fromkeys(name for source in published.sources for name in source.methods if name != source.base)
    markers = dict(zip((source.name for source in published.sources), "o^s", strict=False))
    ends = [1.0, 1.0]
    for number, method in enumerate(methods):
        for source in published.sources:
            some = [one for one in _of(source, compared) if method in one.cell.steps]
            if not some:
                continue
            x = [speedups(one.cell.steps, one.base)[method] for one in some]
            y = [speedups(one.steps, one.base)[method] for one in some]
            ends = [min(*ends, *x, *y), max(*ends, *x, *y)]
            label = f"{method} ({source.name})"
            left.plot(x, y, markers[source.name], color=f"C{number}", ms=6, alpha=0.7, label=label)
    ends = [0.95 * ends[0], 1.05 * ends[1]]
    left.plot(ends, ends, color="black", lw=0.8)
    left.axhline(1, color="grey", lw=0.6, ls="--")
    left.axvline(1, color="grey", lw=0.6, ls="--")
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    left.set(xlabel="speedup over WFBP, published", ylabel="speedup over WFBP, predicted")
    ticks = [tick for tick in (0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4) if ends[0] <= tick <= ends[1]]
    for axis in (left.xaxis, left.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    left.grid(alpha=0.3)
    left.legend(fontsize="small")
    _draw_claims(right, published.claims, claims)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _draw_claims(axis: Any, claims: Sequence[Claim], rows: Sequence[Claimed]) -> None:
    """A line for each model on each network, with what is predicted for DeAR beside each other method."""
    places: dict[tuple[str, str], int] = {}
    colors: dict[str, str] = {}
    markers: dict[str, str] = {}
    labels: set[str] = set()
    for row in rows:
        place = places.setdefault((row.network, row.model), len(places))
        marker = markers.setdefault(row.method.method, "so^"[len(markers) % 3])
        for name, ratio in row.speedups.items():
            color, label = colors.setdefault(name, f"C{len(colors)}"), f"{row.method.method} over {name}"
            axis.plot(ratio, place, marker, color=color, ms=6, alpha=0.8, label=None if label in labels else label)
            labels.add(label)
    for claim in claims:
        for network, up_to in claim.up_to.items():
            ends = [place for (where, _), place in places.items() if where == network]
            of_all = "largest published" if network == next(iter(claim.up_to)) else None
            axis.plot([up_to] * 2, [min(ends) - 0.4, max(ends) + 0.4], color="black", lw=1.5, label=of_all)
    axis.axvline(1, color="grey", lw=0.6, ls="--")
    axis.set_yticks(range(len(places)), [f"{model}, {network}" for network, model in places])
    axis.invert_yaxis()
    axis.set_xlabel("speedup of DeAR on 64 GPUs, predicted")
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
