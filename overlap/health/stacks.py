"""Finds out where threads are: in the script's own code, or waiting inside ours."""

from __future__ import annotations

import faulthandler
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from comm_core import modules_of_thread

__all__ = ["Place", "frames", "is_front_door", "of_thread", "place", "places"]

#: Modules in which Python itself waits for another thread; who called them is who waits.
_LOCKS = frozenset({"threading", "queue", "concurrent.futures._base"})


_SHOWN_FRAMES = 6


class Place(Enum):
    """The place in the code that a thread executes."""

    OUTSIDE = "the script's code, or a library's"
    INSIDE = "a function of ours"
    AT_A_LOCK = "a wait for another thread, in a function of ours"


def is_front_door(names: Mapping[str, Any]) -> bool:
    """Whether `names` are those of a package that scripts import: a strategy's, with all of Horovod's functions."""
    return (
        "__path__" in names
        and "DistributedOptimizer" in names
        and getattr(names.get("init"), "__module__", "").startswith("overlap.")
    )


def place(modules: Iterable[str]) -> Place:
    """The place of a thread whose frames are in `modules`, innermost first.

    Whatever a function of ours calls in another library counts as that library's: it computes, or is stopped in a debugger.
    """
    at_a_lock = False
    for module in modules:
        if module in _LOCKS:
            at_a_lock = True
            continue
        package = module.partition(".")[0]
        ours = package == "overlap" or is_front_door(vars(sys.modules.get(package, object)))
        return (Place.AT_A_LOCK if at_a_lock else Place.INSIDE) if ours else Place.OUTSIDE
    return Place.OUTSIDE


def places(threads: Iterable[int]) -> set[Place]:
    """The places of those `threads` (identifiers) that execute Python code."""
    return {place(modules) for thread in threads if (modules := modules_of_thread(thread))}


def frames(thread: int) -> tuple[str, ...]:
    """The innermost lines of code in which a thread (an identifier) is, the innermost last, as in a traceback.

    Written by Python's fault handler, which holds all threads up meanwhile and makes no objects of their frames: CPython
    3.11 crashes now and then when somebody walks frames that return meanwhile.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    return of_thread(text, thread)[-_SHOWN_FRAMES:]


def of_thread(text: str, thread: int) -> tuple[str, ...]:
    """The frames of one thread, the innermost last, from the fault handler's report about all threads (pure)."""
    heads = list(re.finditer(r"^(?:Thread|Current thread) 0x([0-9a-f]+) .*$", text, re.MULTILINE))
    for head, behind in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=True):
        if int(head[1], 16) == thread:
            lines = text[head.end() : behind].splitlines()
            return tuple(line.strip() for line in reversed(lines) if line.startswith("  File "))
    return ()
