"""Hugging Face's Trainer over dear: use DearTrainer instead of Trainer, or put DearTrainerMixin before your own.

from dear.integrations.transformers import DearTrainer

trainer = DearTrainer(model=model, args=args, train_dataset=data, dear_options={"threshold_mb": 4})

Everything else is Trainer's: arguments, callbacks, evaluation, checkpoints, which a plain Trainer resumes and the other way
round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainingArguments

import dear
from dear.integrations.accelerate import refuse_other_ways, take_over
from dear.integrations.options import checked

__all__ = ["DearTrainer", "DearTrainerMixin"]


class DearTrainerMixin:
    """Makes a Trainer average gradients by dear: ``class MyTrainer(DearTrainerMixin, SomebodysTrainer)``.

    Args:
        args, kwargs: those of the Trainer.
        dear_options: arguments of :func:`dear.DistributedOptimizer`: ``{"strategy": "oss"}``.

    Call ``dear.init()`` before ``TrainingArguments(…)``; under torchrun it may be left out. On every rank. Raises
    ``ValueError`` for arguments that dear cannot honour, ``TypeError`` for options that there are not, and ``RuntimeError``
    where Trainer and dear see different jobs.
    """

    def __init__(self, *args: Any, dear_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._dear_options = checked(dear_options)
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make Trainer's accelerator, as dear's."""
        trainer: Any = self
        _refuse(trainer.args)
        refuse_other_ways({})
        dear.init()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        take_over(trainer.accelerator, self._dear_options)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer. A sharded model is whole where it generates, as each rank makes passes of its own there."""
        trainer: Any = self
        generates = getattr(trainer.args, "predict_with_generate", False)
        with dear.whole(trainer.model) if generates else contextlib.nullcontext():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]


class DearTrainer(DearTrainerMixin, Trainer):
    """``transformers.Trainer`` over dear; see :class:`DearTrainerMixin`."""


def _refuse(args: TrainingArguments) -> None:
    """Raise ``ValueError`` for what trains in another way, before Accelerate looks for what it needs."""
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        value = getattr(args, name, None)
        if value:
            raise ValueError(
                f"TrainingArguments({name}={value!r}) and dear both decide how gradients and state are spread over ranks: "
                "use one of them"
            )
    if args.n_gpu > 1:
        raise ValueError(
            f"Trainer would train on {args.n_gpu} GPUs from one process, by DataParallel; dear needs one process for each: "
            f"start them by dearrun or torchrun, `torchrun --nproc-per-node {args.n_gpu} script.py`"
        )
