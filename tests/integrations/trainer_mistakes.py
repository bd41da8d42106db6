"""What DearTrainer refuses, and what a plain Trainer says to an optimizer that was distributed by hand. On every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import dear
from dear.integrations.transformers import DearTrainer
from overlap.core.round import GradientChanged
from tests.integrations.sentences import gpt2, sentences

__all__ = ["mistakes"]


def mistakes(folder: Path) -> None:
    def arguments(**given: Any) -> TrainingArguments:
        common: dict[str, Any] = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "save_strategy": "no"}
        return TrainingArguments(**{**common, **given})

    def made(args: TrainingArguments | None = None, kind: type[Trainer] = DearTrainer, **given: Any) -> Trainer:
        model = given.pop("model", None) or gpt2()
        return kind(model=model, args=args or arguments(), train_dataset=sentences(16), **given)

    with pytest.raises(
        TypeError, match="dear_options has no 'threshold' with strategy 'dear'; is 'threshold_mb' meant"
    ):
        made(dear_options={"threshold": 4})
    with pytest.raises(TypeError, match="dear_options has no 'threshold_mb' with strategy 'wfbp'"):
        made(dear_options={"strategy": "wfbp", "threshold_mb": 4})
    with pytest.raises(ValueError, match=r"'backward_passes_per_step' is not for here.*gradient accumulation"):
        made(dear_options={"backward_passes_per_step": 2})
    with pytest.raises(ValueError, match="ranks have different parameters between its averages"):
        made(dear_options={"strategy": "co2"})
    with pytest.raises(ValueError, match=r"bucket_cap_mb=10 is for DistributedDataParallel.*'threshold_mb': 10"):
        made(arguments(ddp_bucket_cap_mb=10))
    assert made(arguments(ddp_broadcast_buffers=False)).accelerator._dear_options == {"broadcast_buffers": False}
    each_pass = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    with pytest.raises(ValueError, match="sync_each_batch=True reduces gradients in every pass, and dear once"):
        made(arguments(accelerator_config=each_pass))
    for name in ("deepspeed", "fsdp"):
        args = arguments()
        setattr(args, name, "something")
        with pytest.raises(ValueError, match=rf"TrainingArguments\({name}='something'\) and dear both decide"):
            made(args)
    args = arguments()
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"2 GPUs from one process.*torchrun --nproc-per-node 2"):
        made(args)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"number . of 1, and dear number . of 2: .*use_cpu=True"):
            made(arguments(use_cpu=False))
    spread = gpt2()
    spread.hf_device_map = {"transformer": 0, "lm_head": 1}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"device_map spreads it over 2 devices and dear both decide"):
        made(model=spread).train()
    distributed = dear.DistributedOptimizer(torch.optim.SGD((model := gpt2()).parameters(), 0.1), model)
    with pytest.raises(TypeError, match=r"hand over the optimizer inside, and give its options as .*dear_options"):
        made(model=model, optimizers=(distributed, None)).train()
    if dear.size() > 1:
        distributed = dear.DistributedOptimizer(torch.optim.SGD((model := gpt2()).parameters(), 0.1), model)
        with pytest.raises(GradientChanged, match=r"averages its gradients already.*take DearTrainer"):
            made(arguments(), Trainer, model=model, optimizers=(distributed, None)).train()
        distributed.zero_grad()
