"""Scripts of two ranks, of which one knows what the other does not. In each rank: ``python -m tests.local_decisions NAME``.

A script trains with every synchronous strategy in turn and compares with one process, or raises what it promises to raise.
Who comes to the end prints a line; who does not has shown the defect.
"""

from tests.local_decisions import memory, participation
from tests.local_decisions.scenario import SCENARIOS

__all__ = ["SCENARIOS", "memory", "participation"]
