"""fairscale-CO2's ``CO2DistributedDataParallel``: a plain optimizer steps, and the script tells the model of each step.

    loss.backward()                gradients are averaged within a group; at its end .grad has the averages
    optimizer.step()               the script's own
    model.zero_grad()
    model.perform_co2(optimizer)   a local step was made: perhaps it ends a round

A :class:`co2.optimizer.Co2Optimizer` does the work, with an optimizer inside that updates nothing: the first half of its
step runs at the end of backward, the second half in ``perform_co2()``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from co2.backward_end import BackwardEnd
from co2.call_order import CallOrder, follow_steps
from co2.equations import Co2Rule
from co2.fairscale_arguments import cut, in_our_words, refusal_of_all, told_of_cut
from co2.optimizer import Co2Optimizer
from co2.schedule import Schedule
from overlap.job.session import Session, init
from overlap.optimizer.arguments import SharedArguments, check_kinds, refuses_unknown
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.start import agree_on_strategy
from overlap.transport.objects import allgather_object

__all__ = ["CO2DistributedDataParallel"]

log = logging.getLogger("dear")


class CO2DistributedDataParallel(torch.nn.Module):
    """A model whose ranks make local steps, with CO2's outer step on their averages. Not synchronous SGD. On every rank.

    In the place of ``fairscale.experimental.nn.data_parallel.CO2DistributedDataParallel``: a plain optimizer, and after
    each ``optimizer.step()``

        model.zero_grad(set_to_none=True)
        model.perform_co2(optimizer)

    Calls ``co2.init()`` where the script has not. Every rank takes rank 0's parameters and buffers, which the original
    leaves as they are. At the end of every ``backward()`` each ``.grad`` is the average over the rank's group. Call
    ``average_parameters()`` before the model is evaluated or saved: between averages ranks hold different parameters.
    Names in ``state_dict()`` begin with ``module.``, as DDP's do.

    Args:
        module: the model. Parameters that it gets later are not known here.
        nprocs_per_node: ranks in a group, which averages gradients in every backward pass. Divides the number of ranks.
            Where a host has fewer, it is the most that each host has and that divide the number of ranks, and rank 0 logs
            a warning: 8 on a host of 2 are 2, and on hosts of 4 and 2.
        broadcast_buffers: ``average_parameters()`` gives every rank rank 0's buffers. Not before each forward, as in the
            original: every forward would wait for all ranks.
        co2_base_algorithm: LOCALSGD or None. Gossip raises.
        outer_momentum: beta of `co2.equations`, from 0 to below 1. 0.5 as in the original's class; its README takes 0.2.
        outer_momentum_memory_efficient: True. It is so anyway: each rank has 1/P of the outer state.
        outer_frequency: None, or the same as `localsgd_frequency`. The original makes its outer step every 48 steps and
            waits for it. Here every round ends in one that nobody waits for; for rounds of 48 steps, give
            ``localsgd_frequency=48``.
        outer_lr: alpha of `co2.equations`.
        outer_momentum_num_shards: None. There are as many shards as ranks.
        localsgd_frequency: **the round**: local steps that hide one average of all parameters (the paper's tau). What
            :func:`co2.DistributedOptimizer` calls `outer_frequency`, with 12 there and, as in the original, 3 here.
        co2_clip, co2_clip_threshold: whether, and to what, elements of the outer momentum are clipped (phi).
        co2_gap_penalty: a number divides what an average proposes; True: by the measured staleness gap, 1 to 2.
        co2_use_streams, verbose, profile_mode: False.
        process_rank, process_world_size: None, or what the launcher says.
        global_group, master_group, local_node_group: None. Groups follow from `nprocs_per_node`.
        comm_device: None or the CPU.

    Raises ``ValueError`` for any other value, with what stands in its place: on every rank, also where one rank alone has
    it. Other outer rules, and warm-up, are in :func:`co2.DistributedOptimizer`.
    """

    @refuses_unknown(of="CO2DistributedDataParallel")
    def __init__(
        self,
        module: torch.nn.Module,
        nprocs_per_node: int,
        broadcast_buffers: bool = True,
        co2_base_algorithm: Any = None,
        outer_momentum: float = 0.5,
        outer_momentum_memory_efficient: bool = True,
        outer_frequency: int | None = None,
        outer_lr: float = 1.0,
        outer_momentum_num_shards: int | None = None,
        localsgd_frequency: int = 3,
        co2_clip: bool = False,
        co2_gap_penalty: bool | float = 1.0,
        co2_clip_threshold: float = 1.0,
        co2_use_streams: bool = False,
        verbose: bool = False,
        profile_mode: bool = False,
        process_rank: int | None = None,
        process_world_size: int | None = None,
        global_group: Any = None,
        master_group: Any = None,
        local_node_group: Any = None,
        comm_device: torch.device | str | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "module", "__class__")}
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module should be a torch.nn.Module and is a {type(module).__name__}")
        check_kinds({"broadcast_buffers": broadcast_buffers})
        session = init()
        schedule, rule = _agreed_words(session, given)
        agree_on_strategy("co2")
        nprocs = _ranks_of_a_group(session, nprocs_per_node)
        arguments = SharedArguments(elementwise=True, on_nonfinite="ignore")  # of an optimizer that updates nothing
        self.module = module
        parameters = list(module.parameters())
        self._known = {id(param) for param in parameters}
        inner = _NoUpdates(parameters)
        self._outer = _Outer(inner, module, arguments, schedule, rule, nprocs, broadcast_buffers)
        self._checked: weakref.ref[torch.optim.Optimizer] | None = None
        self._told = weakref.WeakSet[torch.optim.Optimizer]()  # of, so far
        self._backward_end = BackwardEnd(parameters, weakref.WeakMethod(self._average_gradients))
        self._calls = CallOrder()
        follow_steps(self._calls, parameters, but=self._outer)  # which a rank out of data steps with its group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        self._backward_end.watch(output)
        return output

    def _average_gradients(self) -> None:
        if self._outer.rounds.retired:
            return  # ranks were lost, and the module has another wrapper
        self._outer.local_step()
        self._calls.passed()

    def perform_co2(self, optimizer: torch.optim.Optimizer, fp32_params: Any = None) -> None:
        """Count a local step of `optimizer`, which was made.

        Every `localsgd_frequency`-th call ends a round. On every rank.

        To be called once per ``optimizer.step()``, not per micro-batch, and of one optimizer; another one may take its
        place for good. Where two step, it is called of one of them, after both. Steps that a GradScaler skips count, too.
        Waits only for the round before, which a whole round has hidden.

        Args:
            optimizer: the plain ``torch.optim.Optimizer`` that has stepped.
            fp32_params: None: the outer state is fp32 whatever the parameters are.

        Raises ``ValueError`` for an optimizer with parameters that are not the module's, ``TypeError`` for none or a
        distributed one, ``RuntimeError`` for two in turn. Where it is forgotten, or called before ``optimizer.step()``, the
        next ``optimizer.step()`` raises ``RuntimeError``.
        """
        if fp32_params is not None:
            raise ValueError("fp32_params: the outer state is kept in fp32 by itself; leave it out")
        if self._checked is None or self._checked() is not optimizer:
            self._check(optimizer)
            self._checked = weakref.ref(optimizer)
            self._told.add(optimizer)
        self._calls.told()
        self._backward_end.forget()
        self._outer.end_local_step()

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, Shell):
            raise TypeError(
                "perform_co2() should get the plain torch.optim.Optimizer that has stepped, and gets a "
                f"{type(optimizer).__name__}"
            )
        if optimizer in self._told:
            raise RuntimeError(
                "perform_co2() is called of two optimizers in turn, and each call counts as a local step: let both step, "
                "and call it once, always of the same one"
            )
        mine = [param for group in optimizer.param_groups for param in group["params"]]
        strangers = [param for param in mine if id(param) not in self._known]
        if strangers:
            raise ValueError(
                f"{len(strangers)} of the optimizer's {len(mine)} parameters are not the module's as it was wrapped, and "
                "no rank would average them: make the optimizer from model.parameters(), and wrap a model that is complete"
            )

    @property
    def local_steps(self) -> int:
        """Steps since the current round began."""
        return self._outer.local_steps

    def average_parameters(self) -> None:
        """Replace all ranks' parameters by their mean; see :meth:`co2.optimizer.Co2Optimizer.average_parameters`.

        On every rank.
        """
        self._outer.average_parameters()

    def outer_state_dict(self) -> dict[str, Any]:
        """The outer state of all ranks, for a checkpoint beside the model's and the optimizer's. On any subset of ranks."""
        return self._outer.outer_state_dict()

    def load_outer_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`outer_state_dict` gave, of any world size. On every rank, beside loading model and optimizer."""
        self._outer.load_outer_state_dict(state)
        self._calls.restart()


def _agreed_words(session: Session, given: dict[str, Any]) -> tuple[Schedule, Co2Rule]:
    """On every rank of the job. Raises on all of them what the first rank raises whose arguments cannot be had."""
    words: tuple[Schedule, Co2Rule] | None = None
    refusal: tuple[type[Exception], str] | None = None
    try:
        words = in_our_words(given, session.comm.rank, session.comm.size)
    except (TypeError, ValueError) as error:
        refusal = type(error), str(error)
    refused = refusal_of_all(allgather_object(session.control, refusal))
    if refused is not None:
        raise refused
    assert words is not None, "or this rank would have refused"
    return words


def _ranks_of_a_group(session: Session, wanted: int) -> int:
    """On every rank of the job."""
    hosts = allgather_object(session.control, session.local_size)
    told = told_of_cut(wanted, hosts, session.comm.size)
    if told is not None and session.comm.rank == 0:
        log.warning("co2: %s", told)
    return cut(wanted, hosts, session.comm.size)


class _Outer(Co2Optimizer):
    """Steps with the script's optimizer. A rank out of data is not told of that: it takes part in averages alone."""

    _follows_group = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """What a rank out of data makes of its group's: gradients are averaged, and no local step is counted."""
        return self._step(closure)


class _NoUpdates(torch.optim.Optimizer):
    """Has the parameters, and leaves them to the script's optimizer."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        return None
