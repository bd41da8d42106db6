"""What dear's Accelerator refuses, what a plain one says to a distributed optimizer, and uneven data. On every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, ParallelismConfig
from torch.nn.functional import mse_loss

import dear
from dear.integrations.accelerate import Accelerator
from overlap.core.round import GradientChanged

__all__ = ["mistakes", "uneven"]


def mistakes(
    fresh: Callable[[], None], network: Callable[[], torch.nn.Module], data: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(**given: Any) -> Any:
        fresh()
        return Accelerator(**given)

    with pytest.raises(TypeError, match="dear_options has no 'threshold'"):
        made(dear_options={"threshold": 4})
    with pytest.raises(ValueError, match=r"should be one of .* and is 'ddp'"):
        made(dear_options={"strategy": "ddp"})
    for plugin, what in (
        ("deepspeed_plugin", "DeepSpeed"),
        ("fsdp_plugin", "FSDP"),
        ("megatron_lm_plugin", "Megatron-LM"),
    ):
        with pytest.raises(ValueError, match=rf"{what} \({plugin}\) and dear both decide"):
            made(**{plugin: object()})
    with pytest.raises(ValueError, match="parallelism_config with tp_size=2 and dear both decide"):
        made(parallelism_config=ParallelismConfig(tp_size=2))
    with monkeypatch.context() as patched:
        patched.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(
            ValueError, match=r"FSDP \(ACCELERATE_USE_FSDP=true, as accelerate launch sets it\) and dear"
        ):
            made()
    hooked = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    with pytest.raises(ValueError, match=r"comm_hook=.*'compression': dear\.Compression\.bf16"):
        made(kwargs_handlers=[hooked])
    accelerator, model = made(), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match="hand over the optimizer inside"):
        accelerator.prepare(model, dear.DistributedOptimizer(optimizer, model))
    accelerator, model = made(dear_options={"strategy": "fsdp"}), network()
    with pytest.raises(ValueError, match="no model with its parameters, and strategy 'fsdp' shards the model"):
        accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    accelerator, model = made(), network()
    forgotten = torch.optim.SGD(model.parameters(), 0.1)
    model = accelerator.prepare(model)
    accelerator.backward(model(data[0][0]).sum())
    if dear.size() == 1:
        forgotten.step()
        return
    with pytest.raises(
        RuntimeError, match="SGD was called, which has parameters of a prepared model and was not prepared"
    ):
        forgotten.step()
    fresh()
    accelerator, model = accelerate.Accelerator(cpu=True), network()
    distributed = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    model, optimizer = accelerator.prepare(model, distributed)
    accelerator.backward(model(data[dear.rank()][0]).sum())
    with pytest.raises(
        GradientChanged, match=r"averages its gradients already.*Accelerator of dear\.integrations\.accelerate"
    ):
        optimizer.step()
    distributed.zero_grad()


def uneven(
    fresh: Callable[[], None], network: Callable[[], torch.nn.Module], data: list[Any], options: dict[str, Any]
) -> None:
    """Of five batches rank 0 has three: the third is averaged over one rank alone."""
    fresh()
    accelerator, model, one = Accelerator(dear_options=options), network(), network()
    expected = torch.optim.SGD(one.parameters(), 0.05, momentum=0.9)
    loader: Any = torch.utils.data.DataLoader(data[:20], batch_size=4)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), loader
    )
    passes = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for inputs, targets in loader:
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            passes += 1
    assert passes == {1: 5, 2: 3 - dear.rank()}[dear.size()]
    assert all(sampler.even_batches for sampler in [loader.batch_sampler] if dear.size() > 1)
    for first in range(0, 5, dear.size()):
        chosen = data[4 * first : 4 * min(5, first + dear.size())]
        inputs, targets = (torch.stack(parts) for parts in zip(*chosen, strict=True))
        expected.zero_grad()
        mse_loss(one(inputs), targets).backward()
        expected.step()
    torch.testing.assert_close(accelerator.get_state_dict(model), one.state_dict(), rtol=1e-12, atol=1e-12)
