"""What a plan under a memory limit says of itself: who is kept and who is freed, its costs, what more would win (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from osdp.choice import OPTIONS, Choice, Job, Residencies, chosen, on_host_bytes, smallest, step_seconds, whole_bytes
from osdp.search import DoesNotFit
from overlap.plan.plan import Residency

__all__ = ["FREE", "GB", "KEEP", "MARGIN", "OUTSIZED", "MemoryPlan", "made", "pinned_by", "rule_of", "styles"]

GB = 2**30
#: The share of the limit that is left free, as what a process takes varies from step to step.
MARGIN = 0.01
KEEP, FREE = "keep_full_weight", "free_full_weight"  # as transformers has them in a model's `_fsdp_plan`
_HIDDEN = 1e-3  # of a step: a shorter gain is none
#: Times the median bucket: a larger one forces what it takes upon all.
OUTSIZED = 4
_POINTS = 24  # of a picture
_WORDS = {
    Residency.FREED: "freed after each use",
    Residency.FREED_AFTER_BACKWARD: "kept from forward to backward",
    Residency.FREED_IN_STEP: "kept until the step",
    Residency.FREED_IN_STEP_ON_HOST: "kept once on each host",
}


@dataclass(frozen=True)
class MemoryPlan:
    """How long each bucket of a `job` on so many `ranks` is whole, and what that takes. Printed, it explains itself.

    `limit`: bytes that a rank may take. `in_passes` and `in_step`: the most bytes it takes in forward and backward, and
    while it updates, if all buckets are freed after each use and nothing is computed again. `modules`: of each bucket, the
    names of modules that have its parameters. `timed`: layers and the network were measured, so times are seconds; else
    they are bytes on the wire. `recomputed`: the numbers of blocks of the job that backward computes again. `slices`: into
    how many linear layers are split, by name.
    """

    job: Job
    residencies: Residencies
    ranks: int
    limit: int
    in_passes: int
    in_step: int
    modules: tuple[tuple[str, ...], ...]
    timed: bool
    pinned: Mapping[int, Residency]
    recomputed: tuple[int, ...] = ()
    slices: Mapping[str, int] = field(default_factory=dict)

    @property
    def choice(self) -> Choice:
        return Choice(self.residencies, self.recomputed)

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the buckets that stay whole between uses, the one nearest the input first."""
        return tuple(name for name, each in self._named() if each is not Residency.FREED)

    @property
    def freed(self) -> tuple[str, ...]:
        """… and of those that are freed after each use."""
        return tuple(name for name, each in self._named() if each is Residency.FREED)

    @property
    def recomputed_blocks(self) -> tuple[str, ...]:
        """The names of the blocks that backward computes again, the one nearest the input first."""
        return tuple(self.job.blocks[number].name for number in self.recomputed)

    def _named(self) -> Iterable[tuple[str, Residency]]:
        return zip(self.job.names, self.residencies, strict=True)

    @property
    def predicted_bytes(self) -> int:
        """The most that a rank takes, as predicted."""
        return max(self.in_passes + self.more, self.in_step + self.on_host)

    @property
    def more(self) -> int:
        """The bytes that passes take more than if all buckets were freed; below 0 with blocks that are computed again."""
        return self._more(self.choice)

    @property
    def on_host(self) -> int:
        """The bytes that a rank takes, also in the step, of buckets that lie once on each host."""
        return on_host_bytes(self.job, self.residencies)

    @property
    def least(self) -> int:
        """The least that they can take more."""
        return self._more(smallest(self.job, self.pinned))

    def _more(self, choice: Choice) -> int:
        return whole_bytes(self.job, *choice) - whole_bytes(self.job, self._all_freed)

    @property
    def _all_freed(self) -> Residencies:
        return (Residency.FREED,) * len(self.residencies)

    @property
    def seconds(self) -> float:
        """The predicted step; without times, its bytes on the wire."""
        return step_seconds(self.job, *self.choice)

    @property
    def seconds_freed(self) -> float:
        """The same if all buckets were freed."""
        return step_seconds(self.job, self._all_freed)

    def at(self, memory_limit_gb: float) -> MemoryPlan:
        """The plan with another limit. Raises :class:`osdp.search.DoesNotFit`."""
        return made(replace(self, limit=round(memory_limit_gb * GB)))

    def curve(self, points: int = _POINTS) -> list[tuple[float, float]]:
        """Predicted steps over limits in GB, from the least that fits to where nothing is freed or computed again."""
        least = max(self.in_passes + self.least, self.in_step)
        keep = tuple(self.pinned.get(place, OPTIONS[-1]) for place in range(len(self.residencies)))
        most = max(self.in_passes + self._more(Choice(keep)), least)
        found = []
        for number in range(points + 1):
            limit = (least + (most - least) * number / points) / (1 - MARGIN) / GB + 1e-6
            try:
                found.append((limit, self.at(limit).seconds))
            except DoesNotFit:
                continue  # what is pinned
        return found

    def draw(self, path: str) -> None:
        """Write a PNG of the predicted step over the limit. Raises ``ModuleNotFoundError`` without matplotlib."""
        try:
            import matplotlib as mpl
        except ModuleNotFoundError:
            raise ModuleNotFoundError("drawing needs matplotlib: pip install matplotlib") from None
        mpl.use("Agg")
        from matplotlib import pyplot as plt

        points = self.curve()
        figure, axes = plt.subplots(figsize=(7, 4))
        scale = 1e3 if self.timed else 1 / 2**20
        axes.plot([gb for gb, _ in points], [scale * seconds for _, seconds in points], drawstyle="steps-post")
        axes.plot([self.limit / GB], [scale * self.seconds], "o")
        axes.set_xlabel("memory limit of a rank, GB")
        axes.set_ylabel("predicted step, ms" if self.timed else "bytes on the wire in a step, MB")
        axes.set_ylim(bottom=0)
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)

    def fsdp_plan(self) -> dict[str, str]:
        """The plan as transformers writes one, for `_fsdp_plan`: a style for each pattern of module names."""
        verdicts: dict[str, bool] = {}
        for names, residency in zip(self.modules, self.residencies, strict=True):
            for name in names:
                verdicts[name] = verdicts.get(name, True) and residency is not Residency.FREED
        return styles(verdicts)

    def __str__(self) -> str:
        lines = {
            "limit": f"{self.limit / GB:.3f} GB on each rank",
            "memory": f"{self.predicted_bytes / GB:.3f} GB predicted, {100 * self.predicted_bytes / self.limit:.1f} % of "
            f"the limit; {max(self.in_passes, self.in_step) / GB:.3f} GB if all were freed",
            **{_WORDS[each]: self._group(each) for each in _WORDS if each in self.residencies},
            **({"computed again": self._again()} if self.job.blocks else {}),
            "gathered": f"{self._gathered(self.residencies) / 2**20:,.1f} MB in a step; "
            f"{self._gathered(self._all_freed) / 2**20:,.1f} MB if all were freed",
            "step": f"{self._time(self.seconds)} predicted; {self._time(self.seconds_freed)} if all were freed",
            **(
                {"split": ", ".join(f"{name} into {count}" for name, count in self.slices.items())}
                if self.slices
                else {}
            ),
            **({"largest": self._largest()} if self._outsized else {}),
            "next GB": self._next(),
        }
        width = max(map(len, lines))
        return "\n".join(
            [f"osdp on {self.ranks} ranks", *(f"  {name:<{width}}  {text}" for name, text in lines.items())]
        )

    @property
    def _outsized(self) -> bool:
        sizes = [bucket.nbytes for bucket in self.job.buckets]
        return max(sizes) > OUTSIZED * median(sizes)

    def _largest(self) -> str:
        nbytes, name = max((bucket.nbytes, name) for bucket, name in zip(self.job.buckets, self.job.names, strict=True))
        return (
            f"{name}, {nbytes / 2**20:,.1f} MB, which all are whole while it is used; if it is a linear layer, "
            "osdp.split() cuts it into slices, each of which is freed before the next one"
        )

    def _time(self, seconds: float) -> str:
        return f"{1e3 * seconds:,.4g} ms" if self.timed else f"{seconds / 2**20:,.1f} MB on the wire"

    def _group(self, residency: Residency) -> str:
        places = [place for place, each in enumerate(self.residencies) if each is residency]
        nbytes = sum(self.job.buckets[place].nbytes for place in places)
        named = ", ".join(_spans([self.job.names[place] for place in places], places))
        shared = (
            ""
            if self.job.hosts is None or residency is not Residency.FREED_IN_STEP_ON_HOST
            else (f", {self.on_host / 2**20:,.1f} MB for each of the {self.job.hosts.ranks} ranks there")
        )
        return f"{len(places)} of {len(self.residencies)} buckets, {nbytes / 2**20:,.1f} MB{shared}: {named}"

    def _again(self) -> str:
        blocks = [self.job.blocks[number] for number in self.recomputed]
        saved = sum(block.nbytes for block in blocks)
        named = ", ".join(_spans([block.name for block in blocks], self.recomputed))
        return f"{len(blocks)} of {len(self.job.blocks)} blocks, which save {saved / 2**20:,.1f} MB: {named or 'none'}"

    def _gathered(self, residencies: Residencies) -> int:
        """Bytes of parameters that passes gather in a step, at most."""
        times = {Residency.FREED: 2 * self.job.passes, Residency.FREED_AFTER_BACKWARD: self.job.passes}
        return sum(
            times.get(each, 1) * bucket.nbytes for each, bucket in zip(residencies, self.job.buckets, strict=True)
        )

    def _next(self) -> str:
        if not self.freed and not self.recomputed:
            return f"wins nothing: all buckets are kept{', and no block is computed again' if self.job.blocks else ''}"
        larger = self.at(self.limit / GB + 1)
        won, less = self.seconds - larger.seconds, self._gathered(self.residencies) - self._gathered(larger.residencies)
        fewer = len(self.recomputed) - len(larger.recomputed)
        kept = f"{len(larger.kept) - len(self.kept)} more kept"
        if fewer:
            kept += f", {fewer} fewer computed again"
        steps = (
            f"{self._time(won)} less in each step" if won > _HIDDEN * self.seconds else "a step as long, all is hidden"
        )
        return f"{kept}, {less / 2**20:,.1f} MB less to gather, {steps}"


def made(plan: MemoryPlan) -> MemoryPlan:
    """`plan` with the best choice for its limit. Raises :class:`osdp.search.DoesNotFit`."""
    target = int(plan.limit * (1 - MARGIN))
    used = max(plan.in_passes + plan.least, plan.in_step)
    if used > target:
        raise DoesNotFit.by(used, target, plan.job.names, [bucket.nbytes for bucket in plan.job.buckets])
    residencies, recomputed = chosen(plan.job, target - plan.in_passes, plan.pinned, target - plan.in_step)
    return replace(plan, residencies=residencies, recomputed=recomputed)


def pinned_by(fsdp_plan: Mapping[str, str], modules: Sequence[Sequence[str]]) -> dict[int, Residency]:
    """The residencies that a plan as transformers writes it gives to buckets of such `modules`, by place.

    A rule is for a module by its name, in which ``*`` stands for a number, and for all modules inside; the longest one
    counts. Buckets of which some module has no rule are left out. Raises ``ValueError`` for other styles, and for rules
    that no module has.
    """
    for pattern, style in fsdp_plan.items():
        if style not in (KEEP, FREE):
            raise ValueError(f"fsdp_plan[{pattern!r}] should be {KEEP!r} or {FREE!r} and is {style!r}")
    found = {}
    for place, names in enumerate(modules):
        rules = [rule_of(fsdp_plan, name) for name in names]
        if rules and None not in rules:
            keeps = all(fsdp_plan[rule] == KEEP for rule in rules if rule is not None)
            found[place] = Residency.FREED_AFTER_BACKWARD if keeps else Residency.FREED
    known = {name for names in modules for name in names}
    unused = [pattern for pattern in fsdp_plan if not any(_is_for(pattern, name) for name in known)]
    if unused:
        raise ValueError(f"fsdp_plan has rules for {', '.join(unused)}, and no module with parameters is called so")
    return found


def rule_of(fsdp_plan: Mapping[str, str], name: str) -> str | None:
    """The longest of the plan's patterns that is for the module `name`, or for one around it."""
    found = [pattern for pattern in fsdp_plan if _is_for(pattern, name)]
    return max(found, key=lambda pattern: (pattern.count("."), -pattern.count("*")), default=None)


def _is_for(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) <= len(parts) and all(
        want == part or (want == "*" and part.isdigit()) for want, part in zip(wanted, parts, strict=False)
    )


def styles(verdicts: Mapping[str, bool]) -> dict[str, str]:
    """A style for each module that is kept or not, with one for a module around those that are alike (pure)."""
    roots: dict[str, set[bool]] = {}
    for name, kept in verdicts.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            roots.setdefault(".".join(parts[:end]), set()).add(kept)
    found: dict[str, str] = {}
    for name in verdicts:
        parts = name.split(".")
        prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        prefix = next((each for each in prefixes if len(roots[each]) == 1), name)
        found[prefix] = KEEP if verdicts[name] else FREE
    patterns: dict[str, set[bool]] = {}  # modules that differ by a number alone
    for root, kinds in roots.items():
        patterns.setdefault(_pattern(root), set()).update(kinds)
    return {(_pattern(name) if len(patterns[_pattern(name)]) == 1 else name): style for name, style in found.items()}


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _spans(names: Sequence[str], places: Sequence[int]) -> list[str]:
    """Names, of neighbours the first and the last."""
    found: list[list[str]] = []
    before = -2
    for name, place in zip(names, places, strict=True):
        if place == before + 1:
            found[-1] = [found[-1][0], name]
        else:
            found.append([name])
        before = place
    return [" … ".join(each) for each in found]
