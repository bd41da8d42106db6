"""The comparison with Horovod, but for Horovod: what counts as equal, and what is documented."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.compare_horovod import scripts
from tests.compare_horovod.__main__ import main
from tests.compare_horovod.calls import GROUPS
from tests.compare_horovod.documented import DIFFERENCES, documented
from tests.compare_horovod.job import accounted
from tests.compare_horovod.judgement import Difference, Finding, Sighting, Verdict, explain, judge, report
from tests.compare_horovod.outcome import Kind, Likeness, Outcome, alike
from tests.compare_horovod.signature import follows, names
from tests.harness import ROOT

ONE_ULP = torch.tensor([1.0, 2.0]).nextafter(torch.tensor(9.0))


def _value(value: object) -> Outcome:
    return Outcome.of_value(value)


def _raised(error: BaseException) -> Outcome:
    return Outcome.of_exception(error)


@pytest.mark.parametrize(
    ("theirs", "ours", "likeness"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), Likeness.EQUAL),
        (torch.tensor([1.0, 2.0]), ONE_ULP, Likeness.ROUNDED),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), Likeness.DIFFERENT),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, 3e38]), Likeness.DIFFERENT),
        (torch.tensor([0.0]), torch.tensor([-0.0]), Likeness.ROUNDED),
        (torch.tensor([1.0]), torch.tensor([1.0]).double(), Likeness.DIFFERENT),
        (torch.ones(2, 1), torch.ones(1, 2), Likeness.DIFFERENT),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), Likeness.DIFFERENT),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), Likeness.EQUAL),
        ([torch.ones(1)], (torch.ones(1),), Likeness.DIFFERENT),
        ({"a": [1, 0.5]}, {"a": [1, 0.5]}, Likeness.EQUAL),
        (True, 1, Likeness.DIFFERENT),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), Likeness.EQUAL),
        (torch.eye(2).to_sparse(), torch.eye(2), Likeness.DIFFERENT),
    ],
)
def test_values_are_compared_to_the_bit_then_to_rounding(theirs: object, ours: object, likeness: Likeness) -> None:
    written = Outcome.from_json(_value(theirs).to_json())
    assert alike(written, _value(ours)) is likeness


def test_an_exception_is_alike_where_who_catches_theirs_catches_ours() -> None:
    class Both(RuntimeError, ValueError):
        pass

    assert alike(_raised(ValueError("a")), _raised(Both("b"))) is Likeness.EQUAL
    assert alike(_raised(Both("a")), _raised(ValueError("b"))) is Likeness.DIFFERENT
    assert alike(_raised(ValueError("a")), _value(1)) is Likeness.DIFFERENT


DIFFERENCE = Difference("sign", "…", (Sighting("group/minus *", "float", "ValueError: .*negative"),))


def test_a_difference_is_documented_only_where_every_rank_answers_as_it_says() -> None:
    value, negative, other = _value(torch.ones(1)), _raised(ValueError("negative")), _raised(ValueError("other"))

    def verdict(subject: str, theirs: list[Outcome], ours: list[Outcome]) -> tuple[Verdict, str | None]:
        found = judge("part", subject, theirs, ours, [DIFFERENCE])
        return found.verdict, found.difference

    assert verdict("group/minus one", [value] * 2, [value, negative]) == (Verdict.DOCUMENTED, "sign")
    assert verdict("group/minus one", [value] * 2, [other, negative]) == (Verdict.UNDOCUMENTED, None)
    assert verdict("group/plus one", [value] * 2, [negative] * 2) == (Verdict.UNDOCUMENTED, None)
    assert verdict("group/plus one", [value] * 2, [value] * 2) == (Verdict.EQUAL, None)


def test_a_difference_of_one_rank_excuses_no_other() -> None:
    alone = Difference("alone", "…", (Sighting("a/b", ranks=(1,)),))
    for ranks, expected in ((1, Verdict.DOCUMENTED), (2, Verdict.UNDOCUMENTED)):
        assert judge("part", "a/b", [_value(1)] * ranks, [_value(2)] * ranks, [alone]).verdict is expected


Answers = tuple[str, int, object, object]  # subject, ranks, theirs, ours


def _loss(model: torch.nn.Module, scale: float) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 2) * scale).square().mean()
    return loss


def _average(gradients: torch.Tensor) -> torch.Tensor:
    return gradients.mean(0)


def _rounded_once(gradients: torch.Tensor) -> torch.Tensor:
    return gradients.half().float().mean(0).half()


def _rounded_in_pairs(gradients: torch.Tensor) -> torch.Tensor:
    first, second, third, fourth = gradients.half()
    return ((first + second) + (third + fourth)) / 4


def _stepped(
    *steps: tuple[float, ...], reduced: Callable[[torch.Tensor], torch.Tensor] = _average, loss_at: float = 1.0
) -> list[torch.Tensor]:
    """A loss, and the model of `calls/optimizer.py` after steps by what is made of its gradients at some scales."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    loss = _loss(model, loss_at).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for scales in steps:
        gradients = [torch.autograd.grad(_loss(model, scale), [*model.parameters()]) for scale in scales]
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = reduced(torch.stack(each)).float()
        optimizer.step()
    return [loss, *(parameter.detach() for parameter in model.parameters())]


def _closures(ranks: int) -> Iterator[Answers]:
    scales = tuple(1.0 + rank for rank in range(ranks))
    averaged, added = _stepped(scales)[1:], _stepped(scales[:2], reduced=lambda gradients: gradients.sum(0))
    for scale in scales:
        loss, weight, bias = _stepped((scale,), loss_at=scale)
        for theirs in (bias, added[2], averaged[1]):
            yield "optimizer/closure", ranks, [loss, [weight, theirs]], [loss, averaged]


def _numbers() -> Iterator[Answers]:
    """Answers with numbers as they are by definition."""

    def row(*numbers: float) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32)

    _, weight, bias = _stepped()
    moved = weight - 0.1 * (1 + 0.1 * weight)
    twice = _stepped((1.0,), reduced=lambda gradients: 2 * gradients[0])[1:]
    for ranks in (2, 4):
        yield "join/Min", ranks, [[row(1), row(0)], True], [[row(1), row(2)], True]
        yield from _closures(ranks)
        yield "optimizer/bias unused", ranks, [None, [moved, bias * 0.99]], [None, [moved, bias]]
        refused = (
            AssertionError("optimizer.zero_grad() was called"),
            AssertionError("Gradients were computed more than"),
        )
        yield "optimizer/zero_grad before step", ranks, refused[0], [None, [weight, bias]]
        yield "optimizer/a pass too many", ranks, refused[1], [None, twice]
    for ranks in (1, 2, 4):
        averaged = _stepped(tuple(1.0 + rank for rank in range(ranks)))[1:]
        yield "optimizer/synchronize without skip_synchronize", ranks, [1, averaged], [0, averaged]
    both_steps = [tuple(0.5 + rank + step for rank in range(4)) for step in range(2)]
    in_pairs, once = (_stepped(*both_steps, reduced=each)[1:] for each in (_rounded_in_pairs, _rounded_once))
    yield "optimizer/compression=fp16", 4, in_pairs, once
    whole, halves = (_stepped((0.5,), (1.5,), reduced=each)[1:] for each in (_average, _rounded_once))
    yield "optimizer/compression=fp16", 1, whole, halves


def _with_one_changed(line: str) -> Iterator[str]:
    for number in re.finditer(r"-?\d+\.\d+", line):
        yield f"{line[: number.start()]}{float(number[0]) + 1e-5}{line[number.end() :]}"


def test_a_documented_difference_has_the_numbers_of_its_definition_and_no_others() -> None:
    for subject, ranks, theirs, ours in _numbers():
        one = str(_raised(theirs) if isinstance(theirs, Exception) else _value(theirs))
        other = str(_value(ours))
        assert explain(DIFFERENCES, subject, [(one, other)], ranks), (subject, ranks, one, other)
        wrong = [(line, other) for line in _with_one_changed(one)] + [(one, line) for line in _with_one_changed(other)]
        assert wrong
        for pair in wrong:
            assert explain(DIFFERENCES, subject, [pair], ranks) is None, (subject, ranks, *pair)


def test_a_silent_horovod_is_told_apart_and_our_silence_is_a_difference() -> None:
    value, hung, crashed = _value(1), Outcome(Kind.HUNG), Outcome(Kind.CRASHED)
    assert judge("part", "a/b", [value, crashed], [value, value], []).verdict is Verdict.STOPPED
    assert judge("part", "a/b", [value, value], [value, hung], []).verdict is Verdict.UNDOCUMENTED
    assert judge("part", "a/b", [hung, hung], [hung, value], []).verdict is Verdict.UNDOCUMENTED
    assert judge("part", "a/b", [hung], [hung], []).verdict is Verdict.EQUAL


def test_a_call_that_stops_its_job_costs_nobody_elses_outcome() -> None:
    value, hung = _value(1), Outcome(Kind.HUNG)
    missing = accounted([[value, value], [value]], 0, 4, ended=True)
    assert missing == (2, {1: Kind.CRASHED})  # rank 1 died in its second call; the next job begins with the third
    assert accounted([[value, hung], [value]], 0, 4, ended=True) == (2, {1: Kind.HUNG})
    assert accounted([[value, hung], [value, hung]], 0, 4, ended=True) == (2, {})
    assert accounted([[value], [value]], 1, 4, ended=False) == (2, {0: Kind.HUNG, 1: Kind.HUNG})
    assert accounted([[value] * 4] * 2, 1, 4, ended=True) == (4, {})


@pytest.mark.parametrize(
    ("theirs", "ours", "same"),
    [
        ("(a, b=None)", "(a, b=None)", True),
        ("(a, b=None)", "(a, b=None, c=1, keyword d=2)", True),
        ("(a, b=None)", "(a, b=None, c)", False),
        ("(a, b=None)", "(b=None, a)", False),
        ("(a, b=None)", "(a, b=1)", False),
        ("(*args, **kwargs)", "(comm=None, process_sets=None)", True),
        ("(a)", "absent", False),
        ("constant", "constant", True),
    ],
)
def test_signatures_begin_with_theirs(theirs: str, ours: str, same: bool) -> None:
    assert follows(theirs, ours) is same


def test_names_are_read_with_their_defaults() -> None:
    import dear

    found = names(dear)
    assert found["reducescatter"].startswith(
        "(tensor, name=None, compression=Compression.none, op=Average, process_set="
    )
    assert found["Compression.fp16"] == "class"
    assert found["Sum"] == "constant"


def test_scripts_differ_from_the_examples_in_their_import_alone() -> None:
    for script in scripts.SCRIPTS:
        source = (ROOT / "examples" / script.file).read_text()
        theirs = scripts.with_import(source, "horovod.torch")
        assert [line for line in theirs.splitlines() if line not in source.splitlines()] == [
            "import horovod.torch as hvd"
        ]
    with pytest.raises(ValueError, match="0 times"):
        scripts.with_import("import torch", "horovod.torch")


def test_scripts_are_compared_by_what_they_print() -> None:
    assert scripts.compare("loss 0.5 accuracy 91.00%", "loss 0.5 accuracy 91.00%") is Likeness.EQUAL
    assert scripts.compare("loss 0.5 accuracy 91.00%", "loss 0.504 accuracy 90.00%") is Likeness.ROUNDED
    assert scripts.compare("loss 0.5", "loss 0.6") is Likeness.DIFFERENT
    assert scripts.compare("loss 0.5", "loss nan") is Likeness.DIFFERENT
    assert scripts.compare("loss 0.5", "loss 0.5 loss 0.4") is Likeness.DIFFERENT
    assert scripts.compare("failed: x", "failed: x") is Likeness.DIFFERENT
    assert scripts.compare("", "") is Likeness.DIFFERENT


def test_the_report_counts_and_names() -> None:
    findings = [
        Finding("types, 2 ranks", "types/a", Verdict.EQUAL),
        Finding("types, 2 ranks", "types/b", Verdict.DOCUMENTED, "sign", (("1", "2"),)),
        Finding("types, 2 ranks", "types/c", Verdict.STOPPED, None, (("hung", "3"),)),
        Finding("join, 2 ranks", "join/d", Verdict.UNDOCUMENTED, None, (("4", "5"),)),
    ]
    text = report(findings, [DIFFERENCE, Difference("never", "…", ())], "wfbp")
    assert re.search(r"^types, 2 ranks +3 +1 +- +1 +1 +-$", text, re.MULTILINE)
    assert re.search(r"^all +4 +1 +- +1 +1 +1$", text, re.MULTILINE)
    assert "documented and not seen: never" in text
    assert "Horovod  hung" in text.partition("Horovod crashed or hung here; wfbp answers:")[2]
    assert "wfbp     5" in text.partition("different, and not documented:")[2]


def test_both_tables_of_the_page_name_the_same_differences() -> None:
    table = (ROOT / "docs" / "horovod.md").read_text().partition("| names | how they are supported | what differs |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row.strip("|").split(" | ")[2])]
    assert sorted(named) == sorted(difference.name for difference in DIFFERENCES)
    assert documented() in (ROOT / "docs" / "horovod.md").read_text()


def test_every_sighting_is_of_a_call_that_is_made() -> None:
    subjects = {f"{group.name}/{call}" for group in GROUPS.values() for call in group.calls}
    subjects |= {f"scripts/{script.name}" for script in scripts.SCRIPTS}
    for difference in DIFFERENCES:
        for sighting in difference.sightings:
            if not sighting.subject.startswith("signatures/"):
                made = any(Sighting(sighting.subject).fits(each, "", "", 1) for each in subjects)
                assert made, f"{difference.name}: no call is called {sighting.subject}"


@pytest.mark.parametrize(
    "asked", [["--package", "co2", "--only", "optimizer"], ["--only", "process sets", "--ranks", "1"]]
)
def test_a_comparison_of_nothing_did_not_succeed(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.28.1")
    assert main(asked) == 2
    assert "nothing was compared" in capsys.readouterr().err
