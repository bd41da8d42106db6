"""Mutations of `oss`, fairscale's interfaces among them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_OPTIMIZER = "mpi-2 tests/spmd/test_sharded_optimizer.py"
_MODEL = "mpi-2 tests/spmd/test_sharded_data_parallel.py"

MUTATIONS = [
    # Who owns what
    Mutation(
        "a frozen parameter counts as one element when owners are chosen",
        "oss/owned.py",
        "sizes = [parameter.numel() if parameter.requires_grad else 1 for parameter in new]",
        "sizes = [parameter.numel() for parameter in new]",
        f"{_OPTIMIZER} -k frozen_added_and_thawed",
    ),
    Mutation(
        "what is added later goes to the rank that owns least",
        "oss/owned.py",
        "            self._loads[owner] += size\n",
        "",
        f"{_OPTIMIZER} -k added_goes_to",
    ),
    Mutation(
        "under ShardedDataParallel partition_parameters() tells who updates what",
        "oss/data_parallel.py",
        "if offset < end)",
        "if offset <= end)",
        f"{_MODEL} -k trains_as_one_process",
    ),
    Mutation(
        "a rank loads no state of what others own",
        "oss/owned.py",
        "or number >= len(parameters) or self._mine(parameters[number])",
        "or number < len(parameters)",
        f"{_OPTIMIZER} -k goes_on_in_either",
    ),
    # Steps
    Mutation(
        "with 16-bit broadcasts what a script wrote since the last step counts",
        "oss/owned.py",
        "parameter.copy_(torch.where(_rounded(exact).to(exact.dtype) == parameter, exact, parameter))",
        "parameter.copy_(exact)",
        f"{_OPTIMIZER} -k float16",
    ),
    Mutation(
        "with 16-bit broadcasts all else stays exact beside what a script wrote",
        "oss/owned.py",
        "parameter.copy_(torch.where(_rounded(exact).to(exact.dtype) == parameter, exact, parameter))",
        "parameter.copy_(exact if torch.equal(_rounded(exact).to(exact.dtype), parameter) else parameter)",
        f"{_OPTIMIZER} -k float16",
    ),
    Mutation(
        "gradients of what others own are in .grad again after a step",
        "oss/owned.py",
        "            for parameter, gradient in hidden:\n                parameter.grad = gradient\n",
        "            hidden.clear()\n",
        f"{_OPTIMIZER} -k nothing_reduces_them",
    ),
    Mutation(
        "what is frozen is not sent",
        "oss/owned.py",
        "trained = [parameter for parameter in self._parameters if parameter.requires_grad]\n        for part",
        "trained = self._parameters\n        for part",
        f"{_OPTIMIZER} -k frozen_is_neither",
    ),
    Mutation(
        "owners do not round what is frozen",
        "oss/owned.py",
        "                    if parameter.requires_grad and narrows(parameter):\n",
        "                    if narrows(parameter):\n",
        f"{_OPTIMIZER} -k frozen_is_neither",
    ),
    Mutation(
        "all parts have arrived when step() returns",
        "oss/owned.py",
        "        for arriving in flying:\n            self._land(*arriving)\n",
        "",
        f"{_OPTIMIZER} -k nothing_reduces_them",
    ),
    Mutation(
        "owners send their parts in turn",
        "oss/parts.py",
        "    numbered.sort(key=lambda entry: entry[:2])\n",
        "    numbered.sort(key=lambda entry: entry[1])\n",
        "tests/oss/test_parts.py",
    ),
    Mutation(
        "a part is no larger than 25 MB",
        "oss/parts.py",
        "        filled += size\n",
        "        filled = size\n",
        "tests/oss/test_parts.py",
    ),
    Mutation(
        "parameters of several types travel together",
        "oss/parts.py",
        "        those.sort(key=lambda parameter: -_wire(parameter, rounds).itemsize)\n",
        "",
        "tests/oss/test_parts.py",
    ),
    Mutation(
        "members of a group are numbered from 0, whatever their ranks in the job",
        "oss/ranks.py",
        "dist.broadcast(values, dist.get_global_rank(self.group, root), group=self.group, async_op=True)",
        "dist.broadcast(values, root, group=self.group, async_op=True)",
        "tests/oss/test_ranks.py",
    ),
    Mutation(
        "gradients that are all zero do not pass for reduced ones",
        "oss/owned.py",
        "        if largest > 0:\n",
        "        if True:\n",
        f"{_OPTIMIZER} -k all_zero",
    ),
    # Clipping and scalers
    Mutation(
        "clipping leaves small gradients as they are",
        "oss/owned.py",
        "coefficient = min(1.0, max_norm / (total + 1e-6)) if",
        "coefficient = max_norm / (total + 1e-6) if",
        f"{_OPTIMIZER} -k with_clipping",
    ),
    Mutation(
        "the norm is that of what owners have, each once",
        "oss/owned.py",
        "mine = [_norm(gradient, order) for parameter, gradient in gradients if self._mine(parameter)]",
        "mine = [_norm(gradient, order) for parameter, gradient in gradients]",
        f"{_OPTIMIZER} -k with_clipping",
    ),
    Mutation(
        "the largest norm is found where one rank has a NaN",
        "oss/owned.py",
        "known = [math.inf if math.isnan(norm) else norm for norm in mine]",
        "known = mine",
        f"{_OPTIMIZER} -k no_norm_hides",
    ),
    Mutation(
        "a rank without gradients skips the step that others skip",
        "oss/grad_scaler.py",
        "for device in (found or [found_inf.device])}",
        "for device in found}",
        "mpi-2 tests/spmd/test_grad_scaler.py",
    ),
    Mutation(
        "torch's scaler is refused where gradients differ between ranks",
        "oss/owned.py",
        "        if not agreed and self._reduced is False:\n",
        "        if agreed and self._reduced is False:\n",
        "mpi-2 tests/spmd/test_grad_scaler.py",
    ),
    # State
    Mutation(
        "a recipient's whole state is of the last step",
        "oss/owned.py",
        "        self._agree()\n        self._consolidated = None\n",
        "        self._agree()\n",
        f"{_OPTIMIZER} -k goes_on_in_either",
    ),
    Mutation(
        "whole state is gathered anew after state was loaded",
        "oss/owned.py",
        "        }\n        self._consolidated = None\n\n    def add_param_group",
        "        }\n\n    def add_param_group",
        f"{_OPTIMIZER} -k goes_on_in_either",
    ),
    Mutation(
        "whole state is gathered anew after parameters were added",
        "oss/owned.py",
        "        self._assign()\n        self._consolidated = None\n",
        "        self._assign()\n",
        f"{_OPTIMIZER} -k added_goes_to",
    ),
    Mutation(
        "exact values are loaded again",
        "oss/owned.py",
        "masters = state_dict.get(_MASTER, {}) if self._rounds else {}",
        "masters: dict[int, Any] = {}",
        f"{_OPTIMIZER} -k float16",
    ),
    Mutation(
        "an OSS that could not be given to ShardedDataParallel goes on with its state",
        "oss/sharded_optimizer.py",
        "        finally:  # it goes on as before where that has raised\n",
        "        except ValueError:\n            raise\n        else:\n",
        f"{_OPTIMIZER} -k nobody_could_take_over",
    ),
    Mutation(
        "a hook may change what is loaded",
        "oss/sharded_optimizer.py",
        "            state_dict = state_dict if changed is None else changed\n",
        "",
        f"{_OPTIMIZER} -k hooks_may",
    ),
    Mutation(
        "a hook may change what is saved",
        "oss/sharded_optimizer.py",
        "            found = found if changed is None else changed\n",
        "",
        f"{_OPTIMIZER} -k hooks_may",
    ),
    # ShardedDataParallel
    Mutation(
        "with reduce_fp16 gradients travel in 16 bits",
        "oss/data_parallel.py",
        "Compression.fp16 if reduce_fp16 else Compression.none",
        "Compression.none",
        f"{_MODEL} -k reduce_shows",
    ),
    Mutation(
        "ranks keep their own models at startup where they should",
        "oss/data_parallel.py",
        '"sync_start": sync_models_at_startup,',
        '"sync_start": True,',
        f"{_MODEL} -k keep_their_own",
    ),
    Mutation(
        "no_sync() holds for all optimizers of a model",
        "oss/data_parallel.py",
        "            for optimizer in self._optimizers:\n                stack.enter_context",
        "            for optimizer in self._optimizers[:1]:\n                stack.enter_context",
        f"{_MODEL} -k several_optimizers",
    ),
    Mutation(
        "zero_grad() of the model clears parameters that no optimizer has, too",
        "oss/data_parallel.py",
        "self._parameters_of_nobody = [parameter for parameter in module.parameters() if id(parameter) not in known]",
        "self._parameters_of_nobody = list[torch.nn.Parameter]()",
        f"{_MODEL} -k no_optimizer_knows",
    ),
    Mutation(
        "what a scaler has left for one step does not count for the next",
        "oss/data_parallel.py",
        "            for name in told:\n                delattr(self.shown, name)\n",
        "            pass\n",
        f"{_MODEL} -k scaler",
    ),
    Mutation(
        "buffers follow the first rank's where they should",
        "oss/data_parallel.py",
        '"broadcast_buffers": broadcast_buffers and number == 0,',
        '"broadcast_buffers": broadcast_buffers and number > 0,',
        f"{_MODEL} -k trains_as_one_process",
    ),
    Mutation(
        "a bucket has as many elements as reduce_buffer_size says",
        "oss/data_parallel.py",
        "reduce_buffer_size * width / 2**20",
        "reduce_buffer_size / 2**20",
        f"{_MODEL} -k trains_as_one_process",
    ),
    # The strategy
    Mutation(
        "a plan that is tried changes no other",
        "oss/optimizer.py",
        "        other = copy.copy(self)\n",
        "        other = self\n",
        "tests/oss/test_strategy.py",
    ),
    # Activation checkpoints
    Mutation(
        "running statistics count a batch once",
        "oss/checkpoint.py",
        "            part._buffers.update(buffers)\n",
        "            pass\n",
        "tests/oss/test_checkpoint.py",
    ),
    Mutation(
        "running statistics are those of the forward pass after backward",
        "oss/checkpoint.py",
        "                part._buffers.update(copies)\n",
        "",
        "tests/oss/test_checkpoint.py",
    ),
]
