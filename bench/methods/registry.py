"""Methods by name."""

from __future__ import annotations

from bench.methods.method import Method
from bench.methods.spec import meant, parse_spec
from bench.methods.strategies import PACKAGES, Strategy

__all__ = ["METHODS", "method"]

METHODS = (*PACKAGES, "none", "ddp", "ddp-zero", "fsdp2", "horovod")


def method(spec: str) -> Method:
    """The method a text like ``"ddp:bucket_mb=4"`` describes.

    Raises ``ValueError`` for an unknown name or option, :class:`bench.methods.method.MethodUnavailable` for a strategy
    whose package is not here.
    """
    name, options = parse_spec(spec)
    if name in PACKAGES:
        return Strategy(name, options)
    if name == "none":
        from bench.methods.single import Single

        return Single(options)
    if name in ("ddp", "ddp-zero"):
        from bench.methods.ddp import Ddp, DdpZero

        return (Ddp if name == "ddp" else DdpZero)(options)
    if name == "fsdp2":
        from bench.methods.fsdp import Fsdp2

        return Fsdp2(options)
    if name == "horovod":
        from bench.methods.horovod import Horovod

        return Horovod(options)
    raise ValueError(f"the method should be one of {', '.join(METHODS)} and is {name!r}{meant(name, METHODS)}")
