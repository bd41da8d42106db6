"""Of the pure part of planning: times, buckets, simulations, and the rules of MG-WFBP and ByteScheduler."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

_MEASUREMENT = "overlap/plan/measurement.py"
_SCHEDULES = "overlap/plan/simulation/schedules.py"
_METHODS = "overlap/plan/simulation/methods.py"

MUTATIONS: list[Mutation] = [
    # - From stamps to times
    Mutation(
        promise="the larger half of operations is what the pace of a network is fitted to",
        file=_MEASUREMENT,
        old=" for nbytes, took, _ in known if nbytes >= middle)",
        new=" for nbytes, took, _ in known)",
        test="tests/overlap/plan/test_measurement.py::test_the_pace_is_that_of_the_larger_operations",
    ),
    Mutation(
        promise="waiting for a reduction is no cost of an update",
        file=_MEASUREMENT,
        old="gap = one.issued - max(before.issued, reduced[one.bucket])",
        new="gap = one.issued - before.issued",
        test="tests/overlap/plan/test_measurement.py::test_waiting_for_a_reduction_is_no_cost_of_an_update",
    ),
    Mutation(
        promise="an all-reduce starts twice",
        file=_MEASUREMENT,
        old="flows = begun[place] + start * one.halves",
        new="flows = begun[place] + start",
        test="tests/overlap/plan/test_measurement.py::test_operations_share_the_links_and_what_they_cannot_fill",
    ),
    Mutation(
        promise="waits between forward and backward are not computation",
        file=_MEASUREMENT,
        old="found.between = before_backward - end - _overlap(lap.waits, end, before_backward)",
        new="found.between = before_backward - end",
        test="tests/overlap/plan/test_measurement.py::test_waits_between_forward_and_backward_are_no_computation",
    ),
    Mutation(
        promise="issuing a bucket inside a hook is counted once",
        file=_MEASUREMENT,
        old="hooks -= min(hooks / 2, issuing)",
        new="hooks -= 0",
        test="tests/overlap/plan/test_measurement.py::test_issuing_a_bucket_in_a_hook_counts_once",
    ),
    Mutation(
        promise="a workload has what the thread takes to update and to handle buckets",
        file=_MEASUREMENT,
        old="Costs(0.0, times.handling, times.update)",
        new="Costs(0.0, times.update, times.handling)",
        test="tests/overlap/plan/test_measurement.py::test_issuing_a_bucket_in_a_hook_counts_once",
    ),
    # - Which setting is chosen
    Mutation(
        promise="settings of the same buckets that travel otherwise are tried",
        file="overlap/plan/choice.py",
        old="key = plan, strategy.conduct",
        new="key = plan",
        test="tests/overlap/plan/test_choice.py::test_settings_of_the_same_buckets_that_travel_otherwise_are_tried",
    ),
    Mutation(
        promise="of settings that are as fast, the one that costs less is chosen",
        file="overlap/plan/choice.py",
        old="return min(same, key=lambda one: one[1].burden)",
        new="return max(same, key=lambda one: one[1].burden)",
        test="tests/overlap/plan/test_choice.py::test_buckets_are_all_reduced_where_forward_is_too_short_and_backward_is_not",
    ),
    Mutation(
        promise="shares of owners are simulated in bytes",
        file="overlap/plan/choice.py",
        old="tuple(numel * size for numel in spec.counts)",
        new="tuple(spec.counts)",
        test="tests/overlap/plan/test_choice.py::test_buckets_are_simulated_nearest_the_input_first_with_the_bytes_of_each_rank",
    ),
    Mutation(
        promise="a plan that is in force may stay although it does not fit",
        file="overlap/plan/choice.py",
        old="if key not in runs and (strategy is current or fits(plan)):",
        new="if key not in runs and fits(plan):",
        test="tests/overlap/plan/test_choice.py::test_a_plan_that_is_in_force_may_stay_although_it_does_not_fit",
    ),
    Mutation(
        promise="what is not sharded is simulated as all-reduced",
        file="overlap/plan/choice.py",
        old="        if not sharded:\n",
        new="        if sharded:\n",
        test="tests/overlap/plan/test_choice.py::test_buckets_are_simulated_nearest_the_input_first_with_the_bytes_of_each_rank",
    ),
    # - Buckets
    Mutation(
        promise="a group is issued once its last gradient is there",
        file="overlap/plan/groups.py",
        old="buckets.sort(key=lambda pair: max(",
        new="buckets.sort(key=lambda pair: min(",
        test="tests/overlap/plan/test_groups.py",
    ),
    Mutation(
        promise="frozen parameters do not make buckets larger",
        file="overlap/plan/fusion.py",
        old=" if param.requires_grad and not is_lazy(param)]",
        new=" if not is_lazy(param)]",
        test="tests/dear/test_schedule.py::test_a_model_is_as_large_as_what_is_trained_of_it",
    ),
    Mutation(
        promise="idle parameters are issued last",
        file="overlap/plan/fusion.py",
        old="for units in (idle, used):",
        new="for units in (used, idle):",
        test="tests/dear/test_schedule.py::test_idle_parameters_do_not_keep_their_neighbours_waiting",
    ),
    Mutation(
        promise="a bucket stays below its threshold",
        file="overlap/plan/partition.py",
        old="held + nbytes >= threshold_bytes",
        new="held >= threshold_bytes",
        test="tests/overlap/plan/test_partition.py::test_greedy_fusion",
    ),
    Mutation(
        promise="the shards of owners begin on a boundary",
        file="overlap/plan/partition.py",
        old="counts.append(round_up(max(end - start, 1), step) if mine else 0)",
        new="counts.append(max(end - start, 1) if mine else 0)",
        test="tests/overlap/plan/test_partition.py::test_no_tensor_with_an_owner_is_cut",
    ),
    Mutation(
        promise="too many early updates become fewer, one at least",
        file="overlap/plan/early.py",
        old="planned - max(1, (planned - possible) // 8)",
        new="planned - (planned - possible) // 8",
        test="tests/overlap/features/test_early.py",
    ),
    Mutation(
        promise="small messages count as much as large ones in a fit",
        file="overlap/plan/cost_model.py",
        old="rows = [(1 / seconds, nbytes / seconds) for nbytes, seconds in samples]",
        new="rows = [(1.0, float(nbytes)) for nbytes, seconds in samples]",
        test="tests/overlap/plan/test_cost_model.py",
    ),
    # - Simulations
    Mutation(
        promise="buckets that are all-reduced are updated, too",
        file=_SCHEDULES,
        old='gathers[place] = send("gathers", place)\n        yield at_last',
        new='gathers[place] = send("gathers", place)',
        test="tests/overlap/plan/simulation/test_schedules.py::test_what_is_waited_for_is_what_is_not_hidden",
    ),
    Mutation(
        promise="ranks wait to be told what is urgent",
        file=_SCHEDULES,
        old="operation.latency += telling",
        new="pass",
        test="tests/overlap/plan/simulation/test_schedules.py::test_ranks_wait_to_be_told_what_is_next_where_nothing_else_is_under_way",
    ),
    Mutation(
        promise="nobody waits to be told while something else is under way",
        file=_SCHEDULES,
        old="            if not under_way:\n",
        new="            if True:\n",
        test="tests/overlap/plan/simulation/test_schedules.py::test_ranks_wait_to_be_told_what_is_next_where_nothing_else_is_under_way",
    ),
    Mutation(
        promise="wait-free backpropagation updates all parameters on every rank",
        file=_SCHEDULES,
        old="        yield Compute(costs.update * work.nbytes)\n",
        new="",
        test="tests/overlap/plan/simulation/test_schedules.py::test_what_is_waited_for_is_what_is_not_hidden",
    ),
    Mutation(
        promise="a shard is what a rank updates of a bucket",
        file=_SCHEDULES,
        old="shares = [bucket.nbytes / network.workers if bucket.shares is None",
        new="shares = [bucket.nbytes if bucket.shares is None",
        test="tests/overlap/plan/simulation/test_schedules.py::test_what_is_waited_for_is_what_is_not_hidden",
    ),
    Mutation(
        promise="the rank that owns most updates last",
        file=_SCHEDULES,
        old="else max(bucket.shares) for bucket in buckets]",
        new="else min(bucket.shares) for bucket in buckets]",
        test="tests/overlap/plan/simulation/test_schedules.py::test_the_rank_that_owns_most_updates_last",
    ),
    Mutation(
        promise="gradients of Horovod wait for half a cycle",
        file=_SCHEDULES,
        old="begin(cycle / 2)",
        new="begin(0.0)",
        test="tests/overlap/plan/simulation/test_schedules.py::test_horovod_waits_for_half_a_cycle_and_negotiates_before_it_reduces",
    ),
    Mutation(
        promise="Horovod negotiates before it reduces",
        file=_SCHEDULES,
        old="Cost(negotiation + wait + copies, 0.0)",
        new="Cost(wait + copies, 0.0)",
        test="tests/overlap/plan/simulation/test_schedules.py::test_horovod_waits_for_half_a_cycle_and_negotiates_before_it_reduces",
    ),
    Mutation(
        promise="an operation begins when the one before it in its lane is over",
        file="overlap/plan/simulation/events.py",
        old="                if lane:\n                    lane[0].begun = self._now\n",
        new="",
        test="tests/overlap/plan/simulation/test_schedules.py::test_operations_of_a_lane_follow_one_another",
    ),
    Mutation(
        promise="waits are seconds of one step",
        file="overlap/plan/simulation/events.py",
        old="found.get(label, 0.0) + seconds / number",
        new="found.get(label, 0.0) + seconds",
        test="tests/overlap/plan/simulation/test_schedules.py::test_two_layers_one_by_one",
    ),
    Mutation(
        promise="the bytes that a network is said to move take both halves",
        file="overlap/plan/simulation/network.py",
        old="        half = self.half(nbytes)\n        return half + half",
        new="        return self.half(nbytes)",
        test="tests/overlap/plan/simulation/test_schedules.py::test_nothing_is_faster_than_computation_and_wire",
    ),
    Mutation(
        promise="dear is predicted with the best share of buckets that are all-reduced",
        file=_METHODS,
        old="whole = [last - place for place in spread(len(buckets), round(share * len(buckets)))]",
        new="whole = [last - place for place in spread(len(buckets), round(share))]",
        test="tests/overlap/plan/simulation/test_methods.py::test_dear_all_reduces_some_buckets_where_forward_is_too_short",
    ),
    Mutation(
        promise="a prediction names what is waited for most",
        file=_METHODS,
        old="return max(by_kind, key=lambda kind: by_kind[kind])",
        new="return min(by_kind, key=lambda kind: by_kind[kind])",
        test="tests/overlap/plan/simulation/test_methods.py::test_what_a_step_waits_for_most",
    ),
    Mutation(
        promise="a guessed pace is that of forward and backward",
        file=_METHODS,
        old="backward=each.backward * self.pace)",
        new="backward=each.backward)",
        test="tests/overlap/plan/simulation/test_methods.py::test_a_prediction_is_between_the_best_and_the_worst_of_the_guesses",
    ),
    Mutation(
        promise="the partitions that are fastest are predicted",
        file=_METHODS,
        old="return min(runs, key=lambda run: run.step)",
        new="return next(runs)",
        test="tests/overlap/plan/simulation/test_methods.py::test_bytescheduler_takes_the_partitions_that_are_fastest",
    ),
    # - MG-WFBP
    Mutation(
        promise="the step that warms up is not in backward times",
        file="mgwfbp/rehearsal.py",
        old="if self._done > 2:",
        new="if self._done > 1:",
        test="mpi-2 tests/spmd/test_mgwfbp.py::test_times_are_measured_while_training_and_hooks_are_gone_afterwards",
    ),
    Mutation(
        promise="times of another rank decide where the first one has joined",
        file="mgwfbp/rehearsal.py",
        old="next((moments for moments in found if moments), {})",
        new="found[0]",
        test="mpi-2 tests/spmd/test_mgwfbp.py::test_times_of_another_rank_decide_where_the_first_one_has_joined",
    ),
    Mutation(
        promise="hooks that measured backward are taken away",
        file="mgwfbp/rehearsal.py",
        old="                self._clock.remove()\n",
        new="",
        test="mpi-2 tests/spmd/test_mgwfbp.py::test_times_are_measured_while_training_and_hooks_are_gone_afterwards",
    ),
    Mutation(
        promise="passes that warm up are not in a profile of backward",
        file="mgwfbp/backward_times.py",
        old="if number >= warmup:",
        new="if number >= 0:",
        test="tests/mgwfbp/test_backward_times.py::test_passes_that_warm_up_do_not_count",
    ),
    Mutation(
        promise="waiting for the next tensor costs less than another start",
        file="mgwfbp/merge.py",
        old="following - start < cost.alpha",
        new="following - now < cost.alpha",
        test="tests/mgwfbp/test_merge.py::test_golden_vectors",
    ),
    Mutation(
        promise="the least bytes of a bucket are those with which reductions end first",
        file="mgwfbp/merge.py",
        old="groups = merge(nbytes, seconds, cost, merge_below=merge_below, kinds=kinds)\n        return",
        new="groups = merge(nbytes, seconds, cost, merge_below=merge_below)\n        return",
        test="tests/mgwfbp/test_merge.py::test_many_small_tensors_share_operations_although_the_link_has_time_for_each",
    ),
    # - ByteScheduler's credit
    Mutation(
        promise="bytes under way do not exceed the credit by a whole partition",
        file="bytescheduler_adapter/credit.py",
        old="self.bytes_under_way < self._waiting[0][4]",
        new="self.bytes_under_way <= self._waiting[0][4]",
        test="tests/bytescheduler_adapter/test_credit.py::test_credit_holds_back_and_returns",
    ),
    Mutation(
        promise="no step overtakes another",
        file="bytescheduler_adapter/credit.py",
        old="((step, priority), next(self._arrivals), key, nbytes, credit)",
        new="((0, priority), next(self._arrivals), key, nbytes, credit)",
        test="tests/bytescheduler_adapter/test_credit.py::test_no_step_overtakes_another",
    ),
    Mutation(
        promise="at the end partitions go in their order",
        file="bytescheduler_adapter/credit.py",
        old="sorted(self._waiting, key=itemgetter(0, 1)), []",
        new="self._waiting, []",
        test="tests/bytescheduler_adapter/test_credit.py::test_at_the_end_all_go_in_the_same_order_whatever_the_credit",
    ),
]
