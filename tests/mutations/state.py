"""The state of an optimizer."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

MUTATIONS: list[Mutation] = [
    Mutation(
        "an optimizer that builds a graph through whole parameters is not applied to slices",
        "overlap/state/elementwise.py",
        "return base_of(optimizer) in _ELEMENTWISE and not _differentiable(optimizer)",
        "return base_of(optimizer) in _ELEMENTWISE",
        "tests/overlap/state/test_elementwise.py -k graph",
    ),
    Mutation(
        "a state dict that was loaded may be changed afterwards",
        "overlap/state/full_state.py",
        "                state = _cloned(self._optimizer.state.get(slot.param, {}))",
        "                state = dict(self._optimizer.state.get(slot.param, {}))",
        "mpi-2 tests/spmd/test_state.py -k may_be_changed and dear-rb",
    ),
    Mutation(
        "a state dict that was given out may be changed",
        "overlap/state/full_state.py",
        "            full = {engine.slots[index].param: _cloned(state) for index, state in loaded.items()}",
        "            full = {engine.slots[index].param: dict(state) for index, state in loaded.items()}",
        "mpi-2 tests/spmd/test_state.py -k may_be_changed and dear-rb",
    ),
    Mutation(
        "what was loaded first is forgotten when another state is loaded",
        "overlap/state/shard_state.py",
        "        self.loaded.clear()\n",
        "",
        "mpi-2 tests/spmd/test_gather_dtype.py -k two_states",
    ),
    Mutation(
        "the count of steps of a parameter that is one number stays a number",
        "overlap/state/pieces.py",
        "        if key in SCALAR_STATE or value.shape != param.shape:",
        "        if value.shape != param.shape:",
        "tests/overlap/state/test_pieces.py -k put_together",
    ),
    Mutation(
        "what a script writes to the state is moved along by a new plan",
        "overlap/state/shard_state.py",
        "        self.share.take_over()\n",
        "",
        "mpi-2 tests/spmd/test_state_from_outside.py -k new_plan and layerwise",
    ),
    Mutation(
        "a state dict has what scripts have written since the last update",
        "overlap/state/full_state.py",
        "        self.rows.over(full)\n",
        "",
        "mpi-2 tests/spmd/test_state_from_outside.py -k keeps_is_as_it_is and layerwise",
    ),
    Mutation(
        "a row of the state that was kept for some steps is as it is now",
        "overlap/state/rows.py",
        "                row.stale = True",
        "                row.stale = False",
        "mpi-2 tests/spmd/test_state_from_outside.py -k keeps_is_as_it_is and layerwise",
    ),
    Mutation(
        "who loads twice gives others the state from before both",
        "overlap/state/share.py",
        "            if self._before is None:\n                self._before = self._export(None)",
        "            self._before = self._export(None)",
        "tests/overlap/state/test_share.py -k loads_twice",
    ),
    Mutation(
        "an update before step() does not count as a step",
        "overlap/state/share.py",
        "            yield\n\n    @contextmanager\n    def loading",
        "            yield\n            self._steps += 1\n\n    @contextmanager\n    def loading",
        "tests/overlap/state/test_share.py -k is_no_step",
    ),
    Mutation(
        "exact values that are not known are no part of a state dict",
        "overlap/state/masters.py",
        "return {param: value for param, value in masters.items() if not bool(torch.isnan(value).any())}",
        "return masters",
        "tests/overlap/state/test_masters.py -k not_known",
    ),
    Mutation(
        "state moves along where a new plan has all ranks update a parameter",
        "overlap/state/reshard.py",
        "            if slot.bucket is not None and not slot.bucket.sharded:",
        "            if False:",
        "mpi-2 tests/spmd/test_planning.py::test_results_are_those_of_one_process_while_buckets_change[sgd]",
    ),
]
