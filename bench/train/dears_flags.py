"""Translates flags and script variables of DeAR's benchmark programs into a method's options. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from bench.methods.spec import parse_spec
from bench.methods.strategies import PACKAGES
from overlap.optimizer.dears_arguments import bucket_mb, fusion

__all__ = ["add_flags", "in_our_words"]

_BYTES_OF_ELEMENT = 4
_COMPRESSING = ("ddp", "ddp-zero", "horovod")  # and ours: methods with an option for it
# Options that one method has, by the variable or flag that asks for it.
_OWNERS = {
    "exclude_parts": "dear",
    "num_nearby_layers": "dear",
    "asc": "mgwfbp",
    "partition": "bytescheduler",
    "use_zero": "ddp",
}
_REFUSED = {
    "fp16": "fp16=1: mixed precision is not benchmarked; fp16_allreduce=1 sends gradients in 16 bits",
    "use_adasum": "use_adasum=1: gradients are averaged here; leave it out",
    "rdma": "rdma=1: what an all-reduce costs is measured here, on whatever network there is; leave it out",
}


def _threshold(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        told = f"a number of MB, of elements (65536 and more), or none is expected, not {text!r}"
        raise argparse.ArgumentTypeError(told) from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add DeAR's flags to a parser.

    Those that are not given are None, and `threshold`, of which None is a value, is 0.
    """
    group = parser.add_argument_group("as DeAR's benchmarks name it")
    switch: dict[str, Any] = {"type": int, "choices": (0, 1), "nargs": "?", "const": 1}
    add = group.add_argument
    add(
        "--threshold", type=_threshold, default=0, metavar="MB", help="of a bucket, or 65536 and more elements; or none"
    )
    add("--num-nearby-layers", type=int, metavar="N", help="layers of a bucket (dear)")
    add("--exclude-parts", metavar="PARTS", help="reducescatter, allgather or both: for time breakdowns (dear)")
    add("--tune", **switch, help="search what tune=True of the method does")
    add("--asc", **switch, help="the ASC rule (mgwfbp)")
    add("--mgwfbp", **switch, help="0: leave gradients apart, as wfbp does (mgwfbp)")
    add("--use-zero", **switch, help="ZeroRedundancyOptimizer (ddp)")
    add("--partition", type=int, metavar="N", help="elements of a partition (bytescheduler)")
    add("--compressor", metavar="NAME", help="none, fp16 or bf16: gradients on the wire")
    add("--fp16-allreduce", **switch, help="the same as --compressor fp16")
    add("--no-cuda", **switch, help="the same as --device cpu")
    add("--nstreams", type=int, metavar="1", help="all communication of a rank is one stream")
    add("--density", type=float, metavar="1", help="gradients are not sparsified")
    for name in _REFUSED:
        add(f"--{name.replace('_', '-')}", **switch, help=argparse.SUPPRESS)


def in_our_words(given: dict[str, Any]) -> None:
    """Take the flags out of `given`, what a command line gave, and put what they ask for into its method and device.

    Raises ``ValueError``, in one line with what there is instead, for what a method does not do.
    """
    flags = {name: given.pop(name) for name in _names()}
    if flags["no_cuda"]:
        if given["device"] == "cuda":
            raise ValueError("no_cuda=1 and device cuda contradict each other: leave one out")
        given["device"] = "cpu"
    given["method"] = _method(given["method"], flags)


def _names() -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return list(vars(parser.parse_args([])))


def _method(spec: str, flags: Mapping[str, Any]) -> str:
    """`spec` with the options that `flags` ask for."""
    for name, told in _REFUSED.items():
        if flags[name]:
            raise ValueError(told)
    if flags["nstreams"] not in (None, 1):
        raise ValueError(
            f"nstreams={flags['nstreams']}: all-reduces of a rank go one after another here; with nstreams=1, wfbp2, "
            "mgwfbp2 and asc2 are wfbp, mgwfbp and asc"
        )
    method, options = parse_spec(spec)
    method = _named(method, flags)
    for name, owner in _OWNERS.items():
        if flags[name] and method.partition("-")[0] != owner:
            raise ValueError(f"{name}={flags[name]} belongs to {owner}, and the method is {method}")
    asked = {**_wire(flags), **_sizes(method, flags)}
    if flags["exclude_parts"]:
        asked["exclude_parts"] = flags["exclude_parts"].replace(",", " ")
    for name in ("asc", "tune"):
        if flags[name]:
            asked[name] = True
    if "compression" in asked and method not in (*PACKAGES, *_COMPRESSING):
        raise ValueError(f"compressor={asked['compression']}: {method} sends gradients as they are here; leave it out")
    for name, value in asked.items():
        if name in options:
            raise ValueError(f"{spec} has {name} already, and {name}={value} is asked for beside it: leave one out")
    given = spec.partition(":")[2]
    together = [*([given] if given else []), *(f"{name}={value}" for name, value in asked.items())]
    return ":".join([method, ",".join(together)]) if together else method


def _named(method: str, flags: Mapping[str, Any]) -> str:
    """The method that is meant: DeAR's mgwfbp and ddp are two each, by a flag."""
    if flags["mgwfbp"] == 0 and method == "mgwfbp":
        return "wfbp"
    if flags["mgwfbp"] == 1 and method != "mgwfbp":
        raise ValueError(f"mgwfbp=1: gradients are merged by mgwfbp, in mgwfbp/ or as --method, and this is {method}")
    return "ddp-zero" if flags["use_zero"] and method == "ddp" else method


def _wire(flags: Mapping[str, Any]) -> dict[str, Any]:
    """What gradients become on the wire."""
    asked = {flags["compressor"] or "none", "fp16" if flags["fp16_allreduce"] else "none"} - {"none"}
    if asked - {"fp16", "bf16"}:
        raise ValueError(
            f"compressor={flags['compressor']}: gradients are neither sparsified nor reduced to signs here; use "
            "compressor=none, fp16 or bf16"
        )
    if len(asked) > 1:
        raise ValueError(f"fp16_allreduce=1 and compressor={flags['compressor']} contradict each other: leave one out")
    if flags["density"] not in (None, 1):
        raise ValueError(f"density={flags['density']:g}: gradients are not sparsified here; use density=1")
    return {"compression": asked.pop()} if asked else {}


def _sizes(method: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """How much travels together."""
    asked: dict[str, Any] = {}
    threshold, layers, partition = (flags[name] for name in ("threshold", "num_nearby_layers", "partition"))
    if method in PACKAGES:
        asked |= fusion(threshold, PACKAGES[method])
        if method == "dear" and threshold is None and layers is None:
            raise ValueError("threshold=none needs num_nearby_layers, e.g. num_nearby_layers=1 for no tensor fusion")
    elif threshold != 0:
        name = {"ddp": "bucket_mb", "ddp-zero": "bucket_mb", "horovod": "fusion_mb"}.get(method)
        if name is None or threshold is None or threshold < 0:
            raise ValueError(
                f"threshold={'none' if threshold is None else f'{threshold:g}'}: {method} has no such setting"
            )
        asked[name] = bucket_mb(threshold)
    if layers is not None:
        asked["num_nearby_layers"] = layers
    if partition is not None:
        asked["partition_mb"] = partition * _BYTES_OF_ELEMENT / 2**20
    return {name: f"{value:.12g}" if isinstance(value, float) else value for name, value in asked.items()}
