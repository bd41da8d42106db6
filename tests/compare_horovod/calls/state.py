"""Objects, parameters, optimizers' state, compression, what a build offers."""

from __future__ import annotations

from typing import Any

import torch

from tests.compare_horovod.calls.call import Calls, ones

__all__ = ["CALLS"]

_BUILT = ("mpi_built", "gloo_built", "nccl_built", "cuda_built", "rocm_built", "ddl_built", "ccl_built")
_ENABLED = ("mpi_enabled", "gloo_enabled", "mpi_threads_supported")
_PLACE = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_initialized")


def _linear(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def _broadcast_parameters(hvd: Any, r: int, n: int, form: str) -> Any:
    model = _linear(r)
    forms: dict[str, Any] = {
        "state_dict": model.state_dict(),
        "named": model.named_parameters(),
        "pairs": list(model.named_parameters()),
        "generator": model.parameters(),
        "list": list(model.parameters()),
        "module": model,
        "number": 5,
    }
    hvd.broadcast_parameters(forms[form], root_rank=n - 1)
    return [*model.parameters()]


def _broadcast_buffers(hvd: Any, r: int, n: int) -> Any:
    state = torch.nn.BatchNorm1d(2).state_dict()
    for value in state.values():
        value.fill_(r + 5)
    hvd.broadcast_parameters(state, root_rank=n - 1)
    return state


def _state(optimizer: torch.optim.Optimizer) -> Any:
    state = optimizer.state_dict()
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    return [{key: group[key] for key in ("lr", "momentum", "betas") if key in group} for group in groups], state[
        "state"
    ]


def _broadcast_state(hvd: Any, r: int, n: int, make: Any, who_steps: Any) -> Any:
    """Everybody gets what rank 0 has; `who_steps` tells which ranks have stepped."""
    model = _linear(1.0)
    optimizer = make(model.parameters(), 0.1 * (r + 1))
    if who_steps(r):
        model(ones(1, 2)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return _state(optimizer)


def _momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def _adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr)


def _roundtrip(hvd: Any, dtype: torch.dtype) -> Any:
    sent, context = hvd.Compression.fp16.compress(torch.tensor([1, 2, 3], dtype=dtype))
    return [sent, hvd.Compression.fp16.decompress(sent, context)]


def _same_object(hvd: Any, r: int, n: int) -> Any:
    value = [r]
    return hvd.broadcast_object(value, 0) is value


CALLS: Calls = {
    "place": lambda hvd, r, n: [getattr(hvd, name)() for name in _PLACE],
    **{name: lambda hvd, r, n, name=name: getattr(hvd, name)() for name in (*_BUILT, *_ENABLED)},  # type: ignore[misc]
    "is_homogeneous": lambda hvd, r, n: hvd.is_homogeneous(),
    "init again": lambda hvd, r, n: hvd.init(),
    "broadcast_object": lambda hvd, r, n: hvd.broadcast_object({"epoch": 3, "rank": r}, root_rank=n - 1),
    "broadcast_object, named": lambda hvd, r, n: hvd.broadcast_object([r], 0, name="x"),
    "broadcast_object(None)": lambda hvd, r, n: hvd.broadcast_object(None),
    "broadcast_object, the same one": _same_object,
    "broadcast_object from nowhere": lambda hvd, r, n: hvd.broadcast_object(1, 5),
    "broadcast_object of a lambda": lambda hvd, r, n: hvd.broadcast_object(lambda: 1, 0) is None,
    "allgather_object": lambda hvd, r, n: hvd.allgather_object({"rank": r}),
    "parameters of a state_dict": lambda hvd, r, n: _broadcast_parameters(hvd, r, n, "state_dict"),
    "named parameters": lambda hvd, r, n: _broadcast_parameters(hvd, r, n, "named"),
    "pairs of name and parameter": lambda hvd, r, n: _broadcast_parameters(hvd, r, n, "pairs"),
    "a list of parameters": lambda hvd, r, n: _broadcast_parameters(hvd, r, n, "list"),
    "a generator of parameters": lambda hvd, r, n: _broadcast_parameters(hvd, r, n, "generator"),
    "parameters of a module": lambda hvd, r, n: _broadcast_parameters(hvd, r, n, "module"),
    "parameters of a number": lambda hvd, r, n: _broadcast_parameters(hvd, r, n, "number"),
    "parameters without a root": lambda hvd, r, n: hvd.broadcast_parameters({}),
    "buffers": _broadcast_buffers,
    "SGD's state": lambda hvd, r, n: _broadcast_state(hvd, r, n, _momentum, lambda r: True),
    "SGD's state, before any step": lambda hvd, r, n: _broadcast_state(hvd, r, n, torch.optim.SGD, lambda r: False),
    "Adam's state": lambda hvd, r, n: _broadcast_state(hvd, r, n, _adam, lambda r: True),
    "LBFGS's state": lambda hvd, r, n: hvd.broadcast_optimizer_state(torch.optim.LBFGS(_linear(1).parameters()), 0),
    "the state of a number": lambda hvd, r, n: hvd.broadcast_optimizer_state(3, root_rank=0),
    "state that rank 0 alone has": lambda hvd, r, n: _broadcast_state(hvd, r, n, _momentum, lambda r: r == 0),
    "state that rank 0 alone lacks": lambda hvd, r, n: _broadcast_state(hvd, r, n, _momentum, lambda r: r > 0),
    "Adam's state, before any step": lambda hvd, r, n: _broadcast_state(hvd, r, n, _adam, lambda r: False),
    "Compression": lambda hvd, r, n: [name for name in dir(hvd.Compression) if not name.startswith("_")],
    "Compression.fp16 of fp32": lambda hvd, r, n: _roundtrip(hvd, torch.float32),
    "Compression.fp16 of fp16": lambda hvd, r, n: _roundtrip(hvd, torch.float16),
    "Compression.fp16 of integers": lambda hvd, r, n: _roundtrip(hvd, torch.int32),
}
