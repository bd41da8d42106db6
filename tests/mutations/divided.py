"""Mutations of `model_parallel` and `pipe`: models that are divided beside their data."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_TENSOR = "mpi-2 tests/spmd/test_model_parallel.py"
_PIPE = "tests/pipe/test_pipe.py"
_ACROSS = "mpi-2 tests/spmd/test_pipe_models.py"
_CHECKPOINTS = "mpi-2 tests/spmd/test_divided_checkpoints.py"

MUTATIONS = [
    Mutation(
        "a column layer's input has the gradient of all ranks",
        "model_parallel/layers.py",
        "of_x, work = start_sum(gradient.matmul(weight), ctx.axis) if wants_x else (None, None)",
        "of_x, work = (gradient.matmul(weight), None) if wants_x else (None, None)",
        f"{_TENSOR} -k test_columns",
    ),
    Mutation(
        "padding_idx is a row of the whole table",
        "model_parallel/layers.py",
        "padding = None if self.padding_idx is None else self.padding_idx - first",
        "padding = self.padding_idx",
        f"{_TENSOR} -k test_embeddings",
    ),
    Mutation(
        "a norm counts what other ranks have of a parameter",
        "overlap/features/clipping.py",
        '        axis.comm.run(all_reduce(values, values, op, label="gradient norm"))\n',
        "        pass\n",
        f"{_TENSOR} -k training_equals",
    ),
    Mutation(
        "a thread runs one stage, so backward adds up micro-batches in one order",
        "pipe/pipe.py",
        "        if len(self.balance) == 1 or watched is not None:\n",
        "        if len(calls) == 1 or watched is not None:\n",
        f"{_PIPE} -k bit_for_bit",
    ),
    Mutation(
        "a batch norm that is computed again counts once",
        "pipe/checkpointing.py",
        "        each.update({name: None if value is None else value.clone() for name, value in each.items()})\n",
        "        pass\n",
        f"{_PIPE} -k counts_each_micro_batch_once",
    ),
    Mutation(
        "the owner of a tied parameter gets the borrower's gradient",
        "pipe/ties.py",
        "        torch.autograd.backward([tensor], [gradient])\n",
        "",
        f"{_ACROSS} -k training_equals_one_process",
    ),
    Mutation(
        "what a stage gathers is there for all micro-batches",
        "overlap/plan/sweeps.py",
        "        if last:\n            self._keep = self._until_step\n",
        "        self._keep = self._until_step\n",
        "mpi-2 tests/spmd/test_pipe.py -k gathers_once",
    ),
    Mutation(
        "stages reduce in the last backward pass of a step alone",
        "pipe/stage.py",
        "        stack.enter_context(optimizer.no_sync())\n",
        "        pass\n",
        "mpi-2 tests/spmd/test_pipe.py -k other_numbers",
    ),
    Mutation(
        "of copies of a parameter one optimizer's ranks write theirs",
        "overlap/optimizer/saving/divided.py",
        "            first[name, region] = min(first.get((name, region), who), who)\n",
        "            first[name, region] = who\n",
        "tests/overlap/optimizer/test_divided.py -k copies",
    ),
    Mutation(
        "blocks that were divided each for itself lie apart in the whole tensor",
        "overlap/state/boxes.py",
        "Segment(number * mine, number * block + before, mine)",
        "Segment(number * mine, number * mine + before, mine)",
        "tests/overlap/state/test_boxes.py -k parts",
    ),
    Mutation(
        "groups of other stages are those of the first",
        "overlap/state/saved.py",
        "            if alike:\n",
        "            if False:\n",
        "tests/overlap/state/test_saved.py -k other_parameters",
    ),
    Mutation(
        "a stage's blocks have the numbers of the whole model",
        "pipe/causal.py",
        "{self._start + int(number)}",
        "{number}",
        f"{_CHECKPOINTS} -k test_one_grid and llama",
    ),
    Mutation(
        "a parameter that another stage borrows has its name there, too",
        "pipe/stage.py",
        "        names = (own, *lent)\n",
        "        names = (own,)\n",
        f"{_CHECKPOINTS} -k both_names",
    ),
    Mutation(
        "frozen parts of a parameter are shared by ranks that have the same part",
        "overlap/optimizer/once_per_host.py",
        ' {places} {parts}"',
        ' {places}"',
        "mpi-4 tests/spmd/test_divided_checkpoints.py -k frozen_parts",
    ),
    Mutation(
        "freed buckets are reduced in the last backward pass of a rank's stages alone",
        "pipe/stage.py",
        "with local(() if self.concludes else [",
        "with local(() if True else [",
        "mpi-4 tests/spmd/test_pipe_interleaved.py -k reduced_once",
    ),
    Mutation(
        "buffers are not written for shapes alone",
        "pipe/stage.py",
        "                buffer.copy_(before)\n",
        "                pass\n",
        "mpi-2 tests/spmd/test_pipe.py -k buffers_are",
    ),
    Mutation(
        "skip connections go on to the next stage",
        "pipe/carried.py",
        "            passed = tuple(store[key] for key in self._leaving)\n",
        "            passed = ()\n",
        "mpi-2 tests/spmd/test_pipe_skips.py -k gradients_are",
    ),
    Mutation(
        "another schedule stands in where numbers of micro-batches do not divide",
        "pipe/schedule.py",
        '        return "loopedbfs"\n',
        "        pass\n",
        f"{_PIPE} -k stands_in",
    ),
    Mutation(
        "a stage that fails tells the other ranks",
        "pipe/failing.py",
        "                    current().peer_queries.tell(rank, self._topic, why)\n",
        "                    pass\n",
        "tests/pipe/test_faults.py -k all_ranks_do",
    ),
]
