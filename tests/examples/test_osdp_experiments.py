"""The published OSDP's experiments: they train alike in every mode, say what they measured, and refuse what cannot be."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.harness import ROOT, Result, run_ranks

FOLDER = ROOT / "examples" / "osdp"
TINY = [
    *("--hidden_size", "32", "--num_hidden_layers", "3", "--num_attention_heads", "2", "--vocab_size", "50"),
    *("--seq_length", "8", "--train_batch_size", "2", "--steps", "2"),
]


def _run(size: int, script: str, *options: str | Path, env: dict[str, str] | None = None) -> Result:
    return run_ranks(size, [str(FOLDER / script), *TINY, *map(str, options)], timeout=300, env=env)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(str(FOLDER))
    mine = ("train", "train_bert", "experiment", "transformer")
    for name in mine:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in mine:
        sys.modules.pop(name, None)


# - GPT


def test_osdp_and_fsdp_train_alike_and_tell_what_they_take(tmp_path: Path) -> None:
    files = [tmp_path / f"{kind}.json" for kind in ("OSDP", "FSDP")]
    said = [
        _run(
            2, "train.py", "--fsdp_type", file.stem, "--device_memory_limit", "4096", "--json", file, "--profile"
        ).check()
        for file in files
    ]
    for output in (one.output for one in said):
        assert re.search(r"^  throughput +\S+ samples/s, \S+ words/s$", output, re.MULTILINE)
        assert re.search(r"^  step +\S+ s, the median of 2$", output, re.MULTILINE)
        assert re.search(r"^  memory +\S+ of 4\.000 GB, \S+ %, the peak of a rank$", output, re.MULTILINE)
        assert re.search(r"^  blocks\.1\.mlp\.0 +\S+ +\S+ +0\.02$", output, re.MULTILINE)
        assert "between hosts" not in output
    assert "osdp on 2 ranks" in said[0].output
    assert "next GB" in said[0].output
    assert "no plan: what is wrapped is freed after each use" in said[1].output
    osdp, fsdp = (json.loads(file.read_text()) for file in files)
    assert osdp["parameters"] == fsdp["parameters"] == 50 * 32 + 8 * 32 + 3 * (12 * 32**2 + 13 * 32) + 64
    assert len(osdp["losses"]) > len(fsdp["losses"]) == 5
    torch.testing.assert_close(osdp["losses"][:5], fsdp["losses"], rtol=1e-5, atol=0)
    assert all(2**26 < one["peak_bytes"] < 2**32 for one in (osdp, fsdp))
    assert (osdp["samples"], osdp["words"], len(osdp["step_seconds"])) == (4, 8, 2)


def test_a_limit_that_is_too_low_is_told_by_how_much_and_once() -> None:
    result = _run(2, "train.py", "--device_memory_limit", "60")
    assert result.returncode != 0
    assert len(re.findall(r"^train.py: osdp, .* MB are needed at least, \S+ MB more", result.output, re.MULTILINE)) == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("script", "argv", "said"),
    [
        ("train", [], "--fsdp_type OSDP needs --device_memory_limit MB, under which it plans; FSDP needs none"),
        ("train", ["--device_memory_limit", "0"], "--device_memory_limit should be above 0 MB and is 0"),
        ("train", ["--hidden_size", "30", "--num_attention_heads", "4"],
         "--hidden_size 30 is not divisible by --num_attention_heads 4: each head has an equal part"),
        ("train", ["--fsdp_type", "FSDP", "--seq_length", "0"], "--seq_length should be at least 1 and is 0"),
        ("train_bert", ["--steps", "-1"], "--steps should be at least 1 and is -1"),
        ("train_bert", ["--vocab_size", "1"], "--vocab_size should be at least 2, a word and the mask, and is 1"),
        ("train_bert", ["--dropout", "1"], "--dropout should be at least 0 and below 1 and is 1.0"),
    ],
)  # fmt: skip
def test_careless_uses_give_a_sentence(
    script: str, argv: list[str], said: str,
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", [f"{script}.py"])
    for rank, expected in (("0", f"{script}.py: {said}\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            load(script).main(argv)
        assert capsys.readouterr().err == expected


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_text_can_be_learned_by_both(load: Callable[[str], ModuleType]) -> None:
    transformer = load("transformer")
    shape = transformer.Shape(layers=2, hidden=32, heads=2, vocabulary=40, words=12, dropout=0.0)
    for build, batch in ((transformer.gpt, transformer.next_words), (transformer.bert, transformer.masked_words)):
        torch.manual_seed(1)
        model, generator = build(shape), torch.Generator().manual_seed(1)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        losses = []
        for _ in range(120):
            optimizer.zero_grad()
            loss = model(*batch(16, shape, generator))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-20:]) / 20 < 0.75 * losses[0]


def test_a_decoder_sees_no_later_word_and_an_encoder_sees_all(load: Callable[[str], ModuleType]) -> None:
    transformer = load("transformer")
    shape = transformer.Shape(layers=2, hidden=16, heads=2, vocabulary=20, words=6, dropout=0.0)
    for build, sees in ((transformer.gpt, False), (transformer.bert, True)):
        model = build(shape)
        ids = torch.arange(6)[None]
        labels = torch.full((1, 6), -100)
        labels[0, 2] = 3
        before = model(ids, labels)
        ids[0, 5] = 9
        assert bool(model(ids, labels) != before) is sees
    ids, labels = transformer.masked_words(8, shape, torch.Generator().manual_seed(1))
    hidden = labels != -100
    assert torch.equal(ids == 19, hidden)
    assert 0 < hidden.float().mean() < 0.6
    assert (labels[hidden] < 19).all()


# - BERT


def test_all_modes_have_the_same_losses(tmp_path: Path) -> None:
    losses = {}
    for mode in ("none", "group_sharding", "communication_with_groups"):
        file = tmp_path / f"{mode}.json"
        result = _run(4, "train_bert.py", "--mode", mode, "--min_num_params", "1e3", "--json", file).check()
        assert f"{mode} on 4 ranks: 3 layers of 32" in result.output
        losses[mode] = json.loads(file.read_text())["losses"]
    assert len(losses["none"]) == 5
    assert len(set(losses["none"])) == 5
    for mode, found in losses.items():
        torch.testing.assert_close(found, losses["none"], rtol=1e-5, atol=0, msg=mode)


def test_groups_that_the_job_does_not_have_are_told_once() -> None:
    result = _run(2, "train_bert.py", "--mode", "group_sharding", "--nnodes", "3", "--nproc_per_node", "2")
    assert result.returncode != 0
    told = r"^train_bert.py: gen_fsdp_args\(nnodes=3, nproc_per_node=2\) in a job of 2: .* whose product is 2$"
    assert len(re.findall(told, result.output, re.MULTILINE)) == 1
    assert "Traceback" not in result.output


def test_large_is_berts_and_what_is_given_counts(load: Callable[[str], ModuleType]) -> None:
    arguments = load("train_bert").arguments
    large = arguments(["--large", "--seq_length", "128"])
    assert (large.num_hidden_layers, large.hidden_size, large.num_attention_heads) == (24, 1024, 16)
    assert (large.seq_length, large.lr, large.weight_decay, large.dropout) == (128, 1e-4, 0.01, 0.1)
    assert arguments(["--large"]).seq_length == 512


# - The shell scripts


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This checkout, but that nothing is set up."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    for each in ROOT.iterdir():
        if each.name != "scripts":
            (root / each.name).symlink_to(each)
    for each in (ROOT / "scripts").iterdir():
        if each.name != "setup.sh":
            (root / "scripts" / each.name).symlink_to(each)
    (root / "scripts" / "setup.sh").write_text("")
    return root


def _script(checkout: Path, name: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "hostfile": "none", "OMP_NUM_THREADS": "1", **variables}
    command = ["sh", f"scripts/script_{name}_training.sh", *argv]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_scripts_are_correct(name: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    script = ROOT / "scripts" / f"script_{name}_training.sh"
    done = subprocess.run(
        [shellcheck, "-x", "-P", "SCRIPTDIR", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_the_scripts_pass_on_what_they_are_told(checkout: Path) -> None:
    gpt2 = _script(checkout, "gpt2", "--profile", nworkers="1", PY="echo would run", device_memory_limit="900")
    assert gpt2.stdout.strip().endswith("examples/osdp/train.py --fsdp_type OSDP --device_memory_limit 900 --profile")
    bert = _script(checkout, "bert", nworkers="3", PY="echo would run", mode="group_sharding")
    lines = [
        line for line in bert.stdout.splitlines() if line.endswith("examples/osdp/train_bert.py --mode group_sharding")
    ]
    assert len(lines) == 3
    assert "nworkers should be a whole number" in _script(checkout, "bert", nworkers="none").stderr


@pytest.mark.full
def test_the_script_of_bert_trains(checkout: Path) -> None:
    done = _script(checkout, "bert", *TINY, nworkers="2", mode="group_sharding")
    assert done.returncode == 0, done.stderr
    assert "group_sharding on 2 ranks: 3 layers of 32" in done.stdout
