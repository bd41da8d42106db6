"""fairscale's ``FullyShardedDataParallel``: a wrapper around each module that :func:`fsdp.fully_shard` is told of.

    FSDP(Sequential(FSDP(a), b))    two units: `a`, and what is left; the outermost one is the model
    optimizer = Adam(…)             a plain one, found in the first forward pass that may be followed by backward

The inner module is the unit, so names are those of the model without wrappers.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fsdp.local_state import consolidate, load_local, local_metadata, local_state
from fsdp.names import LEVEL, Told, cleaned, move_down, move_up
from fsdp.options import Options
from fsdp.parts import members, shard, train_together
from fsdp.units import has_unit, outermost, root_of, taken, unit_of
from overlap.job.session import current, is_initialized
from overlap.optimizer.arguments import refuses_unknown
from overlap.optimizer.whole import whole

__all__ = ["FSDP", "FullyShardedDataParallel", "get_fsdp_instances"]


class FullyShardedDataParallel(torch.nn.Module):
    """A wrapper of `module`, whose parameters, gradients and optimizer state are sharded over the ranks.

    Parameters that wrappers inside it have are gathered with those; the others together, and those of the outermost one in
    buckets, in the order of use. Make the optimizer before or after wrapping; it is found in the first training pass.

    Args:
        module: its attributes are also this one's, and its names those of ``state_dict()`` and ``named_parameters()``.
        process_group: of torch.distributed: the ranks among which parameters are sharded, the same for all wrappers of a
            model. None: all.
        process_group_reduce_scatter: gradients are reduced over the same ranks, at the same time as parameters are
            gathered. A group of others raises ``ValueError``.
        reshard_after_forward: True frees whole parameters after forward, and gathers them again for backward.
        disable_reshard_on_root: the outermost wrapper keeps its own ones until backward has used them.
        mixed_precision: parameters are used, and gradients travel, as `compute_dtype`; None: float16. Inputs of the
            outermost wrapper become that. The same for all wrappers of a model.
        fp32_reduce_scatter: gradients travel in float32 where they are computed in 16 bits.
        flatten_parameters: has no effect: parameters are themselves, and lie flat in shares.
        move_params_to_cpu: this, or `cpu_offload`: of a module on a GPU, shares of parameters and gradients, and the
            optimizer's state, are in the CPU's memory. Of a module on CPUs they are there as it is.
        compute_dtype: see `mixed_precision`; without it, it is what parameters are.
        buffer_dtype: of all buffers, as it is: ``NotImplementedError`` where they have another.
        bucket_cap_mb: of the outermost wrapper: its own parameters are gathered and reduced in buckets of at most so many
            MB; 0: one for each layer; None: planned.
        compute_device: where `module` is: ``NotImplementedError`` for another kind of device.
        no_broadcast_optim_state: True raises ``NotImplementedError``.
        state_dict_device: where ``state_dict()`` has tensors; None: on the CPU.
        clear_autocast_cache: call ``torch.clear_autocast_cache()`` after each forward pass of this module.
        force_input_to_fp32: tensors of 16 bits that this module is called with become float32.
        verbose: ``repr()`` shows all arguments.
        state_dict_on_rank_0_only: ``state_dict()`` is empty but on the first of the ranks.
        gradient_predivide_factor: of the outermost wrapper: f divides by f before sums and by size / f after them.
            None: 1, as sums are in fp32.
        allow_reset_parameters: let :meth:`reset_parameters` be called.
        mesh: instead of `process_group`, as in :func:`fsdp.fully_shard`; see also :func:`fsdp.gen_fsdp_args`.
        two_level: so many ranks, of consecutive numbers, make up a host; see :func:`fsdp.gen_fsdp_args`.

    On every rank, with the same modules; this process joins its job (``fsdp.init()``) unless it has. Raises as
    :class:`.Options` and :func:`fsdp.fully_shard`.
    """

    @refuses_unknown(of="FullyShardedDataParallel")
    def __init__(
        self,
        module: torch.nn.Module,
        process_group: Any = None,
        process_group_reduce_scatter: Any = None,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: float | None = None,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
        mesh: Any = None,
        two_level: int | None = None,
    ) -> None:
        options = Options.of(locals())
        super().__init__()
        self._options = options
        self._ranks = members(process_group, process_group_reduce_scatter, mesh)
        self._modules[LEVEL] = shard(module, options, self._ranks, two_level)
        self.register_load_state_dict_post_hook(_clean)

    @classmethod
    def shard_rest(cls, module: torch.nn.Module, **config: Any) -> None:
        """Shard what no wrapper inside `module` has, with the arguments of a wrapper, in place. For :func:`auto_wrap`.

        A wrapper that is put around `module` later takes it over.
        """
        inside: Any = cls(module, **config).module
        unit_of(inside).rest = True

    # - Looks like the module

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module; its class has the methods of :class:`fsdp.FSDPModule`, too."""
        found = self._modules[LEVEL]
        assert found is not None
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or LEVEL not in self.__dict__.get("_modules", ()):
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]  # where the module has it

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]  # the same

    def __bool__(self) -> bool:
        return True

    def extra_repr(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in vars(self._options).items())
        return told if self._options.verbose else f"reshard_after_forward={self._options.reshard_after_forward}"

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """As torch's; the wrapped module has the name of the wrapper."""
        seen = set() if memo is None else memo
        if self not in seen:
            if remove_duplicate:
                seen.add(self)
            yield prefix, self
            yield from self.module.named_modules(seen, prefix, remove_duplicate)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy: a wrapper of its own, where there is a job; in other processes, one that trains as one process."""
        super().__setstate__(state)
        if is_initialized():
            shard(self.module, self._options, self._ranks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and has_unit(self.module):
            train_together(self.module)
        if self._options.force_input_to_fp32:
            args, kwargs = tree_map(_in_fp32, (args, kwargs))
        outputs = self.module(*args, **kwargs)
        if self._options.clear_autocast_cache:
            torch.clear_autocast_cache()
        return outputs

    # - Training

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up gradients on this rank, whole; the next one outside, or ``step()``, reduces them.

        Of the outermost wrapper; others raise ``RuntimeError``. On every rank.
        """
        module: Any = self._require_outermost("no_sync()")
        before = root_of(module).syncs
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(before)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of all gradients of the model, over all shares, and return what it was before.

        Of the outermost wrapper; others raise ``RuntimeError``. On every rank, between backward and ``step()``.
        """
        self._require_outermost("clip_grad_norm_()")
        return torch.nn.utils.clip_grad_norm_(self.parameters(), float(max_norm), float(norm_type))

    @property
    def params_with_grad(self) -> list[torch.nn.Parameter]:
        """The parameters that have gradients on this rank, averaged or not."""
        return [each for each in self.parameters() if each.grad is not None]

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool = True) -> None:
        """Do nothing where `pre` times `post` is the number of ranks: gradients are averages, of sums in fp32.

        Other products raise ``NotImplementedError``.
        """
        size = len(unit_of(self.module).ranks)
        if abs(pre * post - size) > 1e-6 * size:
            raise NotImplementedError(
                f"set_gradient_divide_factors(pre={pre}, post={post}) divides sums by {pre * post:g}, and gradients are "
                f"averages over {size} ranks: multiply the loss by {size} / {pre * post:g}"
            )

    def append_shared_param(self, p: torch.nn.Parameter) -> None:
        """Do nothing: a parameter that several modules use is whole until the last of them has used it.

        Raises ``ValueError`` where no wrapper has `p`.
        """
        if id(p) not in taken():
            raise ValueError(
                f"no wrapper has this parameter of shape {tuple(p.shape)}: wrap the module that has it first"
            )

    def _require_outermost(self, call: str) -> torch.nn.Module:
        model = outermost(self.module)
        if model is not self.module:
            raise RuntimeError(
                f"{call} of a wrapper around {unit_of(self.module).kind.__name__}, which is inside of "
                f"{unit_of(model).kind.__name__}: call it on the wrapper of that, FSDP({unit_of(model).kind.__name__}(…))"
            )
        return model

    # - Whole parameters

    @contextlib.contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """A context in which all parameters of the model are whole on every rank; see :func:`dear.whole`.

        What every rank writes to them counts, also with `volatile`, which leaves open whether it does. ``recurse=False``
        raises ``NotImplementedError``: all wrappers of a model are opened. On every rank, between passes.
        """
        if not recurse:
            raise NotImplementedError(
                "summon_full_params(recurse=False): parameters of a model are whole together; leave recurse out"
            )
        with whole(self.module):
            yield

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> FullyShardedDataParallel:
        """Apply `fn` to every module inside and this one, with whole parameters. On every rank, with the same outcome."""
        with whole(self.module):
            _visit(self, fn)
        return self

    def reset_parameters(self) -> None:
        """Call ``module.reset_parameters()``, with whole parameters. Raises ``RuntimeError`` unless it was allowed."""
        if not self._options.allow_reset_parameters:
            raise RuntimeError(
                "reset_parameters() of a wrapped module: give allow_reset_parameters=True if that is meant, and the same "
                "random numbers on every rank"
            )
        reset: Any = self.module.reset_parameters
        with whole(self.module):
            reset()

    # - State

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Whole values, by the names of the module without wrappers, on any rank that asks."""
        unit = unit_of(self.module) if has_unit(self.module) else None
        shown = unit is None or unit.optimizer is None or not unit.optimizer._full_state.parameters.stands_in
        mute = shown and self._options.state_dict_on_rank_0_only and unit is not None
        if mute and unit is not None and current().comm.rank != unit.ranks[0]:
            return OrderedDict() if destination is None else destination
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        move_up(found, prefix)
        if shown and self._options.state_dict_device is not None:
            mine = [name for name in found if name.startswith(prefix)]
            found.update({name: _moved(found[name], self._options.state_dict_device) for name in mine})
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole values, by the names of the module without wrappers. On every rank, which keeps its share."""
        told = getattr(state_dict, "_metadata", None)
        if told is not None:
            copy: Any = OrderedDict(state_dict)
            copy._metadata = Told(told)
            state_dict = copy
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:  # names that do not fit, with the levels of wrappers
            raise RuntimeError(str(error).replace(f"{LEVEL}.", "")) from None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        move_down(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def local_state_dict(self) -> dict[str, Any]:
        """Copies of what this rank has: of each parameter its share, 1-D, by its name; buffers, and what is not sharded,
        whole. Sends nothing; on any rank, between passes."""
        return local_state(self)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load what :meth:`local_state_dict` has given on this rank. On every rank of the job, of which there are as many.

        Before the first training pass, too. Raises ``ValueError`` on every rank, before anything is changed, where shares
        do not make up the model, and with `strict` where names are missing or unexpected, which are returned.
        """
        return load_local(self, state_dict, strict, unit_of(self.module).sharers)

    def local_metadata_dict(self) -> dict[str, Any]:
        """What :meth:`consolidate_shard_weights` has to know of this rank's :meth:`local_state_dict`."""
        return local_metadata(self)

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Any]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Any]:
        """The whole state dict, of every rank's :meth:`local_state_dict` and :meth:`local_metadata_dict`. Without a job.

        Buffers are those of the first entry. Raises ``ValueError`` where shares do not make up a tensor, and ``KeyError``
        for one that is missing; with ``strict=False`` it is left out.
        """
        return consolidate(shard_weights, shard_metadata, with_module_buffers, strict)

    def gather_full_optim_state_dict(
        self, optim: torch.optim.Optimizer, recipient_rank: int | None = 0
    ) -> dict[str, Any] | None:
        """The whole state of `optim`, in torch's format, on `recipient_rank`, with None on all; elsewhere None.

        Raises ``ValueError`` for an optimizer of another model.
        """
        model = outermost(self.module)
        optimizer = unit_of(model).optimizer
        if optimizer is not None and current().registry.shell_of(optim) is not optimizer:
            raise ValueError(
                f"this {type(optim).__name__} is not the optimizer that trains {unit_of(model).kind.__name__}: give that"
            )
        return optim.state_dict() if recipient_rank in (None, current().comm.rank) else None

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """What to give to ``optim.load_state_dict()`` on every rank: the whole state, of which that keeps a share."""
        for name in ("state", "param_groups"):
            if name not in full_optim_state_dict:
                raise ValueError(
                    f"full_optim_state_dict has no {name!r}: give every rank what gather_full_optim_state_dict() has given "
                    "to one, for instance by broadcast_object()"
                )
        return {name: full_optim_state_dict[name] for name in ("state", "param_groups")}


FSDP = FullyShardedDataParallel


def get_fsdp_instances(mod: torch.nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """The wrappers in `mod`, from the outside to the inside; with `skip_empty`, those with parameters of their own."""
    found = [each for each in mod.modules() if isinstance(each, FullyShardedDataParallel)]
    return [each for each in found if unit_of(each.module).parameters] if skip_empty else found


# - Small ones


def _in_fp32(value: Any) -> Any:
    short = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if short else value


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _visit(module: torch.nn.Module, fn: Callable[[torch.nn.Module], None]) -> None:
    for each in module.children():
        _visit(each, fn)
    fn(module)


def _clean(_module: torch.nn.Module, keys: Any) -> None:
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [cleaned(name) for name in names]
