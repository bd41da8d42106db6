"""Suggests how many steps a round should have, from what all ranks have measured."""

from __future__ import annotations

import torch

from co2.equations import Timing
from co2.lifetime import Shutdown
from co2.pace import ENOUGH, hiding
from overlap.job.session import current
from overlap.transport.objects import allgather_object

__all__ = ["suggest_frequency"]


def suggest_frequency(model: torch.nn.Module) -> int:
    """The smallest `outer_frequency` (`localsgd_frequency`) that hides the exchange of all parameters behind local steps.

    From the medians of the last rounds: the shortest step and the longest exchange of any rank. The same on every rank,
    and to be called on every rank, when `model` has trained for three rounds. Shorter rounds wait for the network, and
    longer ones learn from older averages.

    Raises ``RuntimeError`` on every rank before that, or where no co2 optimizer trains `model`; ``ValueError`` under an
    outer rule that waits, where nothing is hidden, and where `overlap_steps` hide a fragment.
    """
    session = current()
    service = session.services.get("co2")
    rounds = service.training(list(model.parameters())) if isinstance(service, Shutdown) else None
    if rounds is None:
        raise RuntimeError("no co2 optimizer trains this model: wrap its optimizer first, and train for three rounds")
    if rounds.waits:
        raise ValueError(
            f"outer={rounds.rule.name!r} waits for the exchange at the end of every round, whatever its length: longer "
            'rounds wait less often, and "co2" and "eager" do not wait'
        )
    if rounds.rule.timing is Timing.OVERLAPPED:
        raise ValueError(
            f"outer={rounds.rule.name!r} hides the exchange of a fragment behind overlap_steps, not behind a round: "
            "optimizer.explain() says how many do"
        )
    rounds.following.call("suggest_frequency()", 0)
    pace = rounds.pace
    known = allgather_object(session.control, (pace.step, pace.exchange) if pace.rounds >= ENOUGH else None)
    paces = [one for one in known if one is not None]
    if len(paces) < len(known):
        raise RuntimeError(
            f"rank {known.index(None)} has measured fewer than {ENOUGH} rounds: call suggest_frequency() after "
            f"{ENOUGH + 1} rounds of training"
        )
    return hiding(min(step for step, _ in paces), max(exchange for _, exchange in paces))
