"""Translates the names that DeAR's own repository, and MG-WFBP's, give to arguments of ``DistributedOptimizer``. Pure.

Each is honoured where it means something here, dropped where what it asks for is so anyway, or refused with what stands in
its place. The page "From DeAR" has the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeVar

from overlap.transport.compression import FP16Compressor, NoneCompressor

__all__ = ["bucket_mb", "fusion", "in_our_words", "understands_dears_names"]

_Make = TypeVar("_Make", bound=Callable[..., Any])

_ALL_ELEMENTS = 2**29  # the threshold with which its scripts put all gradients into one bucket
_ELEMENTS_FROM = 2**16  # as MB it would be 64 GB, and as elements it is a quarter of a MB
_EVERY_TENSOR = 2**31  # groups: as many as there are tensors
_COMPRESSORS = ("topk", "eftopk", "gaussian", "signum", "efsignum")
# What stands in the place of arguments that may be False, and of those that may be None.
_NOT_TRUE = {
    "is_sparse": "gradients are not sparsified here; compression=Compression.bf16 halves their bytes",
    "momentum_correction": "it corrects sparsified gradients, and gradients are not sparsified here",
    "multi_job_scheduling": "gradients are reduced as soon as they are ready; leave it out",
}
_NOT_GIVEN = {
    "norm_clip": "clip between backward() and step() with torch.nn.utils.clip_grad_norm_",
    "writer": "optimizer.save_profile() and start_timeline() write what a step takes",
}
# Theirs choose constants for a cost that is measured here, or say how much is sent of what is_sparse=True would leave out,
# or where to write what neither of the two writes.
_DROPPED = ("density", "gradient_path", "rdma")


def understands_dears_names(make: _Make) -> _Make:
    """A decorator of a strategy's ``DistributedOptimizer`` that translates DeAR's names, or refuses them with ours."""
    package = make.__module__.partition(".")[0]

    @functools.wraps(make)
    def understanding(*args: Any, **given: Any) -> Any:
        strategy = given.get("strategy", package) if package == "dear" else package
        if len(args) > 2:
            args = (*args[:2], _compression(args[2], fp16=False), *args[3:])
        return make(*args, **in_our_words(given, strategy, model_given=len(args) > 1))

    return understanding  # type: ignore[return-value]  # it takes what `make` takes, and more


def in_our_words(given: Mapping[str, Any], strategy: str, *, model_given: bool = False) -> dict[str, Any]:
    """Keyword arguments for a strategy's ``DistributedOptimizer``, from those that a script of DeAR's gives.

    `model_given`: the model, or names, stand before them. Names that are neither ours nor DeAR's stay. Raises
    ``TypeError`` for two names of one thing and ``ValueError`` for what is not done here, with the remedy.
    """
    ours = dict(given)
    if "model" in ours:
        if model_given or "named_parameters" in ours:
            raise TypeError("model is another name of named_parameters, the second argument, and both are given")
        ours["named_parameters"] = ours.pop("model")
    for name, instead in {**_NOT_TRUE, **_NOT_GIVEN}.items():
        value = ours.pop(name, None)
        if value is not None if name in _NOT_GIVEN else value:
            raise ValueError(f"{name}={value!r}: {instead}")
    for name in _DROPPED:
        ours.pop(name, None)
    if "compression" in ours or "fp16" in ours:
        ours["compression"] = _compression(ours.get("compression"), ours.pop("fp16", False))
    merges = ours.pop("mgwfbp", None)
    if merges and strategy != "mgwfbp":
        raise ValueError("mgwfbp=True is the strategy 'mgwfbp': import mgwfbp, or give strategy='mgwfbp' to dear's")
    merges_none = strategy == "mgwfbp" and merges is not None and not merges
    if merges_none:
        strategy = "wfbp"  # from here on, names mean what they mean there
    if "threshold" in ours:
        threshold = ours.pop("threshold")  # theirs merges by costs alone, too, where it merges
        for name, value in ({} if merges else fusion(threshold, strategy)).items():
            if name in ours:
                raise TypeError(f"threshold is another name of {name}, and both are given: give one")
            ours[name] = value
    if merges_none:
        _merge_nothing(ours)
    if "seq_layernames" in ours or "layerwise_times" in ours:
        names, times = ours.pop("seq_layernames", None), ours.pop("layerwise_times", None)
        if times is not None or names is not None:
            ours["layerwise_times"] = _times(names, times, strategy)
    return ours


def _merge_nothing(ours: dict[str, Any]) -> None:
    """Arguments of mgwfbp's ``DistributedOptimizer`` with which it reduces every tensor by itself, as wfbp does."""
    for name in ("asc", "merge_below_kb", "tune"):
        if ours.get(name):
            raise ValueError(f"{name}={ours[name]!r} is about merging, and mgwfbp=False merges nothing: give one")
    if not ours.get("num_groups") and ours.get("groups") is None:
        ours["num_groups"] = _EVERY_TENSOR
    ours["profile_steps"] = 0  # nothing follows from times


def _compression(compression: Any, fp16: Any) -> Any:
    """``None`` and DeAR's compressor that does nothing are ours; `fp16` narrows what is sent."""
    name = getattr(compression, "name", None) if type(compression).__name__.endswith("Compressor") else None
    if name in _COMPRESSORS:
        raise ValueError(
            f"compression={name}: gradients are not sparsified here; Compression.bf16 or .fp16 halves their bytes"
        )
    if compression is None or name == "none":
        compression = NoneCompressor
    if not fp16 or compression is FP16Compressor:
        return compression
    if compression is not NoneCompressor:
        raise ValueError(
            f"fp16=True is compression=Compression.fp16, and compression={compression!r} is given: give one"
        )
    return FP16Compressor


def fusion(threshold: Any, strategy: str) -> dict[str, Any]:
    """Arguments of a strategy's ``DistributedOptimizer`` that fuse as far as `threshold`, in DeAR's forms, says.

    0: as the strategy does by itself. None: not by size. Below 0: everything. Raises ``TypeError`` for what is no number,
    ``ValueError`` where the strategy fuses in another way.
    """
    if threshold is None:
        if strategy in ("oss", "fsdp", "osdp"):
            own = "threshold_mb=0 gives every layer its own bucket"
            raise ValueError(f"threshold=None: {strategy} fuses by size alone; {own}")
        return {"threshold_mb": None} if strategy == "dear" else {}
    if not isinstance(threshold, Real) or isinstance(threshold, bool) or threshold != threshold:
        raise TypeError(
            f"threshold should be a number of MB, of elements (65536 and more) or None and is {threshold!r}"
        )
    number = float(threshold)
    if number == 0:
        return {}
    if strategy in ("dear", "oss", "fsdp", "osdp"):
        return {"threshold_mb": bucket_mb(number)} if number > 0 else {"num_groups": 1}
    if strategy == "wfbp" and not 0 < number < _ALL_ELEMENTS:
        return {"num_groups": 1}
    raise ValueError(f"threshold={number:.10g}: {_fuses_instead(strategy, bucket_mb(number) if number > 0 else 25)}")


def _fuses_instead(strategy: str, mb: float) -> str:
    """What there is for users who give a `strategy` the threshold of another one."""
    dears = f"dear fuses with threshold_mb={mb:g}"
    if strategy == "mgwfbp":
        return f"mgwfbp merges by cost, and anyway below merge_below_kb={mb * 1024:g}; {dears}"
    if strategy == "bytescheduler_adapter":
        return f"ByteScheduler cuts layers, with partition_mb, and fuses none; {dears}"
    if strategy == "wfbp":
        return f"wfbp reduces every tensor alone (0) or all in one (-1); {dears}"
    return f"{strategy} has no such setting; {dears}"


def bucket_mb(threshold: float) -> float:
    """MB of 2^20 bytes, from DeAR's two ways to say it: MB, or elements of 4 bytes, which are never as few."""
    return threshold * 4 / 2**20 if threshold >= _ELEMENTS_FROM else threshold


def _times(names: Any, times: Any, strategy: str) -> Any:
    if strategy != "mgwfbp":
        raise ValueError(f"layerwise_times belong to the strategy 'mgwfbp', not to {strategy!r}: leave them out")
    if times is None:
        raise ValueError(
            "seq_layernames are the names of layerwise_times, and no times are given: give both or neither"
        )
    if names is None or isinstance(times, Mapping):
        return times
    names, times = list(names), list(times)
    if len(names) != len(times):
        raise ValueError(
            f"seq_layernames has {len(names)} names and layerwise_times has {len(times)} numbers: give as many"
        )
    return dict(zip(names, times, strict=True))
