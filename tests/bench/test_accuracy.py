"""Time to accuracy: tasks learn, rates are searched, and curves are compared step by step, over seconds, and bit by bit."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.accuracy import __main__ as program
from bench.accuracy import search
from bench.accuracy.__main__ import Diverged, earlier, main
from bench.accuracy.curve import apart, draw, report, smooth, smooth_seconds, window_of
from bench.accuracy.ranks import alike, bits, compared, file_of, gathered, mean_losses, of_bits, whose
from bench.accuracy.report import markdown, mean_and_spread, seconds_to, steps_to, targets
from bench.accuracy.stored import curve, stored, whole
from bench.accuracy.tasks import TASKS, warm_up_and_cosine
from bench.accuracy.worker import train
from bench.methods.registry import method
from bench.program import ROOT
from bench.train.launcher import LauncherError

CURVES = {
    "dear": {"loss": [2.0, 1.0, 0.5], "seconds": [1.0, 2.0, 3.0]},
    "ddp": {"loss": [2.0, 1.001, 0.5], "seconds": [2.0, 4.0, 6.0]},
}


@pytest.mark.parametrize("name", ["digits", "cnn"])
def test_the_digits_are_learned_in_a_few_steps(name: str) -> None:
    torch.manual_seed(1)
    task = TASKS[name]
    model, loss_of, generator = task.build(), task.loss(), torch.Generator().manual_seed(1)
    optimizer = task.optimizer(model.parameters(), **task.arguments)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = loss_of(model, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert smooth(losses)[-1] < 0.5 * losses[0]
    if task.held_out is not None:
        found = task.held_out(model)
        assert found["accuracy"] > 0.6
        assert found["loss"] < losses[0]


@pytest.mark.full
def test_the_language_has_a_loss_on_text_that_was_held_out() -> None:
    torch.manual_seed(1)
    task = TASKS["language"]
    with torch.no_grad():
        assert task.held_out is not None
        assert task.held_out(task.build())["loss"] == pytest.approx(
            4.85, abs=0.3
        )  # of 128 bytes, one as likely as another


def test_a_learning_rate_rises_and_falls() -> None:
    rates = [warm_up_and_cosine(step, 1000) for step in range(1001)]
    assert rates[:2] == [0.01, 0.02]
    assert rates[99] == rates[100] == max(rates) == 1.0
    assert rates[550] == pytest.approx(0.55)
    assert rates[1000] == pytest.approx(0.1)  # a scheduler computes one more than there are steps
    assert warm_up_and_cosine(0, 1) == 1.0


def test_losses_are_timed_and_averaged_over_seeds() -> None:
    falling = [4.0 - step / 50 for step in range(100)]
    runs = [
        {"loss": falling, "seconds": [0.5 * step for step in range(100)], "held_out": {"loss": 2.0, "accuracy": 0.9}},
        {"loss": falling, "seconds": [1.5 * step for step in range(100)], "held_out": {"loss": 3.0, "accuracy": 0.8}},
    ]
    slow = [{**runs[0], "loss": [4.0] * 100, "held_out": {"loss": 2.75, "accuracy": 0.5}}]
    assert mean_and_spread([2.0, 3.0]) == pytest.approx((2.5, 0.7071), rel=1e-3)
    assert mean_and_spread([2.0]) == (2.0, 0.0)
    assert targets(runs) == pytest.approx([4.0 - 12 / 50, 4.0 - 37 / 50, 4.0 - 87 / 50])
    assert seconds_to(runs[0], 3.5, 2.5) == pytest.approx(0.5 * 27)  # of five steps, whose mean is that of the third
    assert seconds_to(runs[1], 3.5, 2.5) == pytest.approx(1.5 * 26)  # of two steps
    assert seconds_to(slow[0], 3.0, 2.5) is None
    assert steps_to(runs[0], targets(runs)[1]) == 50
    assert steps_to(slow[0], targets(runs)[1]) is None
    counted = markdown("About it.", {"dear": runs, "co2": slow}, timed=False)
    assert "Steps to a training loss" in counted
    assert "(on rank 0), the mean of 25 steps:" in counted
    assert "| dear | 25 ± 0 | 50 ± 0 | 100 ± 0 | 2 |" in counted
    text = markdown("About it.", {"dear": runs, "co2": slow}, timed=True)
    assert "Seconds to a training loss (on rank 0), the mean of 7.43 seconds:" in text  # of 148.5
    assert "| dear | 2.5000 ± 0.7071 | 85.0 ± 7.1 |  | 2 |" in text
    assert "| co2 | 2.7500 | 50.0 | +37.5 | 1 |" in text
    assert "| co2 | never | never | never | 100 | 49.5 | 1 |" in text
    assert not any(word in text for word in ("rate", "bit by bit"))  # nothing of which earlier runs know


def test_losses_are_averaged_over_the_same_seconds_however_many_steps_these_have() -> None:
    assert smooth_seconds([4.0, 2.0, 3.0, 7.0], [1.0, 2.0, 3.0, 4.0], 2.0) == [4.0, 3.0, 2.5, 5.0]
    assert smooth_seconds([4.0, 2.0, 3.0, 7.0], [1.0, 2.0, 9.0, 9.5], 2.0) == [4.0, 3.0, 3.0, 5.0]  # a pause
    quick, slow = [0.1 * step for step in range(1, 101)], [float(step) for step in range(1, 11)]
    falling = [smooth_seconds([10 - second for second in times], times, 2.0)[-1] for times in (quick, slow)]
    assert falling == pytest.approx([0.95, 0.5])  # of twenty steps and of two: each from the last two seconds
    assert window_of([{"seconds": [1.0, 40.0]}, {"seconds": [1.0, 10.0]}]) == 2.0


def _kept(seed: int, *losses: list[float], parameters: str = "ab") -> dict[str, Any]:
    ranks = [{"loss": bits(one), "parameters": parameters} for one in losses]
    return {"seed": seed, "rate": 0.1, "loss": losses[0], "seconds": [float(at) for at in range(1, len(losses[0]) + 1)],
            "ranks": ranks}  # fmt: skip


def test_losses_and_parameters_are_compared_bit_by_bit_on_every_rank() -> None:
    one = struct.unpack(">f", bytes.fromhex("40400000"))[0]
    next_one = struct.unpack(">f", bytes.fromhex("40400001"))[0]
    assert (bits([one, next_one, -0.5]), of_bits("40400000 bf000000")) == ("40400000 40400001 bf000000", [3.0, -0.5])
    first = [_kept(1, [one, 2.0], [one, 4.0]), _kept(2, [one, 2.0], [one, 4.0])]
    assert alike(first, [_kept(2, [one, 2.0], [one, 4.0])], "loss") is True
    others = [_kept(1, [one, 2.0], [next_one, 4.0], parameters="cd")]  # the other rank's last bit
    assert alike(first, others, "loss") is alike(first, others, "parameters") is False
    assert alike(first, [_kept(3, [one, 2.0], [one, 4.0])], "loss") is None  # of no seed in common
    assert alike(first, [_kept(1, [one], [one])], "loss") is None  # of other steps
    earlier = {"seed": 1, "loss": [3.0, 2.0], "seconds": [1.0, 2.0]}
    assert alike(first, [earlier], "loss") is None
    apart = [_kept(1, [one, 2.0], [one, 4.0])]
    apart[0]["ranks"][1]["parameters"] = "cd"
    methods = {"dear": first, "ddp": first[:1], "co2": others, "none": apart, "horovod": [earlier]}
    rows = {name: cells for name, *cells in compared(methods)[1:]}
    assert rows["dear"] == rows["ddp"] == ["the same", "the same", "yes"]
    assert rows["co2"] == ["others", "others", "yes"]
    assert rows["none"] == ["the same", "others", "no"]
    assert rows["horovod"] == ["", "", ""]
    assert compared({"dear": [earlier], "ddp": first}) == []
    assert whose(first) == "mean over 2 ranks"
    assert whose([*first, earlier]) == "mean over 2 ranks; of earlier runs, on rank 0"
    text = markdown("About it.", methods, timed=False)
    assert "| ddp | the same | the same | yes |" in text
    assert "All methods have the task's learning rate, 0.1." in text


def test_what_ranks_have_written_is_put_together(tmp_path: Path) -> None:
    output = tmp_path / "curve.json"
    for rank, losses in enumerate(([1.0, 2.0], [3.0, 2.5])):
        told = {
            "seed": 1,
            "loss": losses,
            "seconds": [rank + 1.0, rank + 2.0],
            "bits": {"loss": bits(losses), "parameters": "ab"},
        }
        file_of(output, rank).write_text(json.dumps(told))
    run = gathered(output, 2)
    assert (run["loss"], run["seconds"]) == ([2.0, 2.25], [1.0, 2.0])
    assert [of_bits(one["loss"]) for one in run["ranks"]] == [[1.0, 2.0], [3.0, 2.5]]
    assert run.keys() == {"seed", "loss", "seconds", "ranks"}
    with pytest.raises(OSError):
        gathered(output, 3)


def test_parameters_have_a_hash_in_the_order_of_their_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1).bfloat16())
    names = ["0.bias", "0.weight", "1.bias", "1.weight"]
    params = dict(model.named_parameters())
    told = b"".join(bytes(params[name].detach().view(torch.uint8).flatten().tolist()) for name in names)
    before = method("none").digest(model)
    assert before == hashlib.sha256(told).hexdigest()
    with torch.no_grad():
        params["1.bias"].view(torch.int16).add_(1)  # the last bit
    assert method("none").digest(model) != before


def test_a_file_keeps_no_loss_that_follows_from_the_bits_of_ranks() -> None:
    ranks = [{"loss": bits(losses), "parameters": "ab"} for losses in ([1.0, 0.1], [3.0, 0.7])]
    run = {"seed": 1, "seconds": [1.0, 2.0], "ranks": ranks, "loss": mean_losses(ranks), "origin": {"commit": "abc"}}
    of_rank_0 = {"seed": 1, "seconds": [1.0], "loss": [2.0], "origin": {"commit": "abc"}}
    curves = {
        "dear": {**curve([run]), "search": {"steps": 2, "tries": []}},
        "ddp": curve([of_rank_0]),
        "co2": {"runs": []},
    }
    kept = stored(curves)
    assert whole(json.loads(json.dumps(kept))) == curves
    assert kept["dear"].keys() == {"search", "runs"}
    assert "loss" not in kept["dear"]["runs"][0]
    assert run["loss"][0] == 2.0


SEARCH = {
    "steps": 20,
    "tries": [
        {"rate": 0.01, "end_loss": search.mean_of_end([4.0] * 18 + [2.0, 3.0])},
        {"rate": 0.1, "end_loss": search.mean_of_end([4.0] * 18 + [1.0, 2.0])},
        {"rate": 1.0, "end_loss": search.mean_of_end([4.0] * 19 + [math.nan])},
        {"rate": 10.0, "diverged": "the averaged gradient of 'a' was infinite"},
    ],
}


def test_each_method_takes_the_rate_of_the_least_loss_at_the_end() -> None:
    assert search.best(SEARCH) == 0.1
    assert search.best({**SEARCH, "tries": SEARCH["tries"][::-1]}) == 0.1
    assert not search.at_end(SEARCH)
    short = {**SEARCH, "tries": SEARCH["tries"][:2]}
    assert search.at_end(short)
    with pytest.raises(ValueError, match=r"no learning rate of 1, 10 trains in 20 steps: give --rates smaller ones"):
        search.best({**SEARCH, "tries": SEARCH["tries"][2:]})
    text = markdown("About it.", {"dear": [_kept(1, [1.0])], "co2": [_kept(1, [1.0])]}, timed=False,
                    searches={"dear": SEARCH, "co2": short})  # fmt: skip
    assert "| method | 0.01 | 0.1 | 1 | 10 | steps | takes |" in text
    assert "| dear | 2.5000 | 1.5000 | diverged | diverged | 20 | 0.1 |" in text
    assert "The grid is too short for `co2` (0.1): the best rate is at its end." in text
    assert "the task's" not in text


def test_tasks_have_a_grid_of_rates_with_their_own_inside() -> None:
    for task in TASKS.values():
        assert list(task.rates) == sorted(task.rates)
        assert task.rates[0] < task.arguments["lr"] < task.rates[-1]


def test_a_step_has_the_mean_gradient_of_its_batches_and_the_rate_of_its_first() -> None:
    values = [torch.tensor(float(2**number)) for number in range(5)]

    def trained(passes: int, schedule: Any = None) -> tuple[list[float], float]:
        weight = torch.nn.Parameter(torch.ones(()))
        model, batches = torch.nn.Module(), iter(values)
        model.weight = weight
        optimizer = torch.optim.SGD([weight], lr=1.0)
        losses, ended = train(model, optimizer, lambda: weight * next(batches), 5, passes, schedule)
        assert ended == sorted(ended)
        return losses, weight.item()

    losses, weight = trained(2)
    assert losses == [1.0, 2.0, -0.5 * 4, -0.5 * 8, -6.5 * 16]  # after a step by (1 + 2) / 2, and one by (4 + 8) / 2
    assert weight == -6.5 - 16  # the last step has one batch
    asked: list[tuple[int, int]] = []
    trained(2, lambda step, steps: asked.append((step, steps)) or 1.0)  # type: ignore[func-returns-value]
    assert asked == [(0, 5), (2, 5), (4, 5), (6, 5)]
    assert method("dear:backward_passes_per_step=3").passes == 3
    assert method("dear").passes == method("ddp").passes == 1


def test_curves_are_compared_at_the_same_step(tmp_path: Path) -> None:
    assert apart(CURVES) == pytest.approx(0.001)
    assert smooth([1, 2, 3, 4, 5, 6, 7]) == [1, 1.5, 2, 2.5, 3, 4, 5]
    lines = report(CURVES).splitlines()
    assert lines[1].split() == ["dear", "1.1667", "3", "3.0", "0.50"]
    assert "at most 0.001 apart, over 3 steps" in lines[-1]
    draw(CURVES, "a title", tmp_path / "x.png", timed=True)
    draw(CURVES, "a title", tmp_path / "y.png", timed=False)
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_methods_may_make_as_many_steps_as_fit_in_the_same_time(tmp_path: Path) -> None:
    more = {**CURVES, "co2": {"loss": [2.5, 2.0, 0.4, 0.3], "seconds": [0.5, 1.0, 1.5, 2.0]}}
    assert apart(more) == pytest.approx(1.0)  # at the second step
    assert "co2                                             1.3000      4      2.0        0.33" in report(more)
    assert report(more).endswith("over 3 steps")
    draw(more, "a title", tmp_path / "x.png", timed=True)
    there = tmp_path / "curves.json"
    there.write_text(json.dumps({name: {**curve, "origin": {}, "runs": [curve]} for name, curve in more.items()}))
    asked = {"steps": 4, "methods": ["co2"], "network": "100mbit", "output": tmp_path / "curves.png", "rates": None}
    assert earlier(Namespace(**asked)).keys() == more.keys()
    for others in ({"network": "local"}, {"methods": ["co2", "dear"]}):
        with pytest.raises(ValueError, match="3 steps of dear, and --steps 4 is asked for: pass --steps 3"):
            earlier(Namespace(**{**asked, **others}))


def test_methods_of_one_file_share_a_grid(tmp_path: Path) -> None:
    there = tmp_path / "curves.json"
    searched = {
        **CURVES["dear"],
        "origin": {},
        "runs": [CURVES["dear"]],
        "search": {**SEARCH, "tries": SEARCH["tries"][:2]},
    }
    begun = {"runs": [], "search": {"steps": 20, "tries": SEARCH["tries"][:1]}}  # was interrupted
    there.write_text(json.dumps({"dear": searched, "ddp": begun}))
    asked = {"steps": 3, "methods": ["dear"], "network": "local", "output": tmp_path / "curves.png", "search_steps": 20}
    for rates in ([0.01, 0.1], [0.01, 0.1, 1.0]):  # more of them, for every method that is there
        assert earlier(Namespace(**asked, rates=rates)).keys() == {"dear", "ddp"}
    with pytest.raises(ValueError, match=r"has --rates 0.01 0.1 of dear, and --rates 0.01 0.1 1 is asked for"):
        earlier(Namespace(**{**asked, "methods": ["ddp"]}, rates=[0.01, 0.1, 1.0]))
    for rates, told in ((None, "no --rates is asked for"), ([0.01, 1.0], "--rates 0.01 1 is asked for")):
        with pytest.raises(ValueError, match=f"has --rates 0.01 0.1 of dear, and {told}: methods share one grid"):
            earlier(Namespace(**asked, rates=rates))
    with pytest.raises(ValueError, match="a search of 20 steps of dear, and 5 are asked for: pass --search-steps 20"):
        earlier(Namespace(**{**asked, "search_steps": 5}, rates=[0.01, 0.1]))
    there.write_text(json.dumps({"dear": {**CURVES["dear"], "origin": {}}}))  # as the first files were
    assert earlier(Namespace(**asked, rates=None))["dear"]["runs"][0]["loss"] == CURVES["dear"]["loss"]
    with pytest.raises(ValueError, match="has no --rates of dear"):
        earlier(Namespace(**asked, rates=[0.01]))


def test_only_a_run_whose_gradients_were_not_finite_counts_as_one_that_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: dict[int, dict[str, str]] = {}

    def launch(settings: Any, _: object, argv: list[str]) -> None:
        for rank, told in wrote.items():
            file_of(Path(json.loads(argv[-1])["output"]), rank).write_text(json.dumps(told))
        raise LauncherError("a worker failed")

    monkeypatch.setattr("bench.train.launcher.launch", launch)
    monkeypatch.setattr("bench.accuracy.__main__.look", lambda allowed: 0.0)
    task = {"task": "digits", "steps": 3, "seed": 0, "rate": 0.5}
    prepared = program.prepare("dear", Namespace(workers=2, network="1gbit", launcher=None, timeout=1.0))
    with pytest.raises(LauncherError, match="a worker failed"):  # by chance: it is tried again
        program.trial(*prepared, task)
    wrote[0] = {"loss": "of a rank that had ended"}
    with pytest.raises(LauncherError, match="a worker failed"):
        program.trial(*prepared, task)
    wrote[1] = {"diverged": "the averaged gradient of 'a' was infinite"}
    told = "dear diverged at learning rate 0.5: the averaged gradient of 'a' was infinite"
    assert program.trial(*prepared, task) == {"rate": 0.5, "diverged": told}
    with pytest.raises(Diverged, match=told):
        program.run(*prepared, task, busy=False)


def test_a_method_that_its_launcher_cannot_start_is_told_before_any_is_trained() -> None:
    asked = Namespace(workers=2, network="local", launcher="torchrun", timeout=1.0)
    settings, _ = program.prepare("dear", asked)
    assert settings.launcher == "torchrun"
    with pytest.raises(LauncherError, match="dear runs under mpi, not under torchrun"):
        program.prepare("dear:transport=mpi", asked)


def test_rates_are_searched_before_any_seed_and_what_is_there_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, int, float, str]] = []

    def run(settings: Any, _: object, task: dict[str, Any], *, busy: bool) -> dict[str, Any]:
        asked.append((settings.method, task["seed"], task["steps"], task["rate"], settings.network))
        assert busy == (task["seed"] == search.SEED)
        if task["rate"] == 1.0:
            raise Diverged("dear diverged")
        off = abs(task["rate"] - (0.1 if settings.method == "dear" else 0.01))
        losses = [2.0 + off] * task["steps"]
        return {**_kept(task["seed"], losses, losses), "rate": task["rate"], "origin": {"commit": "abc"}}

    monkeypatch.setattr("bench.accuracy.__main__.run", run)
    monkeypatch.setattr("bench.accuracy.__main__.end_in_order", lambda: None)
    output = tmp_path / "x.png"
    command = ["bench.accuracy", "--steps", "3", "--seeds", "2", "--output", str(output), "--network", "1gbit"]
    command += ["--rates", "1", "0.1", "0.01", "--search-steps", "2", "--methods", "dear"]
    for more in (["ddp"], ["none", "--add"]):
        monkeypatch.setattr(sys, "argv", command + more)
        assert main() == 0
        if more == ["ddp"]:
            assert asked == [
                *((name, 0, 2, rate, "local") for rate in (0.01, 0.1, 1.0) for name in ("dear", "ddp")),
                *((name, seed, 3, rate, "1gbit") for seed in (1, 2) for name, rate in (("dear", 0.1), ("ddp", 0.01))),
            ]
            asked.clear()
    assert {name for name, *_ in asked} == {"none"}
    there = json.loads(output.with_suffix(".json").read_text())
    assert there["dear"]["search"]["tries"][2] == {"rate": 1.0, "diverged": "dear diverged"}
    assert [run["rate"] for run in there["ddp"]["runs"]] == [0.01, 0.01]
    assert "The grid is too short for `ddp` (0.01), `none` (0.01)" in output.with_suffix(".md").read_text()
    monkeypatch.setattr(sys, "argv", ["bench.accuracy", "--search-steps", "2"])
    with pytest.raises(SystemExit):
        main()


def test_more_rates_are_tried_and_only_who_takes_another_one_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, float]] = []

    def run(settings: Any, _: object, task: dict[str, Any], *, busy: bool) -> dict[str, Any]:
        asked.append((settings.method, task["seed"], task["rate"]))
        losses = [2.0 + abs(task["rate"] - {"dear": 0.1, "ddp": 0.4}[settings.method])] * task["steps"]
        return {**_kept(task["seed"], losses, losses), "rate": task["rate"], "origin": {"commit": "abc"}}

    monkeypatch.setattr("bench.accuracy.__main__.run", run)
    monkeypatch.setattr("bench.accuracy.__main__.end_in_order", lambda: None)
    command = ["bench.accuracy", "--steps", "3", "--seeds", "2", "--output", str(tmp_path / "x.png")]
    command += ["--methods", "dear", "ddp", "--rates", "0.1", "0.2"]
    for more in ([], ["0.4", "--add"]):
        asked.clear()
        monkeypatch.setattr(sys, "argv", command + more)
        assert main() == 0
    assert asked == [("dear", 0, 0.4), ("ddp", 0, 0.4), ("ddp", 1, 0.4), ("ddp", 2, 0.4)]
    there = json.loads((tmp_path / "x.json").read_text())
    assert {name: [run["rate"] for run in one["runs"]] for name, one in there.items()} == {
        "dear": [0.1, 0.1],
        "ddp": [0.4, 0.4],
    }


def test_seeds_that_a_method_lacks_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def run(settings: Any, _: object, task: dict[str, Any], *, busy: bool) -> dict[str, object]:
        asked.append((settings.method, task["seed"]))
        assert busy, "without a network seconds do not count"
        return {**CURVES["dear"], "seed": task["seed"], "origin": {"commit": f"abc{task['seed']}"}}

    monkeypatch.setattr("bench.accuracy.__main__.run", run)
    monkeypatch.setattr("bench.accuracy.__main__.end_in_order", lambda: None)  # signals stay pytest's
    output = tmp_path / "x.png"
    command = ["bench.accuracy", "--task", "language", "--steps", "3", "--output", str(output), "--methods", "dear"]
    for more in (["ddp", "--seeds", "1"], ["--add"]):  # three seeds, where nothing is said
        monkeypatch.setattr(sys, "argv", command + more)
        assert main() == 0
        there = json.loads(output.with_suffix(".json").read_text())
        there["dear"]["origin"] = there["dear"]["runs"][0].pop("origin")  # as files of earlier versions are
        output.with_suffix(".json").write_text(json.dumps(there))
    assert asked == [("dear", 1), ("ddp", 1), ("dear", 2), ("dear", 3)]
    assert (whole(there)["dear"]["origin"], [run["seed"] for run in there["dear"]["runs"]]) == (
        {"commit": "abc1"},
        [1, 2, 3],
    )
    assert "language, 2 workers, local; 3 steps, 1 to 3 seeds." in output.with_suffix(".md").read_text()


@pytest.mark.full
def test_a_task_is_learned_at_searched_rates_and_what_is_equal_is_so_in_all_bits(tmp_path: Path) -> None:
    output = tmp_path / "digits.png"
    methods = ["dear", "fsdp", "dear:backward_passes_per_step=4", "co2:outer=localsgd,outer_frequency=4"]
    command = [
        sys.executable,
        "-m",
        "bench.accuracy",
        "--steps",
        "12",
        "--seeds",
        "1",
        "--output",
        str(output),
    ]
    command += ["--rates", "0.2", "1e30", "--search-steps", "6", "--methods", *methods]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    there = whole(json.loads(output.with_suffix(".json").read_text()))
    assert list(there) == methods
    for one in there.values():
        assert [(run["seed"], run["rate"]) for run in one["runs"]] == [(1, 0.2)]
        assert search.end_loss(one["search"]["tries"][1]) == math.inf
        for run in one["runs"]:
            losses = [of_bits(rank["loss"]) for rank in run["ranks"]]
            assert run["loss"] == pytest.approx([sum(step) / 2 for step in zip(*losses, strict=True)])
            assert losses[0] != losses[1]
            assert len({rank["parameters"] for rank in run["ranks"]}) == 1
    rows = {name: cells for name, *cells in compared({name: one["runs"] for name, one in there.items()})[1:]}
    assert rows["fsdp"] == ["the same", "the same", "yes"]
    assert rows[methods[2]] == rows[methods[3]] == ["others", "others", "yes"]
