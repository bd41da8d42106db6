"""What a job needs to continue: captured on rank 0, committed to disk, given to every rank of the next job."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from overlap.elastic import stop_request
from overlap.elastic.sampler import ElasticSampler
from overlap.elastic.store import CommitError, store_at
from overlap.job.session import current
from overlap.transport.broadcast import broadcast_structure
from overlap.transport.communicator import ReduceOp
from overlap.transport.objects import broadcast_object
from overlap.transport.operation import all_reduce

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "TorchState"]

log = logging.getLogger("dear")


class HostsUpdatedInterrupt(RuntimeError):
    """The job was asked to stop; it can be launched again, on other hosts too, and continues from its last commit."""


class State(ABC):
    """Something that can be saved, restored, and made the same on all ranks; see :class:`TorchState`.

    All methods are collective: on every rank, at the same point of the script.
    """

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these, in this order, when a job continues from a commit, perhaps with another number of ranks."""
        self._reset_callbacks += callbacks

    def on_reset(self) -> None:
        """Call the reset callbacks, as the job continues from a commit."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state (:meth:`save`), then check whether the job was asked to stop (:meth:`check_host_updates`)."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise :class:`HostsUpdatedInterrupt`, on all ranks, if any rank got SIGUSR1 inside ``elastic.run``."""
        comm = current().comm
        asked = torch.tensor([int(stop_request.received())], device="cpu")
        comm.run(all_reduce(asked, asked, ReduceOp.MAX, label="elastic: asked to stop?"))
        if asked.item():
            raise HostsUpdatedInterrupt(
                "SIGUSR1 asked this job to stop: launch it again to continue from its last commit"
            )

    def reset(self) -> None:  # noqa: B027 - a hook, not a duty
        """What a subclass does before the reset callbacks. By default nothing."""

    def resume(self) -> bool:
        """Take up the last commit of an earlier job, if there is one. By default there is none."""
        return False

    def finished(self) -> None:  # noqa: B027 - a hook, not a duty
        """Clean up, as the job came to its end. By default nothing."""

    @abstractmethod
    def save(self) -> None:
        """Make a commit."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the last commit."""

    @abstractmethod
    def sync(self) -> None:
        """Take rank 0's values."""


class ObjectState(State):
    """Attributes, named by the keyword arguments, that are committed together.

    Args:
        elastic_dir: where commits go, on rank 0's host (default: ``DEAR_ELASTIC_DIR``, else
            ``.dear-elastic/SCRIPT-HASH`` below the working directory, and for the second state that a process makes
            ``2`` below that, and so on).
        attributes: initial values. What has ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers,
            scalers, :class:`ElasticSampler`) is saved and loaded through them, anything else is pickled.
    """

    def __init__(self, *, elastic_dir: str | os.PathLike[str] | None = None, **attributes: Any) -> None:
        super().__init__()
        self._store = store_at(elastic_dir)
        self._names = list(attributes)
        for name, value in attributes.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"a state cannot hold an attribute named {name!r}: the name has a meaning already")
            setattr(self, name, value)

    def attributes(self) -> dict[str, Any]:
        """The attributes that are committed, by name."""
        return {name: getattr(self, name) for name in self._names}

    def _capture(self) -> dict[str, Any]:
        values = {}
        for name in self._names:
            value = getattr(self, name)
            values[name] = _live(value).state_dict() if _is_stateful(value) else value
        return {"world_size": current().comm.size, "values": values}

    def _apply(self, snapshot: dict[str, Any]) -> None:
        values = snapshot["values"]
        if values.keys() != set(self._names):
            raise CommitError(
                f"the commit in {self._store.directory} holds {sorted(values)}, and this state {sorted(self._names)}: it "
                "was made by another script; remove it, or give this job a directory of its own (DEAR_ELASTIC_DIR)"
            )
        for name in self._names:
            mine = getattr(self, name)
            if _is_stateful(mine):
                _live(mine).load_state_dict(values[name])
            else:
                setattr(self, name, values[name])

    def _on_rank_0(self, action: Callable[[], Any]) -> Any:
        """`action`'s result on rank 0, None elsewhere. Raises :class:`CommitError` on all ranks if it fails there."""
        result, failure = None, None
        if current().comm.rank == 0:
            try:
                result = action()
            except Exception as error:
                log.debug("on rank 0", exc_info=True)
                failure = str(error)
        failure = broadcast_object(current().comm, failure, 0)
        if failure is not None:
            raise CommitError(failure)
        return result

    def save(self) -> None:
        """Write a commit on rank 0: it is on the disk when this returns, on any rank."""
        for name in self._names:
            if isinstance(value := getattr(self, name), ElasticSampler):
                value.exchange()
        self._on_rank_0(lambda: self._store.write(self._capture()))

    def restore(self) -> None:
        """Go back to the last commit. Raises :class:`CommitError` where there is none."""
        if not self._load():
            raise CommitError(f"there is no commit in {self._store.directory} to go back to")

    def _load(self) -> bool:
        comm = current().comm
        found = self._on_rank_0(self._store.newest)
        number, snapshot = broadcast_structure(comm, found if found is not None else (0, None), 0)
        if not number:
            return False
        self._apply(snapshot)
        if comm.rank == 0:
            log.info(
                "continuing from commit %d in %s, made by %d rank(s), on %d",
                number,
                self._store.directory,
                snapshot["world_size"],
                comm.size,
            )
        return True

    def resume(self) -> bool:
        """Continue from the newest complete commit in the directory, if there is one; then call the reset callbacks.

        Raises :class:`CommitError` where another job is at work in the directory.
        """
        self._on_rank_0(self._store.claim)
        if not self._load():
            return False
        self.on_reset()
        return True

    def finished(self) -> None:
        """Remove the commits: the next job begins at the beginning."""
        self._on_rank_0(self._store.clear)

    def sync(self) -> None:
        """Take rank 0's values; what was recorded by any rank's sampler stays recorded."""
        for name in self._names:
            if isinstance(value := getattr(self, name), ElasticSampler):
                value.exchange()
        captured = self._on_rank_0(self._capture)
        self._apply(broadcast_structure(current().comm, captured, 0))


class TorchState(ObjectState):
    """The state of a training job: ``TorchState(model=model, optimizer=optimizer, epoch=0, batch=0, sampler=sampler)``.

    `model` and `optimizer` may be left out; whatever else is given is an attribute of the state, as in
    :class:`ObjectState`. Wrap the optimizer (``DistributedOptimizer``) before or after, but before training; the attribute
    stays what was given, and saves and loads what the wrapper has.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        elastic_dir: str | os.PathLike[str] | None = None,
        **attributes: Any,
    ) -> None:
        given = {name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None}
        super().__init__(elastic_dir=elastic_dir, **given, **attributes)


def _live(value: Any) -> Any:
    """Of an optimizer that was wrapped after the state was made, the wrapper: it knows where the optimizer's state is."""
    return current().registry.shell_of(value) if isinstance(value, torch.optim.Optimizer) else value


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
