"""Mutations of `fsdp`: fairscale's interface."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_FAIRSCALE = "mpi-2 tests/spmd/test_fairscale_fsdp.py"
_ALONE = "tests/fsdp/test_fairscale.py"

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
        "ranks of a group are on one host",
        "fsdp/groups.py",
        "        if len(set(block)) > 1:\n",
        "        if False:\n",
        f"{_ALONE} -k hosts",
    ),
]
