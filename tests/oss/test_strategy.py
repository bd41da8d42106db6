"""The settings between which a planner chooses."""

from __future__ import annotations

from oss.optimizer import Oss
from overlap.plan.simulation.methods import SIZES_MB


def test_a_setting_that_is_tried_leaves_the_present_one_as_it_is() -> None:
    present = Oss(3.0, None, None, auto=True)
    assert [other.threshold_mb for other in present.candidates] == list(SIZES_MB)
    assert all(other.setting != present.setting for other in present.neighbours)
    assert present.setting == present.planned == {"threshold_mb": 3.0}


def test_what_a_user_has_chosen_is_not_planned() -> None:
    chosen = Oss(3.0, None, None)
    assert chosen.setting == {"threshold_mb": 3.0}
    assert [*chosen.planned, *chosen.candidates, *chosen.neighbours] == []
