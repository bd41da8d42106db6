"""Plans without training: what is chosen, what they say, and transformers' form of them."""

from __future__ import annotations

import importlib.util
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import osdp
from osdp.choice import OPTIONS, Block, Hosts, Job, chosen, on_host_bytes, step_seconds, whole_bytes
from osdp.memory_plan import FREE, KEEP, MARGIN, pinned_by, styles
from overlap.plan.plan import Residency
from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.workload import Bucket, Layer, Workload

MB = 2**20
ON_HOST = Residency.FREED_IN_STEP_ON_HOST


def _job(sizes: list[int], *, passes: int = 1, wire: float = 1e-9) -> Job:
    layers = tuple(Layer(f"layer {n}", 1e-3, 2e-3, (size,)) for n, size in enumerate(sizes))
    buckets = [Bucket(n, n, size, 1) for n, size in enumerate(sizes)]
    return Job([each.name for each in layers], buckets, Workload(layers), Fitted(2, 1e-4, wire, wire), 4 * MB, passes)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.8, 1.1])
@pytest.mark.parametrize("alike", [True, False])
def test_what_is_kept_fits_and_leaves_no_room_for_more(share: float, alike: bool, passes: int) -> None:
    sizes = [2 * MB if alike else MB * (1 + n * 7 % 5) for n in range(20)]
    job = _job(sizes, passes=passes)
    freed = (Residency.FREED,) * len(sizes)
    spare = int(share * sum(sizes))
    found = chosen(job, spare).residencies
    more = whole_bytes(job, found) - whole_bytes(job, freed)
    assert more <= spare
    assert step_seconds(job, found) <= step_seconds(job, freed)
    if share > 1:
        kept = Residency.FREED_AFTER_BACKWARD if passes == 1 else Residency.FREED_IN_STEP
        assert set(found) == {kept}
    else:
        assert spare - more < (2 if alike else 5) * MB


def test_several_passes_keep_until_the_step() -> None:
    """A gather for each pass is a reason to; for one pass it would only take memory longer."""
    once, often = (set(chosen(_job([MB] * 16, passes=passes), 3 * MB).residencies) for passes in (1, 2))
    assert once == {Residency.FREED, Residency.FREED_AFTER_BACKWARD}
    assert often == {Residency.FREED, Residency.FREED_IN_STEP}


def test_of_equal_buckets_those_are_kept_that_help_most() -> None:
    """As any one is as large: by simulation, which no sum of the wire's seconds tells."""
    job = _job([2 * MB] * 16, wire=6e-10)
    found = chosen(job, 8 * MB).residencies
    count = sum(each is not Residency.FREED for each in found)
    first = tuple(OPTIONS[1] if place < count else OPTIONS[0] for place in range(16))
    assert step_seconds(job, found) <= step_seconds(job, first)


@pytest.mark.parametrize("seed", range(12))
def test_among_all_choices_none_fits_better_where_blocks_may_be_computed_again(seed: int) -> None:
    """Of sums of seconds, the search's is the best; what is hidden of them only a simulation of all choices would tell."""
    generator = random.Random(seed)
    job = _job([MB * generator.randint(1, 6) for _ in range(6)], wire=generator.choice([3e-10, 1e-9, 3e-9]))
    saved = [MB * generator.randint(1, 12) for _ in range(3)]
    blocks = [Block(f"block {n}", each, 2 * n, 2 * n + 1, (2 * n, 2 * n + 1)) for n, each in enumerate(saved)]
    job = replace(job, blocks=blocks)
    base, spare = whole_bytes(job, (Residency.FREED,) * 6), generator.randint(-20, 20) * MB
    subsets = [again for count in range(4) for again in itertools.combinations(range(3), count)]
    fits = [
        step_seconds(job, residencies, again)
        for residencies in itertools.product(OPTIONS[:2], repeat=6)
        for again in subsets
        if whole_bytes(job, residencies, again) - base <= spare
    ]
    if not fits:
        with pytest.raises(osdp.DoesNotFit):
            chosen(job, spare)
        return
    found = chosen(job, spare)
    assert whole_bytes(job, *found) - base <= spare
    assert step_seconds(job, *found) <= 1.1 * min(fits)


@pytest.mark.parametrize("seed", range(12))
def test_among_all_choices_none_fits_better_where_buckets_may_lie_on_hosts(seed: int) -> None:
    generator = random.Random(seed)
    wire, several = generator.choice([3e-10, 1e-9, 3e-9]), seed % 2 == 0
    job = _job([MB * generator.randint(1, 6) for _ in range(5)], wire=wire)
    barriers = generator.choice([1e-4, 5e-3])
    hosts = Hosts(2, Fitted(1 + several, barriers, 0.0, wire * several), generator.randint(2, 25) * MB)
    job = replace(job, hosts=hosts)
    spare, in_step = generator.randint(0, 20) * MB, generator.randint(1, 12) * MB
    base = whole_bytes(job, (Residency.FREED,) * 5)

    def fits(residencies: tuple[Residency, ...]) -> bool:
        there = [bucket.nbytes for bucket, each in zip(job.buckets, residencies, strict=True) if each is ON_HOST]
        assert on_host_bytes(job, residencies) == sum(there) // 2
        return whole_bytes(job, residencies) - base <= spare and sum(there) <= hosts.room and sum(there) // 2 <= in_step

    every = itertools.product((*OPTIONS[:2], ON_HOST), repeat=5)
    fastest = min(step_seconds(job, residencies) for residencies in every if fits(residencies))
    found = chosen(job, spare, spare_in_step=in_step).residencies
    assert fits(found)
    assert step_seconds(job, found) <= 1.1 * fastest


def test_once_per_host_takes_a_part_of_the_memory_and_of_the_link() -> None:
    sizes = [2 * MB] * 16
    link = Fitted(2, 1e-5, 0.0, 1e-9)
    job = replace(_job(sizes), hosts=Hosts(2, link))
    residencies = (ON_HOST,) * 16
    assert whole_bytes(job, residencies) == 16 * MB
    assert set(chosen(job, 16 * MB).residencies) == {ON_HOST}
    wire_bound = replace(
        job, work=Workload(tuple(Layer(each.name, 1e-6, 1e-6, each.tensors) for each in job.work.layers))
    )
    halves = step_seconds(wire_bound, (Residency.FREED,) * 16) / step_seconds(wire_bound, residencies)
    assert halves == pytest.approx(3 / 2, rel=0.15), "three halves of an all-reduce, and two"
    slow = replace(job, hosts=Hosts(2, Fitted(2, 1.0, 0.0, 1e-9)))
    assert ON_HOST not in chosen(slow, 16 * MB).residencies, "by simulation, as all others"


def test_blocks_nearest_the_output_save_nothing_where_they_are_computed_again() -> None:
    """What the last one saves is there when backward begins or a moment later: all the same."""
    job = replace(_job([MB // 16] * 8), blocks=[Block(f"{n}", 8 * MB, n, n, (n,)) for n in range(8)])
    freed = (Residency.FREED,) * 8
    taken = [whole_bytes(job, freed, tuple(range(count))) for count in range(9)]
    assert [before - after for before, after in itertools.pairwise(taken)][:6] == [8 * MB] * 6
    assert taken[8] >= taken[7]
    assert whole_bytes(job, freed, (7,)) >= taken[0]
    found = chosen(job, -3 * 8 * MB)
    assert len(found.recomputed) == 3
    assert step_seconds(job, *found) == pytest.approx(step_seconds(job, found.residencies) + 3e-3, rel=0.02)


def _model(layers: int = 6) -> torch.nn.Module:
    blocks = (torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)) for _ in range(layers))
    return torch.nn.ModuleDict({"embed": torch.nn.Embedding(64, 256), "layers": torch.nn.ModuleList(blocks)})


def _plan(gb: float, **options: Any) -> osdp.MemoryPlan:
    return osdp.plan(_model(), memory_limit_gb=gb, ranks=2, threshold_mb=0, other_gb=0.01, **options)


def test_a_plan_says_what_it_keeps_and_what_more_memory_wins(tmp_path: Path) -> None:
    least = _plan(1.0).in_passes / 2**30
    plan = _plan((least + 0.5 / 1024) / (1 - MARGIN))
    assert plan.kept
    assert plan.freed
    assert plan.predicted_bytes <= plan.limit * (1 - MARGIN)
    text = str(plan)
    for word in (
        "2 ranks",
        "freed after each use",
        "kept from forward to backward",
        "MB on the wire",
        "next GB",
        "more kept",
    ):
        assert word in text, text
    assert "wins nothing" in str(_plan(1.0))
    points = plan.curve(8)
    assert [gb for gb, _ in points] == sorted(gb for gb, _ in points)
    seconds = [seconds for _, seconds in points]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] <= plan.seconds_freed, "what stays after forward by itself may as well be kept"
    assert seconds[-1] == pytest.approx(_plan(1.0).seconds)
    if importlib.util.find_spec("matplotlib"):
        plan.draw(str(tmp_path / "plan.png"))
        assert (tmp_path / "plan.png").stat().st_size > 1000


def test_a_plan_of_buckets_that_may_lie_on_hosts() -> None:
    least = _plan(1.0).in_passes / 2**30
    limit = (least + 1.0 / 1024) / (1 - MARGIN)
    alone, plan = _plan(limit), _plan(limit, ranks_per_host=2)
    assert len(plan.kept) > len(alone.kept)
    assert plan.predicted_bytes <= plan.limit * (1 - MARGIN)
    assert plan.seconds < alone.seconds
    assert f"MB, {plan.on_host / MB:,.1f} MB for each of the 2 ranks there" in str(plan)
    assert set(_plan(1.0, ranks_per_host=2).residencies) == {ON_HOST}
    with pytest.raises(ValueError, match="ranks_per_host=3 does not divide ranks=2"):
        _plan(1.0, ranks_per_host=3)


def test_times_that_were_measured_count() -> None:
    times = {f"layers.{block}.{linear}": (1e-3, 2e-3) for block in range(6) for linear in range(2)}
    plan = _plan(1.0, layer_times={**times, "embed": (1e-4, 1e-4)}, alpha_beta=(1e-4, 1e-8))
    assert plan.timed
    assert 36e-3 < plan.seconds < plan.seconds_freed
    assert " ms predicted" in str(plan)


def test_a_plan_of_blocks_that_may_be_computed_again() -> None:
    saved = {f"layers.{block}": 0.1 for block in range(6)}
    least = _plan(2.0, activations_gb=0.7, saved_gb=saved).in_passes / 2**30
    for times in ({}, {"alpha_beta": (1e-4, 1e-9)}):
        if times:
            layers = {f"layers.{block}.{linear}": (1e-2, 2e-2) for block in range(6) for linear in range(2)}
            times["layer_times"] = {**layers, "embed": (1e-4, 1e-4)}
        plan = _plan((least - 0.15) / (1 - MARGIN), activations_gb=0.7, saved_gb=saved, **times)
        assert len(plan.recomputed_blocks) == 2
        assert f"2 of 6 blocks, which save {0.2 * 1024:,.1f} MB: {plan.recomputed_blocks[0]}" in str(plan)
        assert "2 fewer computed again" in str(plan)
        assert plan.predicted_bytes <= plan.limit
        assert not plan.at(2.0).recomputed
        assert plan.curve(4)[-1][1] == pytest.approx(plan.at(2.0).seconds)
        with pytest.raises(osdp.DoesNotFit):
            plan.at(least - 0.65)
    with pytest.raises(ValueError, match="saved_gb has block, and ModuleDict has no modules"):
        _plan(2.0, saved_gb={"block": 0.1})
    with pytest.raises(ValueError, match=r"saved_gb has 0\.6 GB .* activations_gb=0\.5"):
        _plan(2.0, activations_gb=0.5, saved_gb=saved)


def test_a_limit_that_nothing_fits_says_by_how_much() -> None:
    with pytest.raises(osdp.DoesNotFit, match=r"MB more; the largest: ") as caught:
        _plan(0.005)
    fits = _plan((0.005 * 2**30 * (1 - MARGIN) + caught.value.short + 1) / (1 - MARGIN) / 2**30)
    assert fits.more == 0


def test_rules_as_transformers_writes_them() -> None:
    rules = {"layers.*": FREE, "layers.2": KEEP, "layers.2.0": FREE, "head": KEEP}
    modules = [("layers.1.0",), ("layers.2.1",), ("layers.2.0",), ("head",), ("other",), ("layers.2.1", "layers.3.0")]
    keep, free = Residency.FREED_AFTER_BACKWARD, Residency.FREED
    assert pinned_by(rules, modules) == {0: free, 1: keep, 2: free, 3: keep, 5: free}
    with pytest.raises(ValueError, match=r"fsdp_plan\['head'\] should be .* and is 'kept'"):
        pinned_by({"head": "kept"}, modules)
    with pytest.raises(ValueError, match="rules for neck, and no module"):
        pinned_by({"neck": KEEP}, modules)


def test_styles_are_as_short_as_can_be() -> None:
    kept = {
        "embed": False,
        "layers.0.a": True,
        "layers.0.b": True,
        "layers.1.a": False,
        "layers.1.b": True,
        "norm": True,
    }
    assert styles(kept) == {
        "embed": FREE,
        "layers.0": KEEP,
        "layers.1.a": FREE,
        "layers.*.b": KEEP,
        "norm": KEEP,
    }
    assert styles({"m.layers.0.a": False, "m.layers.1.a": False, "m.norm": True}) == {"m.layers": FREE, "m.norm": KEEP}
    assert styles({"l.0.a": False, "l.1.a": False, "l.0.b": True, "l.1.b": True}) == {"l.*.a": FREE, "l.*.b": KEEP}


def test_a_plan_reads_its_own_form_back() -> None:
    plan = _plan((_plan(1.0).in_passes / 2**30 + 1.2 / 1024) / (1 - MARGIN))
    again = _plan(1.0, fsdp_plan=plan.fsdp_plan())
    assert again.kept == plan.kept
    assert again.freed == plan.freed


def test_the_plan_of_a_transformers_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=99
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    if not getattr(model, "_fsdp_plan", None):
        pytest.skip("this version's models have no _fsdp_plan")
    plan = osdp.plan(model, memory_limit_gb=1.0, ranks=2, threshold_mb=0, fsdp_plan="model", other_gb=0.0)
    found = plan.fsdp_plan()
    assert found["lm_head"] == KEEP
    assert found["model.norm"] == KEEP
    assert all(style == FREE for name, style in found.items() if name not in ("lm_head", "model.norm"))


def _headed(slices: Any = None, *, gb: float = 1.0) -> osdp.MemoryPlan:
    layers = [torch.nn.Linear(512, 512) for _ in range(16)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 32768))
    return osdp.plan(model, memory_limit_gb=gb, ranks=4, threshold_mb=0, other_gb=0.01, slices=slices)


def test_a_large_layer_is_split_where_it_does_not_fit() -> None:
    """A head of 64 buckets' size is whole at once; in slices it need not be."""
    whole = _headed()
    assert "16, 64.1 MB, which all are whole" in str(whole)
    assert _headed("auto").slices == {}, "nothing is won where all is kept"
    least = whole.in_passes / 2**30 / (1 - MARGIN)
    gb = least - 0.03
    with pytest.raises(osdp.DoesNotFit, match=r"the largest: 16 64\.1 MB"):
        _headed(gb=gb)
    split = _headed("auto", gb=gb)
    assert list(split.slices) == ["16"]
    count = split.slices["16"]
    assert f"16 into {count}" in str(split)
    assert split.predicted_bytes <= split.limit < whole.in_passes
    assert split.modules[-1] == (f"16.slices.{count - 1}",)
    assert _headed({"16": count}, gb=gb).seconds == split.seconds
    with pytest.raises(osdp.DoesNotFit):
        _headed("auto", gb=0.06)
