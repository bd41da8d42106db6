"""A process of a job of Accelerate's: runs scripts with the library's own Accelerator, under DDP, and with dear's.

python -m tests.integrations.accelerate_job FOLDER SCRIPT...

Ranks compare the two; rank 0 leaves what the own one came to as FOLDER/SCRIPT.pt. One process compares its own with that.
"fsdp SCRIPT" is the same with sharded models.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

import dear
from dear.integrations.accelerate import Accelerator
from tests.integrations.accelerate_mistakes import mistakes, uneven

Made = dict[str, Any]
Make = Callable[..., Any]
WHOLE = 8  # samples of all processes together, in one pass


def fresh() -> None:
    """As in a process of its own: Accelerate's state is the process's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def points(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return list(zip(inputs, inputs.sin().sum(1, keepdim=True), strict=True))


class Endless(IterableDataset[Any]):
    """Without a length."""

    def __iter__(self) -> Any:
        return iter(points(48))


def network(seed: int = 1, inputs: int = 6, outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs)
    ).double()


def batches(data: Any, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(data, batch_size=WHOLE // dear.size(), shuffle=shuffle)


def values(accelerator: Any, *models: nn.Module) -> Made:
    plain = nn.ModuleList([accelerator.unwrap_model(model) for model in models])
    return {name: value.detach().clone() for name, value in plain.state_dict().items()}


def accumulated(make: Make, folder: Path) -> Made:
    """With everything in another order, clipping, a scheduler, an incomplete last window, metrics over an uneven set."""
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    accelerator = make(gradient_accumulation_steps=3, dataloader_config=order)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / dear.size()))
    optimizer, train, schedule, test, model = accelerator.prepare(
        optimizer, batches(points(64), shuffle=True), schedule, batches(points(21)), model
    )
    norms, rates = [], []
    for _ in range(2):
        for inputs, targets in train:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                rates.append(schedule.get_last_lr()[0])
    predicted = []
    with torch.no_grad():
        for inputs, targets in test:
            predicted.append(accelerator.gather_for_metrics(model(inputs) - targets))
    error = torch.cat(predicted)
    assert len(error) == 21
    weights = folder / f"weights-{dear.size()}-{make.__name__}"
    accelerator.save_model(model, str(weights))
    accelerator.wait_for_everyone()
    saved, kept = load_file(weights / "model.safetensors"), values(accelerator, model)
    assert len(saved) == len(kept)
    compare({f"0.{name}": value for name, value in saved.items()}, kept, 0.0)
    return {
        **values(accelerator, model),
        "norms": torch.stack(norms),
        "rates": torch.tensor(rates),
        "error": error.square().mean(),
    }


def adversaries(make: Make, folder: Path) -> Made:
    """Two models and two optimizers in one prepare(), accumulated together; the optimizers come first."""
    accelerator = make(gradient_accumulation_steps=2)
    maker, judge = network(1, 6, 6), network(2)
    both = torch.optim.Adam(judge.parameters(), 0.01), torch.optim.Adam(maker.parameters(), 0.02)
    of_judge, of_maker, data, maker, judge = accelerator.prepare(*both, batches(points(48)), maker, judge)
    for inputs, _ in data:
        with accelerator.accumulate(maker, judge):
            accelerator.backward((judge(inputs) - judge(maker(inputs).detach())).mean() + judge(inputs).square().mean())
            of_judge.step()
            of_judge.zero_grad()
        # The maker's loss leaves gradients in the judge, which its next zero_grad() drops, as scripts of this kind have it.
        with accelerator.no_sync(judge):
            accelerator.backward(judge(maker(inputs)).mean())
        of_maker.step()
        of_maker.zero_grad()
        judge.zero_grad()
    return values(accelerator, maker, judge)


def shared(make: Make, folder: Path) -> Made:
    """One optimizer over two models, another over a part of the second, prepared one after the other."""
    accelerator = make()
    body, head = network(1, 6, 4), network(2, 4)
    body, head = accelerator.prepare(body), accelerator.prepare(head)
    plain = accelerator.unwrap_model(head)
    first = accelerator.prepare(torch.optim.SGD([*body.parameters(), *plain[0].parameters()], 0.05, momentum=0.9))
    second, data = accelerator.prepare(torch.optim.Adam(plain[2:].parameters(), 0.01), batches(points(48)))
    for inputs, targets in data:
        accelerator.backward(mse_loss(head(body(inputs)), targets))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return values(accelerator, body, head)


def dispatched(make: Make, folder: Path) -> Made:
    """Rank 0 reads whole batches of a set without a length, and gives everybody a part; passes are kept apart by hand."""
    accelerator = make(dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=True))
    model = network()
    data = DataLoader(Endless(), batch_size=WHOLE)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05), data)
    for number, (inputs, targets) in enumerate(data):
        if number % 2 == 0:
            with accelerator.no_sync(model):
                accelerator.backward(mse_loss(model(inputs), targets))
            continue
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return values(accelerator, model)


def bf16(make: Make, folder: Path) -> Made:
    accelerator = make(mixed_precision="bf16")
    model = network().float()
    data = [(inputs.float(), targets.float()) for inputs, targets in points(48)]
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05), batches(data))
    for inputs, targets in data:
        with accelerator.autocast():
            loss = mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return values(accelerator, model)


def scaled(make: Make, folder: Path) -> Made:
    """Accelerate has a GradScaler on GPUs alone. One for CPUs in its place: where one rank overflows, all skip the step."""
    accelerator = make()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step / dear.size()))
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, batches(points(48)))
    skipped, rates = [], []
    for number, (inputs, targets) in enumerate(data):
        loss = mse_loss(model(inputs), targets)
        overflows = number % 3 == 1 and accelerator.is_main_process
        accelerator.backward(loss * float("inf") if overflows else loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(schedule.get_last_lr()[0])
    assert skipped == [number % 3 == 1 for number in range(6)], skipped
    scale = torch.tensor(accelerator.scaler.get_scale())
    return {**values(accelerator, model), "scale": scale, "rates": torch.tensor(rates)}


def resumed(make: Make, folder: Path) -> Made:
    """Leaves its state where it is half done. Continues from each state that is there already, of whichever job."""
    left = folder / f"state-{dear.size()}-{make.__name__}"
    made = {}
    for loaded in (None, *sorted(folder.glob("state-*"))):
        fresh()
        accelerator = make()
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.02)
        model, optimizer, data = accelerator.prepare(model, optimizer, batches(points(48)))
        if loaded is not None:
            accelerator.load_state(str(loaded))
        collected: list[Made] = []
        accelerator.register_save_state_pre_hook(lambda _models, found, _to, to=collected: to.extend(found))
        for number, (inputs, targets) in enumerate(data if loaded is None else accelerator.skip_first_batches(data, 3)):
            if number == 3 and loaded is None:
                accelerator.save_state(str(left))
                assert [bool(each) for each in collected] == [accelerator.is_main_process or make is not sharded]
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        made = values(accelerator, model)
        if loaded is None:
            expected = made
        compare(made, expected, 1e-10)
    return made


SCRIPTS = {
    function.__name__: function for function in (accumulated, adversaries, shared, dispatched, bf16, scaled, resumed)
}


def own(**arguments: Any) -> Any:
    return accelerate.Accelerator(cpu=True, **arguments)


def sharded(**arguments: Any) -> Any:
    return Accelerator(dear_options={"strategy": "fsdp", "threshold_mb": 0.001}, **arguments)


def run(name: str, make: Make, folder: Path) -> Made:
    fresh()
    return SCRIPTS[name.removeprefix("fsdp ")](make, folder)


def compare(mine: Made, theirs: Made, tolerance: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, k=name: f"{k}: {m}"
        )


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    warnings.simplefilter("ignore")
    dear.init()
    for name in names:
        if name == "mistakes":
            with pytest.MonkeyPatch.context() as patched:
                mistakes(fresh, network, points(20), patched)
            for options in ({}, {"strategy": "fsdp", "threshold_mb": 0.001}):
                uneven(fresh, network, points(20), options)
            continue
        expected = run(name, own, folder)
        make = sharded if name.startswith("fsdp ") else Accelerator
        compare(run(name, make, folder), expected, 1e-3 if name.endswith("bf16") else 1e-10)
        left = folder / f"{name}.pt"
        if dear.size() == 1 and left.exists():
            compare(expected, torch.load(left), 1e-10)
        elif dear.rank() == 0:
            torch.save(expected, left)
        if dear.rank() == 0:
            print(f"({name}) the same", flush=True)


if __name__ == "__main__":
    main()
