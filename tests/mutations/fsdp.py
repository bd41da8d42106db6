"""Mutations of `fsdp`: fairscale's interface, and frozen parameters."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_FAIRSCALE = "mpi-2 tests/spmd/test_fairscale_fsdp.py"
_ALONE = "tests/fsdp/test_fairscale.py"
_GROUPS = "mpi-4 tests/spmd/test_fully_shard.py"
_SWEEPS = "tests/overlap/plan/test_sweeps.py"
_FROZEN = "mpi-2 tests/spmd/test_frozen_base.py"
_OPTIMIZERS = "mpi-2 tests/spmd/test_fully_shard_optimizers.py"

MUTATIONS = [
    Mutation(
        "what auto_wrap leaves unwrapped is averaged, too",
        "fsdp/wrap.py",
        "        kind.shard_rest(module, **_arguments(context, module, overrides))\n",
        "        pass\n",
        f"{_FAIRSCALE} -k auto_wrap_leaves_nothing",
    ),
    Mutation(
        "two wrapped parts of a plain model train as one",
        "fsdp/fairscale.py",
        "            train_together(self.module)\n",
        "            pass\n",
        f"{_FAIRSCALE} -k training_equals_one_process and _by_parts",
    ),
    Mutation(
        "what an auto-wrapped part leaves is the outer wrapper's",
        "fsdp/parts.py",
        "        unregister(each)  # what no wrapper has is this one's\n",
        "        pass\n",
        f"{_FAIRSCALE} -k training_equals_one_process",
    ),
    Mutation(
        "the outermost wrapper alone keeps its parameters after forward",
        "fsdp/parts.py",
        "unit.stays, unit.casts = not inner.reshard_after_forward, False",
        "unit.casts = False",
        f"{_FAIRSCALE} -k options_change",
    ),
    Mutation(
        "disable_reshard_on_root=False frees the outermost wrapper's parameters after forward",
        "fsdp/parts.py",
        "unit.stays = options.disable_reshard_on_root or not options.reshard_after_forward",
        "unit.stays = True",
        f"{_FAIRSCALE} -k options_change",
    ),
    Mutation(
        "bucket_cap_mb bounds the buckets of the outermost wrapper",
        "fsdp/first_pass.py",
        'dtype, threshold_mb = _one(units, "param_dtype"), units[0].threshold_mb',
        'dtype, threshold_mb = _one(units, "param_dtype"), None',
        f"{_FAIRSCALE} -k options_change",
    ),
    Mutation(
        "state dicts have the names of the model without wrappers",
        "fsdp/fairscale.py",
        "        move_up(found, prefix)\n",
        "",
        f"{_FAIRSCALE} -k whole_state_dicts",
    ),
    Mutation(
        "modules in wrappers find the versions that a state dict has of them",
        "fsdp/names.py",
        "return super().get(cleaned(name), default)",
        "return super().get(name, default)",
        f"{_FAIRSCALE} -k versions",
    ),
    Mutation(
        "shares of a rank are loaded where the model is cut in another way",
        "fsdp/local_state.py",
        "own.held.copy_(flat[own.begin : own.begin + own.held.numel()])",
        "own.held.copy_(flat[: own.held.numel()])",
        f"{_FAIRSCALE} -k consolidated_and_loaded",
    ),
    Mutation(
        "shares are joined in the order of their elements",
        "fsdp/local_state.py",
        "    pieces.sort(key=lambda piece: piece[0])\n",
        "",
        f"{_ALONE} -k joined",
    ),
    Mutation(
        "shares lie in the order of dimensions in memory",
        "fsdp/local_state.py",
        ".permute([list(dims).index(dim) for dim in range(len(dims))])",
        ".reshape(list(shape))",
        f"{_ALONE} -k joined",
    ),
    Mutation(
        "a sharded checkpoint has every rank's share, whoever has the state dict",
        "fsdp/fairscale.py",
        "mute = shown and self._options.state_dict_on_rank_0_only",
        "mute = self._options.state_dict_on_rank_0_only",
        f"{_FAIRSCALE} -k one_rank_and_device",
    ),
    Mutation(
        "a copy of a wrapper is sharded, too, when it is trained",
        "fsdp/fairscale.py",
        "            shard(self.module, self._options, self._ranks)\n",
        "            pass\n",
        f"{_FAIRSCALE} -k copies",
    ),
    Mutation(
        "a sharded module can be pickled while it is whole",
        "fsdp/module.py",
        "copyreg._reconstructor, (unit_of(self).kind, object, None)",
        "copyreg.__newobj__, (unit_of(self).kind,)",
        f"{_FAIRSCALE} -k copies",
    ),
    Mutation(
        "with reshard_after_forward=n, backward gathers within groups of ranks",
        "overlap/plan/sweeps.py",
        "self._from_shares = sweep is Sweep.BACKWARD and self._resharded",
        "self._from_shares = False",
        f"{_GROUPS} -k backward_gathers_within",
    ),
    Mutation(
        "a rank that has left out backward gathers for it",
        "overlap/plan/sweeps.py",
        "both = self.owes_backward",
        "both = False",
        f"{_SWEEPS} -k without_a_batch",
    ),
    Mutation(
        "a rank that has joined guesses no pass where it catches up",
        "overlap/core/closing.py",
        "call not in _PASSES_GO_ON",
        "call != BACKWARD",
        f"{_OPTIMIZERS} -k follow_steps_that_leave",
    ),
    Mutation(
        "a rank that leaves out backward tells those that have joined",
        "overlap/core/unsharding.py",
        "            if self._sweeps.owes_backward:\n                self._first",
        "            if False:\n                self._first",
        f"{_OPTIMIZERS} -k may_leave_out_what_ranks",
    ),
    Mutation(
        "shares of other values are let go",
        "overlap/plan/sweeps.py",
        "for bucket in (*self._there, *self._shares)]",
        "for bucket in self._there]",
        f"{_SWEEPS} -k no_backward_uses",
    ),
    Mutation(
        "a share of a group takes no memory once all of them are whole",
        "overlap/core/buckets/freed.py",
        "        if self._share is not None:\n            self._share.free()\n        master",
        "        master",
        f"{_GROUPS} -k share_of_a_group",
    ),
    Mutation(
        "ranks of a group are on one host",
        "fsdp/groups.py",
        "        if len(set(block)) > 1:\n",
        "        if False:\n",
        f"{_ALONE} -k hosts",
    ),
    Mutation(
        "memory is mapped of this job alone",
        "overlap/job/memory/pages.py",
        "            if token not in os.readlink(",
        "            if False and token not in os.readlink(",
        "tests/overlap/job/test_pages.py -k another_job",
    ),
    Mutation(
        "frozen parameters stay where a buffer shows their memory",
        "overlap/optimizer/once_per_host.py",
        "return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and on_cpu",
        "return not tensor.requires_grad and on_cpu",
        f"{_FROZEN} -k ties_stay",
    ),
    Mutation(
        "what all ranks have mapped from a file stays there",
        "overlap/optimizer/once_per_host.py",
        'digests[0] != b"" for digests in told]',
        'digests[0] == b"-" for digests in told]',
        f"{_FROZEN} -k mapped_from_its_file and before",
    ),
    Mutation(
        "what a checkpoint has written to is once in memory again",
        "overlap/optimizer/saving/checkpoints.py",
        "    share_again(session, model)\n",
        "",
        f"{_FROZEN} -k checkpoint_is_loaded",
    ),
    Mutation(
        "a rank that shares a base keeps what is written to the file of its weights away",
        "overlap/state/tensor_files.py",
        "mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)",
        "mmap.mmap(os.open(place.file, os.O_RDWR), 0)",
        "tests/overlap/state/test_tensor_files.py -k file_stays_as_it_is",
    ),
]
