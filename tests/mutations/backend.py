"""Mutations of `dear.backend`: what torch.distributed promises to those who call it, and what its versions call."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "an average is divided by the number of ranks",
        "dear/backend/reductions.py",
        '"AVG": ReduceOp.AVG',
        '"AVG": ReduceOp.SUM',
        "torchrun-2 tests/backend/test_collectives.py -k averages",
    ),
    Mutation(
        "what is reduced and scattered may be of different sizes",
        "dear/backend/collectives.py",
        "[part.numel() for part in parts], opts, limit)",
        "[parts[0].numel()] * self.comm.size, opts, limit)",
        "torchrun-2 tests/backend/test_collectives.py -k reduce_scatter_of_uneven",
    ),
    Mutation(
        "splits of an all-to-all count rows",
        "dear/backend/collectives.py",
        "return [count * row for count in splits]",
        "return splits",
        "torchrun-2 tests/backend/test_collectives.py -k splits_rows",
    ),
    Mutation(
        "several tensors are gathered tensor by tensor",
        "dear/backend/collectives.py",
        "by_input = [list(outputs) for outputs in zip(*output_lists, strict=True)]",
        "by_input = output_lists",
        "torchrun-2 tests/backend/test_coalesced.py -k all_gather_coalesced",
    ),
    Mutation(
        "nobody leaves a barrier before all have come",
        "dear/backend/collectives.py",
        "return self.issue(barrier(label=self.label), [], timeout or opts)",
        "return as_one([])",
        "torchrun-2 tests/backend/test_limits.py -k leaves_a_barrier",
    ),
    Mutation(
        "a collective returns at once",
        "dear/backend/group.py",
        "        made = GroupWork(self, work, outputs, self._seconds_of(limit), finish)\n",
        "        made = GroupWork(self, work, outputs, self._seconds_of(limit), finish)\n        made.wait()\n",
        "torchrun-2 tests/backend/test_collectives.py -k not_over_before",
    ),
    Mutation(
        "results are in their tensors once a work was waited for",
        "dear/backend/works.py",
        "        if self._finish is not None:\n",
        "        if self._finish is None:\n",
        "torchrun-2 tests/backend/test_collectives.py -k test_broadcast",
    ),
    Mutation(
        "messages with different tags are apart",
        "dear/backend/group.py",
        "work = self._comm.send(flat(tensor), dstRank, tag, label=self.label)",
        "work = self._comm.send(flat(tensor), dstRank, 0, label=self.label)",
        "torchrun-2 tests/backend/test_point_to_point.py -k tags_are_received",
    ),
    Mutation(
        "messages of a group are of its own ranks",
        "dear/backend/group.py",
        "self._any_source.hear(self.ranks.index(sender), letter)",
        "self._any_source.hear(sender, letter)",
        "torchrun-4 tests/backend/test_point_to_point.py -k anybody_within",
    ),
    Mutation(
        "who leaves has told what it sent",
        "dear/backend/group.py",
        "            if not self.ended:\n",
        "            if self.ended:\n",
        "torchrun-2 tests/backend/test_point_to_point.py -k about_to_leave",
    ),
    Mutation(
        "each group has its own limit",
        "dear/backend/connecting.py",
        "        return _part(whole, ranks, store, name, seconds)\n",
        "        return _part(whole, ranks, store, name, 60.0)\n",
        "torchrun-2 tests/backend/test_limits.py -k limit_of_a_group",
    ),
    Mutation(
        "an operation may have a limit of its own",
        "dear/backend/group.py",
        "return given.total_seconds() if given is not None and given > timedelta(0) else self._seconds",
        "return self._seconds",
        "torchrun-2 tests/backend/test_limits.py -k limit_of_one_operation",
    ),
    Mutation(
        "a group that has ended on one rank has ended on all",
        "dear/backend/group.py",
        "            self._watch.tell_end(self, reason)\n",
        "            pass\n",
        "torchrun-2 tests/backend/test_limits.py -k limit_of_one_operation",
    ),
    Mutation(
        "a future has the error of its operation",
        "dear/backend/completion.py",
        "                failed.append(error)\n",
        "                pass\n",
        "tests/dear/backend/test_completion.py",
    ),
    Mutation(
        "members of a group make its second device's group by a name that they know alike",
        "dear/backend/group.py",
        'f"{self._comm.name}/{kind}"',
        'f"{len(dist.distributed_c10d._world.pg_names)}/{kind}"',
        "torchrun-2 tests/backend/test_groups.py -k second_device",
    ),
    Mutation(
        "a torch that keeps no works has them until they are waited for",
        "dear/backend/works.py",
        "            _unwaited.add(self)\n",
        "            pass\n",
        "tests/dear/backend/test_works.py -k until_they_are_waited_for",
    ),
    Mutation(
        "several calls may be waited for once for each tensor",
        "dear/backend/works.py",
        "    return several if _TORCH_KEEPS else _create_work_from_future(several.get_future())\n",
        "    return several\n",
        "tests/dear/backend/test_works.py -k as_often",
    ),
]
