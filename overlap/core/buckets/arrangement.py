"""Which buckets an optimizer has: learned in its first iteration, extended, and made anew while it trains."""

from __future__ import annotations

from collections.abc import Sequence

from overlap.core.bucket import Slot, line
from overlap.core.buckets.conversion import changes
from overlap.core.buckets.heap import give_back
from overlap.core.buckets.observer import Observer
from overlap.core.buckets.planner import Planner
from overlap.core.feature import Feature, Policy, StatePlacement, listeners
from overlap.core.gathering import Transit
from overlap.core.round import Round
from overlap.core.unsharding import Unsharder
from overlap.plan.plan import Facts, Plan
from overlap.plan.strategy import Strategy
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object, compare

__all__ = ["Arrangement"]


class Arrangement:
    """Asks `planner` for buckets when all ranks are there to agree, and moves values and state into them.

    Who needs to know of new buckets is told: `policy`, and those `features` that listen.
    """

    def __init__(
        self,
        comm: Communicator,
        planner: Planner,
        round: Round,
        transit: Transit,
        unsharder: Unsharder,
        states: StatePlacement,
        policy: Policy,
        features: Sequence[Feature],
    ) -> None:
        self._comm, self._planner, self._round, self._transit = comm, planner, round, transit
        self._unsharder = unsharder
        self._slots, self._states, self._policy = planner.slots, states, policy
        self._claims = listeners(features, "claims")
        self._admit = listeners(features, "admit")
        self._on_planned = listeners(features, "planned")
        self.observer: Observer | None = Observer(self._slots, comm.stamps())  # until the first step
        self._devices = {slot.index: slot.param.device.type for slot in self._slots}  # when the optimizer was wrapped
        self._replaced = False  # since the last step; until zero_grad() `.grad` shows the buckets from before

    @property
    def learning(self) -> bool:
        """Until the first step: nothing is in buckets, nothing is sharded, gradients are the user's own tensors."""
        return self.observer is not None

    def begin(self, units: Sequence[tuple[int, ...]]) -> None:
        """Make buckets now, for layers that are used in this order; nothing is observed. On every rank."""
        self.observer = None
        self._claim(self._slots)
        nothing: frozenset[int] = frozenset()
        unseen = frozenset(slot.index for slot in self._slots if not slot.held)
        arrivals = tuple(index for unit in reversed(units) for index in reversed(unit))
        fires = (1,) * len(self._slots)
        self._planner.begin(Facts(tuple(units), arrivals, fires, unseen, nothing), fires, 1, nothing, fill=False)
        self._follow_plan()

    def learn(self) -> list[bool] | None:
        """End the first iteration: plan from what rank 0 saw. On every rank, inside the first step.

        Returns, by slot, whether some rank has a gradient for it; None after the first iteration, when nobody is asked.
        """
        if self.observer is None:
            return None
        given = {slot.index for slot in self._slots if slot.param.grad is not None}  # by hooks, or by hand
        # torch steps what is frozen and has a gradient.
        kept = {slot.index for slot in self._slots if not slot.param.requires_grad and slot.param.grad is not None}
        mine = (self.observer.finish(), [line(slot) for slot in self._slots], given, kept)
        learned = allgather_object(self._comm, mine)
        compare("parameters", [lines for _, lines, _, _ in learned])  # they may have been converted since the start
        self._refuse_moved()
        found = [facts for facts, _, _, _ in learned]
        everywhere = set().union(*(given for _, _, given, _ in learned))
        used = [slot.index in everywhere for slot in self._slots]
        if not everywhere and not any(any(facts.fires) for facts in found):
            # A step before any backward, which does nothing, teaches nothing.
            self.observer = Observer(self._slots, self._comm.stamps())
            return used
        facts = next((facts for facts in found if any(facts.fires)), found[0])  # rank 0 may have joined at once
        fires = [max(counts) for counts in zip(*(facts.fires for facts in found), strict=True)]
        self.observer = None
        self._claim(self._slots)
        self._planner.begin(facts, fires, self._round.passes, set().union(*(kept for *_, kept in learned)))
        self._follow_plan()
        return used

    @property
    def unplanned(self) -> list[Slot]:
        """Parameters in no bucket that may come to take part: frozen or added since the plan. The same on every rank."""
        return [] if self.learning else [slot for slot in self._slots if slot.bucket is None and not slot.claimed]

    def extend(self, late: Sequence[Slot]) -> None:
        """Buckets for what takes part on any rank; `late` are those that do on this one. On every rank, inside a step."""
        found = allgather_object(self._comm, [slot.index for slot in late])
        joining = [self._slots[index] for index in sorted(set().union(*found))]
        self._admitted(joining)
        self._claim(joining)
        self._planner.extend([slot for slot in joining if not slot.claimed])
        self._follow_plan()

    def release(self) -> None:
        """Give back, once, what replaced buckets had. Inside a step, when no `.grad` shows them any more."""
        if self._replaced:
            self._replaced = False
            give_back()

    def preview(self, strategy: Strategy) -> Plan:
        """The buckets that :meth:`replan` would make. After the first step; communicates nothing."""
        return self._planner.preview(strategy)

    def replan(self, strategy: Strategy) -> None:
        """Go on with `strategy`'s buckets; parameters and the optimizer's state move over, bit for bit.

        On every rank, between ``step()`` and the next backward; :meth:`may_replan` comes before it.
        """
        self.may_replan(strategy)
        if self.learning:
            self._planner.strategy = strategy
            return
        self._transit.arrive_all()
        self._unsharder.open()
        self._rebuild(strategy)

    def may_replan(self, strategy: Strategy) -> None:
        """On one rank. Raises ``RuntimeError`` when gradients are there, and ``ValueError`` for a strategy that updates or
        gathers in another way.
        """
        self._planner.strategy.refuse_successor(strategy)
        if self._round.touched:
            raise RuntimeError("gradients arrived since the last step(); replan after step() or zero_grad()")
        mine = [] if self.learning else changes(self._slots)
        if mine:
            raise RuntimeError(
                f"parameter {mine[0].name!r} was converted from {mine[0].before} to {mine[0].now} since the last step(); "
                "replan after the next one"
            )

    def follow_conversion(self) -> None:
        """New buckets for parameters that all ranks have converted alike. On every rank, inside a step."""
        if self._unsharder.active:
            raise RuntimeError(
                "the model was converted to another type while each rank has a share of its values: convert it before the "
                "optimizer is made"
            )
        self._refuse_moved()
        self._admitted([slot for slot in self._slots if slot.bucket is not None])
        for slot in self._slots:
            if slot.converted:
                slot.keep_layout()
        self._rebuild(self._planner.strategy)

    def _refuse_moved(self) -> None:
        for slot in self._slots:
            before, now = self._devices.get(slot.index), slot.param.device.type
            if before is not None and before != now:
                raise RuntimeError(
                    f"parameter {slot.name!r} was on {before} when the optimizer was wrapped and is on {now} now; what "
                    "carries gradients was chosen for that device; move the model before wrapping"
                )

    def _admitted(self, slots: Sequence[Slot]) -> None:
        for admit in self._admit:
            admit(slots)

    def _claim(self, slots: Sequence[Slot]) -> None:
        for claims in self._claims:
            for index in claims(slots):
                self._slots[index].claimed = True

    def _rebuild(self, strategy: Strategy) -> None:
        """Other buckets for the same parameters, whose values and state move over."""
        planner = self._planner
        order, shards = planner.draft(strategy)
        if planner.shards is not None and shards is not None:
            self._states.moved(planner.order, planner.shards, shards)
        with self._states.updating():  # until now questions were answered from the old pieces
            planner.install(strategy, order, shards)
        self._follow_plan()
        self._replaced = True

    def _follow_plan(self) -> None:
        planner = self._planner
        self._transit.entry = planner.unguarded
        self._policy.planned(planner.order, planner.shards, planner.reread)
        for told in self._on_planned:
            told(planner.order)
