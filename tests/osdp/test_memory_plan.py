"""Plans without training: what is chosen, what they say, and transformers' form of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import osdp
from osdp.choice import OPTIONS, Job, chosen, step_seconds, whole_bytes
from osdp.memory_plan import FREE, KEEP, MARGIN, pinned_by, styles
from overlap.plan.plan import Residency
from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.workload import Bucket, Layer, Workload

MB = 2**20


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
    found = chosen(job, spare)
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
    once, often = (set(chosen(_job([MB] * 16, passes=passes), 3 * MB)) for passes in (1, 2))
    assert once == {Residency.FREED, Residency.FREED_AFTER_BACKWARD}
    assert often == {Residency.FREED, Residency.FREED_IN_STEP}


def test_of_equal_buckets_those_are_kept_that_help_most() -> None:
    """As any one is as large: by simulation, which no sum of the wire's seconds tells."""
    job = _job([2 * MB] * 16, wire=6e-10)
    found = chosen(job, 8 * MB)
    count = sum(each is not Residency.FREED for each in found)
    first = tuple(OPTIONS[1] if place < count else OPTIONS[0] for place in range(16))
    assert step_seconds(job, found) <= step_seconds(job, first)


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


def test_times_that_were_measured_count() -> None:
    times = {f"layers.{block}.{linear}": (1e-3, 2e-3) for block in range(6) for linear in range(2)}
    plan = _plan(1.0, layer_times={**times, "embed": (1e-4, 1e-4)}, alpha_beta=(1e-4, 1e-8))
    assert plan.timed
    assert 36e-3 < plan.seconds < plan.seconds_freed
    assert " ms predicted" in str(plan)


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
