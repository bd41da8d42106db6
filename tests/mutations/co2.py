"""Mutations of `co2`: outer rules, parts, what travels, join, checkpoints, and where ranks are lost."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_FROZEN = "mpi-2 tests/spmd/test_co2_frozen.py"
_JOIN = "mpi-2 tests/spmd/test_co2_join.py"
_CHECKPOINTS = "mpi-2 tests/spmd/test_co2_checkpoints.py"
_CONTRACT = "mpi-2 tests/spmd/test_co2_contract.py"


MUTATIONS = [
    # Frozen parameters
    Mutation(
        "the outer momentum of a parameter frozen beside others is forgotten",
        "co2/part.py",
        "                momentum[inside] = 0\n",
        "",
        f"{_FROZEN} -k outer_momentum and False",
    ),
    Mutation(
        "the outer momentum of a part that is frozen as a whole is forgotten",
        "co2/part.py",
        "self.next, self.momentum = self.start, torch.zeros_like(self.start)\n\n    def blend",
        "self.next = self.start\n\n    def blend",
        f"{_FROZEN} -k outer_momentum and True",
    ),
    Mutation(
        "under eager the momentum of a frozen parameter is forgotten",
        "co2/eager_part.py",
        "            momentum[self._extents[index]] = 0\n",
        "            pass\n",
        "mpi-2 tests/spmd/test_co2_rules.py -k frozen and eager",
    ),
    Mutation(
        "under streaming-diloco the momentum of a frozen parameter moves it no more",
        "co2/fragments/streaming_part.py",
        "            step[insides[index]] = self.momentum[insides[index]] = 0\n",
        "            step[insides[index]] = 0\n",
        "mpi-2 tests/spmd/test_co2_streaming.py -k beside_its_bias",
    ),
    Mutation(
        "what bytes left out of a frozen parameter is kept, and sent once it is trained again",
        "co2/fragments/part.py",
        "                left[extents[index]] = before[extents[index]]\n",
        "                pass\n",
        "mpi-2 tests/spmd/test_co2_sparse.py -k frozen",
    ),
    Mutation(
        "an owner keeps what the bytes of its outer step left out of a frozen parameter",
        "co2/fragments/streaming_part.py",
        "self.owed = self._left_out(step, said, self.owed, insides)",
        "self.owed = step - said",
        "mpi-2 tests/spmd/test_co2_streaming.py -k beside_its_bias",
    ),
    Mutation(
        "a round does not send parts that are frozen as a whole",
        "co2/rounds.py",
        "        sent = [part for part in parts if not part.rests(idle)]\n",
        "        sent = list(parts)\n",
        f"{_FROZEN} -k nothing_is_sent",
    ),
    Mutation(
        "an average does not send parts that are frozen as a whole",
        "co2/rounds.py",
        "        sent = [part for part in self.parts if not part.rests(idle)]\n",
        "        sent = list(self.parts)\n",
        f"{_FROZEN} -k nothing_is_sent",
    ),
    Mutation(
        "what a script writes to a frozen parameter replaces what is on its way",
        "co2/averaged_parameters.py",
        "return idle - (self._coming - self._overwritten())",
        "return idle - self._coming",
        f"{_FROZEN} -k is_written_to_a_frozen",
    ),
    Mutation(
        "nothing is on its way after an average",
        "co2/averaged_parameters.py",
        "coming = among - idle if event is Event.ROUND else frozenset()",
        "coming = among - idle",
        f"{_FROZEN} -k in_warm_up",
    ),
    Mutation(
        "an average asks all ranks what was written to frozen parameters",
        "co2/rounds.py",
        "            written = allgather_object(control, self._averaged.written_in(self.parts))\n",
        "            written = [self._averaged.written_in(self.parts)]\n",
        f"{_FROZEN} -k ranks_that_write",
    ),
    Mutation(
        "an average takes over what the script wrote through .data",
        "co2/averaged_parameters.py",
        "return (self.idle & self._overwritten()).union(*(part.written(theirs) for part in parts))",
        "return self.idle & self._overwritten()",
        f"{_FROZEN} -k ranks_that_write",
    ),
    Mutation(
        "a checkpoint knows for which parameters something is on its way",
        "co2/averaged_parameters.py",
        'self._coming = frozenset(section.get("coming", self._known))',
        "self._coming = frozenset(self._known)",
        f"{_FROZEN} -k written_to and resumes",
    ),
    Mutation(
        "what a script puts in place of a frozen parameter's memory replaces what is on its way",
        "co2/averaged_parameters.py",
        "return slot.param.data_ptr(), slot.param._version",
        "return 0, slot.param._version",
        f"{_FROZEN} -k in_place_of",
    ),
    Mutation(
        "a checkpoint inside a round knows what was trained in it",
        "co2/averaged_parameters.py",
        'self._active = set(section["active"])',
        "self._active = set()",
        f"{_FROZEN} -k trained_at_different_times",
    ),
    # The staleness gap
    Mutation(
        "the gap is measured against the longest outer step so far",
        "co2/communication.py",
        "self.longest = max(self.longest, moved)",
        "self.longest = moved",
        f"{_CONTRACT} -k gap_is_that_of_whole",
    ),
    Mutation(
        "the gap is measured over what travels",
        "co2/communication.py",
        "for part in parts for index, square in part.squared_steps(idle).items()",
        "for part in parts for index, square in part.squared_steps(()).items()",
        f"{_FROZEN} -k gap_is_the_same",
    ),
    Mutation(
        "a checkpoint has the longest outer step",
        "co2/rounds.py",
        '            self._communication.longest = section["longest"]\n',
        "",
        f"{_FROZEN} -k trained_at_different_times",
    ),
    # Checkpoints of ranks that are not at the same point
    Mutation(
        "a rank one round ahead answers with where it was before",
        "co2/rounds.py",
        "return self._shares(passed=ahead == 1)",
        "return self._shares(passed=False)",
        "mpi-2 tests/spmd/test_co2.py -k rank_0_alone",
    ),
    Mutation(
        "a rank that has loaded twice answers those who have not with what it had before",
        "co2/rounds.py",
        "            if self._before_load is None:\n                self._before_load",
        "            if True:\n                self._before_load",
        f"{_CHECKPOINTS} -k have_not_loaded",
    ),
    Mutation(
        "what a rank had before it loaded is forgotten once all have loaded",
        "co2/rounds.py",
        "        self._before_load = None  # [Note: who has loaded by when]\n\n    def _answer",
        "        pass\n\n    def _answer",
        f"{_CHECKPOINTS} -k have_not_loaded",
    ),
    Mutation(
        "a rank that has not come so far is asked again",
        "co2/outer_state.py",
        "missing = [rank for rank, share in answers.items() if share is None]",
        "missing: list[int] = []",
        "tests/co2/test_outer_state.py",
    ),
    Mutation(
        "a rank that never comes so far is named",
        "co2/outer_state.py",
        "                if left == 0:\n",
        "                if left < 0:\n",
        "tests/co2/test_outer_state.py",
    ),
    # Ranks out of data
    Mutation(
        "what a rank has learned before it was out of data counts once more",
        "co2/communication.py",
        "for rank, presence in enumerate(self.presence) if presence == _Presence.OUT)",
        "for rank, presence in enumerate(self.presence) if presence >= _Presence.JOINED)",
        f"{_JOIN} -k those_that_are_left and co2",
    ),
    Mutation(
        "averages are over those that are left",
        "co2/part.py",
        "self.mean /= self.among.count",
        "self.mean /= self.among.size",
        f"{_JOIN} -k those_that_are_left and localsgd",
    ),
    Mutation(
        "a rank out of data keeps what its bytes have left out",
        "co2/fragments/streaming_part.py",
        "if self.contributes and (self._codec.lossy or self.residual is not None):",
        "if self._codec.lossy or self.residual is not None:",
        f"{_JOIN} -k those_that_are_left and streaming",
    ),
    Mutation(
        "a rank out of data takes the learning rates of those that train",
        "co2/rounds.py",
        "        take_hyper_parameters(self.following.optimizer, told.hyper_parameters)\n",
        "",
        f"{_JOIN} -k those_that_are_left and acco",
    ),
    Mutation(
        "a rank whose group trains does not take part by itself",
        "co2/join.py",
        "and not rounds.retired and self._group.isdisjoint(missing):",
        "and not rounds.retired:",
        f"{_JOIN} -k makes_its_groups_steps",
    ),
    Mutation(
        "join() raises what following the others has raised",
        "co2/join.py",
        "        if error is not None:\n            raise error\n        rounds =",
        "        rounds =",
        f"{_JOIN} -k learned_of_other_layers",
    ),
    # The end
    Mutation(
        "whoever ends a round behind keeps its parameters",
        "co2/rounds.py",
        "            overwrite(param, value)\n\n    def _send_as_it_is",
        "            pass\n\n    def _send_as_it_is",
        f"{_CONTRACT} -k one_rank_may_end",
    ),
    Mutation(
        "the rank that stands furthest says what is sent at the end",
        "co2/lifetime.py",
        "last = max(standings, key=lambda standing: standing.sent)",
        "last = min(standings, key=lambda standing: standing.sent)",
        f"{_CONTRACT} -k one_rank_may_end",
    ),
    # Rules
    Mutation(
        "slowmo's learning rate is the mean over one round",
        "co2/rounds.py",
        "        self.events, self.in_round = self.events + 1, 0\n        self._inner_rates.begin_round()\n",
        "        self.events, self.in_round = self.events + 1, 0\n",
        "mpi-2 tests/spmd/test_co2_rules.py -k learning_rate_is_the_mean",
    ),
    Mutation(
        "what waits under a step is no part of its time",
        "co2/rounds.py",
        "(time.perf_counter() - self._since - self._waited) / self.in_round",
        "(time.perf_counter() - self._since) / self.in_round",
        "mpi-2 tests/spmd/test_co2_streaming.py -k no_longer_step",
    ),
    Mutation(
        "under acco the optimizer forgets what an estimate did to its state",
        "co2/acco/update.py",
        "state = one.copied_state() if forget else one.state",
        "state = one.state",
        "mpi-2 tests/spmd/test_co2_acco.py -k equals_its_equations and adamw",
    ),
    Mutation(
        "under acco an update is by the mean of both halves",
        "co2/acco/part.py",
        "(0.0 if forget else self._first_counts.get(index, 0.0))",
        "0.0",
        "mpi-2 tests/spmd/test_co2_acco.py -k equals_its_equations and adamw",
    ),
    Mutation(
        "the rates of an update are those of the moment when it was sent",
        "co2/acco/update.py",
        "{key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}",
        "dict(group)",
        "tests/co2/test_shard_steps.py",
    ),
    Mutation(
        "a gradient that a script leaves on a frozen parameter is not added again",
        "co2/acco/part.py",
        "if gradient is None or not slot.param.requires_grad:",
        "if gradient is None:",
        "mpi-2 tests/spmd/test_co2_acco.py -k left_on",
    ),
    Mutation(
        "the first half of a part that is frozen before the second is dropped",
        "co2/acco/part.py",
        "        self.next = self.start\n        self._forget_first()\n",
        "        self.next = self.start\n",
        "mpi-2 tests/spmd/test_co2_acco.py -k first_half",
    ),
    Mutation(
        "where waiting for an average was interrupted, the next step begins with it",
        "co2/rounds.py",
        "            self.arrive()  # whoever waited for it was interrupted\n",
        "            pass\n",
        "mpi-2 tests/spmd/test_co2_rules.py -k interrupted and localsgd",
    ),
    Mutation(
        "where waiting for a fragment was interrupted, the next step begins with it",
        "co2/fragments/rounds.py",
        "            self._apply()  # whoever waited for it was interrupted\n",
        "            pass\n",
        "mpi-2 tests/spmd/test_co2_rules.py -k interrupted and streaming",
    ),
    # Where ranks are lost
    Mutation(
        "groups still divide the number of ranks when some are lost",
        "co2/optimizer.py",
        "    fits = math.gcd(nprocs, session.comm.size)\n",
        "    fits = min(nprocs, session.comm.size)\n",
        "tests/co2/test_lost_ranks.py -k groups_fit",
    ),
    Mutation(
        "another model than before does not take over outer state",
        "co2/recovery/inheritance.py",
        'if (first["outer"], first["names"]) != (rounds.rule.name, [slot.name for slot in rounds.slots]):',
        'if first["outer"] != rounds.rule.name:',
        "tests/co2/test_lost_ranks.py -k another_model",
    ),
    Mutation(
        "of shares that overlap the mean is taken over",
        "co2/recovery/inheritance.py",
        "                number[low:high] += 1\n",
        "                number[low:high] = 1\n",
        "tests/co2/test_inheritance.py",
    ),
    Mutation(
        "ranks that come back count for nothing in the mean of parameters",
        "co2/recovery/keep_going.py",
        "mean = part if mine.has_state else torch.zeros_like(part)",
        "mean = part",
        "mpi-2 tests/spmd/test_co2_keep_going.py",
    ),
    Mutation(
        "parameters become the mean of those that go on, and not the first one's",
        "co2/recovery/keep_going.py",
        '        ended = [as_real(param).to("cpu", outer_dtype(param.dtype)) / going_on for param in params]\n'
        "        state.sync()\n",
        "        state.sync()\n"
        '        ended = [as_real(param).to("cpu", outer_dtype(param.dtype)) / going_on for param in params]\n',
        "mpi-2 tests/spmd/test_co2_keep_going.py",
    ),
    # fairscale-CO2's class
    Mutation(
        "loading outer state begins between two steps",
        "co2/data_parallel.py",
        "        self._outer.load_outer_state_dict(state)\n        self._calls.restart()\n",
        "        self._outer.load_outer_state_dict(state)\n",
        "mpi-2 tests/spmd/test_co2_data_parallel.py -k resumes",
    ),
]
