"""Which fragment a layer is in, and when its turn is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from co2.equations import SparseLoCo, StreamingDiLoCo
from co2.fragments.layers import fitting, fragments_of, layer_of
from co2.rounds_of_rules import schedule_of
from co2.rules import outer_rule
from co2.schedule import Event, StreamingSchedule

NAMES = ["embed.weight", *(f"h.{i}.{part}" for i in range(5) for part in ("attn.weight", "attn.bias")), "head.weight"]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("h.3.attn.q.weight", "h.3"),
        ("0.weight", "0"),
        ("features.0.1.bias", "features.0"),
        ("embed.weight", "embed"),
        ("model.norm.weight", "model.norm"),
        ("scale", ""),
        ("group0.3", "group0.3"),
    ],
)
def test_the_layer_of_a_parameter(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_fragments_are_strided_over_whole_layers() -> None:
    assert fragments_of(NAMES, 3) == [0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0]
    assert fragments_of(NAMES, 1) == [0] * 12
    assert fragments_of([*NAMES, "h.9.bias"], 3)[:12] == fragments_of(NAMES, 3), "what comes later moves nothing"


def test_fragments_of_three_layers_as_far_as_there_are_steps() -> None:
    assert fitting(NAMES, 100, 1) == 3  # of 7 layers
    assert fitting(NAMES, 100, 0) == 3
    assert fitting(NAMES, 5, 2) == 2
    assert fitting(NAMES, 2, 2) == fitting(["scale"], 9, 1) == 1


@pytest.mark.parametrize(("fragments", "frequency", "overlap"), [(1, 3, 3), (2, 6, 2), (3, 7, 2), (4, 4, 1), (2, 5, 0)])
def test_each_fragment_is_sent_once_a_round_and_applied_before_the_next_is_sent(
    fragments: int, frequency: int, overlap: int
) -> None:
    schedule = StreamingSchedule(frequency, fragments=fragments, overlap=overlap)
    turns = range(3 * fragments)
    sent = [schedule.sent_after(turn) for turn in turns]
    for fragment in range(fragments):
        steps = [step for turn, step in zip(turns, sent, strict=True) if schedule.fragment(turn) == fragment]
        assert [later - step for step, later in itertools.pairwise(steps)] == [frequency] * 2
    assert sent[fragments - 1] == frequency
    assert all(sent[turn] + schedule.overlap <= sent[turn + 1] for turn in turns[:-1])
    seen, in_round, turn = [], 0, 0
    for step in range(1, 3 * frequency + 1):
        in_round += 1
        if schedule.after(step, in_round, turn) is Event.ROUND:
            seen.append(step)
            in_round, turn = 0, turn + 1
    assert seen == sent


def test_warm_up_comes_before() -> None:
    schedule = StreamingSchedule(4, warmup=2, fragments=2, overlap=1)
    assert [schedule.after(step, 1) for step in (1, 2, 3)] == [Event.AVERAGE, Event.AVERAGE, Event.NOTHING]
    assert schedule.after(4, 2) is Event.ROUND


def test_what_does_not_fit_is_refused() -> None:
    rule = StreamingDiLoCo(fragments=4, overlap_steps=3)
    assert schedule_of(rule, 12, 0) == StreamingSchedule(12, fragments=4, overlap=3)
    with pytest.raises(ValueError, match=r"fragments=4 are sent one by one within outer_frequency=3 steps"):
        schedule_of(rule, 3, 0)
    with pytest.raises(
        ValueError, match=r"overlap_steps=3: 4 fragments in outer_frequency=11 steps leave 2 between two"
    ):
        schedule_of(rule, 11, 0)
    with pytest.raises(ValueError, match=r"overlap_steps=3"):
        schedule_of(replace(rule, fragments=None), 2, 0)
    with pytest.raises(
        ValueError, match=r"mixing=0 with overlap_steps=3, as many as outer_frequency: all that ranks learn"
    ):
        schedule_of(SparseLoCo(overlap_steps=3, mixing=0.0), 3, 0)
    assert schedule_of(SparseLoCo(overlap_steps=3), 3, 0).most == 3
    with pytest.raises(ValueError, match="outer_frequency should be a number of steps, at least 1"):
        schedule_of(rule, 0, 0)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("fragments", 0, "fragments should be a number of fragments, at least 1, and is 0"),
        ("overlap_steps", -1, "overlap_steps should be a number of steps, at least 0, and is -1"),
        ("bits", 5, "bits should be 8, 4 or None, for elements as they are, and is 5"),
        ("mixing", 1.0, "mixing should be at least 0 and below 1 and is 1.0"),
        ("outer_clip", 1.0, "outer_clip=1.0: outer='streaming-diloco' takes outer_lr and outer_momentum and fragments"),
    ],
)
def test_an_option_out_of_range_is_refused(option: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        outer_rule("streaming-diloco", {option: value})


def test_what_stays_of_own_values_is_half_where_there_are_steps_between() -> None:
    assert (StreamingDiLoCo().mixing, StreamingDiLoCo(overlap_steps=0).mixing) == (0.5, 0.0)
    assert (SparseLoCo().mixing, SparseLoCo(overlap_steps=2).mixing, SparseLoCo(mixing=0.25).mixing) == (0.0, 0.5, 0.25)


def test_options_of_fragments_are_its_own() -> None:
    with pytest.raises(ValueError, match="bits=8: outer='diloco' takes outer_lr and outer_momentum; leave it out"):
        outer_rule("diloco", {"bits": 8})
