"""Of planning while training goes on: when a planner looks, what all ranks decide, and what is said about it."""

from __future__ import annotations

from tests.mutations import plan_pure
from tests.mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

_PLANNING = "overlap/optimizer/planning.py"
_DECISION = "overlap/optimizer/decision.py"
_EXPLAIN = "overlap/optimizer/explain.py"
_LAYER_TIMES = "overlap/optimizer/layer_times.py"

MUTATIONS: list[Mutation] = [
    # - A planner, from step to step
    Mutation(
        promise="the pause is over after a changed plan",
        file=_PLANNING,
        old="self.checked, self._pause = seconds, _PAUSE",
        new="self.checked = seconds",
        test="tests/overlap/optimizer/test_planning.py::test_looks_come_less_often_until_one_changes_the_plan",
    ),
    Mutation(
        promise="a plan that is taken back does not end the pause",
        file=_PLANNING,
        old="self._earlier = self._strategy\n            self._replan",
        new="self._earlier, self._pause = self._strategy, _PAUSE\n            self._replan",
        test="tests/overlap/optimizer/test_planning.py::test_looks_come_less_often_until_one_changes_the_plan",
    ),
    Mutation(
        promise="nothing is wanted any more once a script replans",
        file=_PLANNING,
        old="        self._stop_measuring()\n        self._news.forget()\n",
        new="        self._stop_measuring()\n",
        test="tests/overlap/optimizer/test_planning.py::test_a_script_that_replans_after_rank_0_has_said_something_is_told_no_more",
    ),
    Mutation(
        promise="steps are looked at again after a look",
        file="overlap/features/replanning.py",
        old='every step."""\n        self.wanted = self.heard = False',
        new='every step."""\n        self.wanted = False',
        test="tests/overlap/optimizer/test_planning.py::test_looks_come_less_often_until_one_changes_the_plan",
    ),
    Mutation(
        promise="a script that replans while steps are measured ends that",
        file=_PLANNING,
        old="        self._stop_measuring()\n        self._news.forget()\n",
        new="        self._news.forget()\n",
        test="tests/overlap/optimizer/test_planning.py::test_a_script_that_replans_ends_the_planning",
    ),
    Mutation(
        promise="rank 0's clock says whether a new plan is slower",
        file=_PLANNING,
        old="self._checked_at = seconds = agree(self._comm, statistics.median(self._seconds))",
        new="self._checked_at = seconds = statistics.median(self._seconds)",
        test="mpi-2 tests/spmd/test_planning.py::test_a_plan_that_turns_out_slower_is_taken_back",
    ),
    Mutation(
        promise="rank 0's clock says whether everything has become slower",
        file=_PLANNING,
        old="again = agree(self._comm, statistics.median(self._seconds))",
        new="again = statistics.median(self._seconds)",
        test="mpi-2 tests/spmd/test_planning.py::test_a_plan_stays_where_everything_has_become_slower",
    ),
    Mutation(
        promise="rank 0's clock says whether steps have changed",
        file=_PLANNING,
        old="if agree(self._comm, self._changed):",
        new="if self._changed:",
        test="mpi-2 tests/spmd/test_planning.py::test_steps_that_become_longer_are_measured_again",
    ),
    Mutation(
        promise="a look that changes nothing doubles the pause",
        file=_PLANNING,
        old="self._pause = min(2 * self._pause, _LONGEST_PAUSE)",
        new="self._pause = min(self._pause, _LONGEST_PAUSE)",
        test="tests/overlap/optimizer/test_planning.py::test_looks_come_less_often_until_one_changes_the_plan",
    ),
    Mutation(
        promise="steps that become shorter are measured again, too",
        file=_PLANNING,
        old="return not 1 / _CHANGED < ratio < _CHANGED",
        new="return ratio > _CHANGED",
        test="tests/overlap/optimizer/test_planning.py::test_steps_that_become_longer_or_shorter_are_measured_again",
    ),
    Mutation(
        promise="what is usual is what steps take with the new plan",
        file=_PLANNING,
        old="        self._settle(optimizer, seconds)\n\n    # - Afterwards",
        new="        self._settle(optimizer, before)\n\n    # - Afterwards",
        test="tests/overlap/optimizer/test_planning.py::test_what_is_usual_is_what_steps_take_with_the_new_plan",
    ),
    Mutation(
        promise="seconds of one phase do not count in the next one",
        file=_PLANNING,
        old="        self._phase, self._steps = to, 0\n        self._seconds.clear()",
        new="        self._phase, self._steps = to, 0",
        test="tests/overlap/optimizer/test_planning.py::test_what_is_usual_is_what_steps_take_with_the_new_plan",
    ),
    Mutation(
        promise="a clock that has measured is taken away",
        file=_PLANNING,
        old="            self._engine.measure(None)",
        new="            pass",
        test="tests/overlap/optimizer/test_planning.py::test_what_has_measured_is_taken_away",
    ),
    Mutation(
        promise="the hook in front of step() is taken away",
        file=_PLANNING,
        old="            self._handle.remove()\n",
        new="",
        test="tests/overlap/optimizer/test_planning.py::test_what_has_measured_is_taken_away",
    ),
    Mutation(
        promise="a plan is not looked at again where a search follows it",
        file=_PLANNING,
        old="        if not self._follow:\n            return\n",
        new="",
        test="tests/overlap/optimizer/test_planning.py::test_a_plan_that_a_search_follows_is_not_looked_at_again",
    ),
    Mutation(
        promise="steps of another optimizer around the same one do not count",
        file=_PLANNING,
        old="if self._mine is None or self._mine() is not optimizer or self._phase is Phase.ENDED:",
        new="if self._phase is Phase.ENDED:",
        test="tests/overlap/optimizer/test_planning.py::test_steps_of_another_optimizer_do_not_count",
    ),
    Mutation(
        promise="explain() counts updates to the work of the training thread",
        file=_PLANNING,
        old="times.handling * len(plan.buckets) + times.update * shards",
        new="times.handling * len(plan.buckets)",
        test="tests/overlap/optimizer/test_planning.py::test_what_is_not_hidden_is_hooks_operations_and_updates",
    ),
    Mutation(
        promise="a new look at an unchanged plan forgets what was checked before",
        file=_PLANNING,
        old="self.report, self.checked, self._units = report, None, self._engine.planner.units",
        new="self.report, self._units = report, self._engine.planner.units",
        test="tests/overlap/optimizer/test_planning.py::test_what_is_usual_is_what_steps_take_with_the_new_plan",
    ),
    # - What all ranks decide from what each has measured
    Mutation(
        promise="the rank that computes longest is the one that is simulated",
        file=_DECISION,
        old="slowest = max(range(len(computed))",
        new="slowest = min(range(len(computed))",
        test="mpi-2 tests/spmd/test_decision.py::test_the_rank_that_computes_longest_is_simulated",
    ),
    Mutation(
        promise="what an operation takes is the least of all ranks",
        file=_DECISION,
        old="ReduceOp.MIN",
        new="ReduceOp.MAX",
        test="mpi-2 tests/spmd/test_decision.py::test_what_an_operation_takes_is_the_least_of_all_ranks",
    ),
    Mutation(
        promise="a plan that gains next to nothing is not taken",
        file=_DECISION,
        old="worth = choice.seconds < _GAIN * choice.before",
        new="worth = choice.seconds < choice.before",
        test="mpi-2 tests/spmd/test_decision.py::test_a_plan_that_gains_next_to_nothing_is_not_taken",
    ),
    Mutation(
        promise="the rank with the least memory decides what fits",
        file=_DECISION,
        old="min(each[3] for each in told)",
        new="max(each[3] for each in told)",
        test="mpi-2 tests/spmd/test_decision.py::test_the_rank_with_the_least_memory_decides_what_fits",
    ),
    Mutation(
        promise="whole buckets need memory for their state",
        file=_DECISION,
        old="whole = sum(_nbytes(bucket, engine) for bucket, sharded in buckets if not sharded)",
        new="whole = sum(_nbytes(bucket, engine) for bucket, sharded in buckets if sharded)",
        test="mpi-2 tests/spmd/test_decision.py::test_the_rank_with_the_least_memory_decides_what_fits",
    ),
    Mutation(
        promise="costs of an update are those of the shard that this rank owns",
        file=_DECISION,
        old="bucket.shares[rank] * bucket.gradients.element_size()",
        new="bucket.shares[0] * bucket.gradients.element_size()",
        test="mpi-2 tests/spmd/test_decision.py::test_what_a_rank_updates_is_its_own_shard",
    ),
    Mutation(
        promise="all ranks wait for a search no longer than for a step, but a third of a second",
        file=_DECISION,
        old="max(_LEAST_PATIENCE, step)",
        new="min(_LEAST_PATIENCE, step)",
        test="tests/overlap/optimizer/test_decision.py",
    ),
    Mutation(
        promise="layers of buckets are those of the simulated work",
        file=_DECISION,
        old="job = Job(work, network, engine.planner.specs, layers_of(units, behind=1))",
        new="job = Job(work, network, engine.planner.specs, layers_of(units))",
        test="mpi-2 tests/spmd/test_planning.py::test_layers_are_measured_in_their_order",
    ),
    # - What explain() says
    Mutation(
        promise="the bound is the longer one of computation and wire",
        file=_EXPLAIN,
        old="bound, run = max(compute, wire)",
        new="bound, run = min(compute, wire)",
        test="tests/overlap/optimizer/test_explain.py::test_the_bound_is_the_longer_one_of_wire_and_computation",
    ),
    Mutation(
        promise="a rank without a batch does not make others look late",
        file=_EXPLAIN,
        old="known = [seconds for seconds in computed if seconds]",
        new="known = list(computed)",
        test="tests/overlap/optimizer/test_explain.py::test_late_ranks_are_named",
    ),
    Mutation(
        promise="the longest waits are named",
        file=_EXPLAIN,
        old="key=lambda item: -item[1])[:_LONGEST]",
        new="key=lambda item: item[1])[:_LONGEST]",
        test="tests/overlap/optimizer/test_explain.py::test_the_longest_waits_are_named",
    ),
    Mutation(
        promise="compression halves what is reduced, and not what is gathered",
        file=_EXPLAIN,
        old='(work, replace(network, reduce=network.reduce / 2)),\n        "a network',
        new='(work, replace(network, gather=network.gather / 2)),\n        "a network',
        test="tests/overlap/optimizer/test_explain.py::test_what_would_help_is_simulated",
    ),
    Mutation(
        promise="what hardly helps is not said to help",
        file=_EXPLAIN,
        old="if seconds < _WORTH * step]",
        new="if seconds <= step]",
        test="tests/overlap/optimizer/test_explain.py::test_what_hardly_helps_is_not_said_to_help",
    ),
    Mutation(
        promise="a step that takes longer than its simulation is remarked upon",
        file=_EXPLAIN,
        old="if measured > _SIMULATED * run.step:",
        new="if measured < _SIMULATED * run.step:",
        test="tests/overlap/optimizer/test_explain.py::test_a_step_that_is_longer_than_simulated_is_remarked_upon",
    ),
    Mutation(
        promise="all lanes are drawn",
        file=_EXPLAIN,
        old="if name.startswith(kind)",
        new="if name == kind",
        test="tests/overlap/optimizer/test_explain.py::test_a_picture_has_a_row_for_each_lane",
    ),
    # - How long layers take
    Mutation(
        promise="no hook is left on the model once a profile is written",
        file=_LAYER_TIMES,
        old="        self._times.remove()\n",
        new="",
        test="tests/overlap/optimizer/test_layer_times.py::test_no_hook_is_left_once_a_profile_is_written",
    ),
    Mutation(
        promise="the step that warms up is not in a profile",
        file=_LAYER_TIMES,
        old="        if self._warm:\n",
        new="        if True:\n",
        test="mpi-2 tests/spmd/test_layer_times.py::test_layers_are_measured_without_what_they_wait_for",
    ),
    Mutation(
        promise="of several passes in a step the last one is in a profile",
        file=_LAYER_TIMES,
        old="if self._first in (None, name):",
        new="if self._first is None:",
        test="tests/overlap/optimizer/test_layer_times.py::test_of_several_passes_in_a_step_the_last_one_counts",
    ),
    Mutation(
        promise="a weight that two layers share counts once",
        file=_LAYER_TIMES,
        old="            seen.update(id(parameter) for parameter in owned)\n",
        new="",
        test="tests/overlap/optimizer/test_layer_times.py::test_a_weight_that_two_layers_share_counts_once",
    ),
    *plan_pure.MUTATIONS,
]
