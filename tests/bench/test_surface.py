"""The comparison with Horovod, but for Horovod: what counts as equal, and what is documented."""

from __future__ import annotations

import re

import pytest
import torch

from bench.surface import scripts
from bench.surface.calls import GROUPS
from bench.surface.difference import Difference, Sighting
from bench.surface.documented import DIFFERENCES, documented
from bench.surface.job import accounted
from bench.surface.judgement import Finding, Verdict, judge
from bench.surface.likeness import Likeness, alike
from bench.surface.outcome import Kind, Outcome
from bench.surface.report import report
from bench.surface.signature import follows, names
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


def test_readme_and_documentation_name_the_same_differences() -> None:
    table = (ROOT / "README.md").read_text().partition("| names | how they are supported | what differs |")[2]
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
