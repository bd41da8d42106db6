"""What ranks agree on in calls between backward and step(), beside the round itself."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

MUTATIONS: list[Mutation] = [
    Mutation(
        "a norm with gradients that nobody averages is refused where ranks differ",
        "overlap/core/closing.py",
        "            if mixed:\n",
        "            if mixed and not clipped.number:\n",
        "mpi-2 tests/spmd/test_clipping_strangers.py -k refused_by_name",
    ),
    Mutation(
        "losses that ranks have scaled differently are refused",
        "overlap/core/closing.py",
        "            if scaled:\n",
        "            if scaled and mixed:\n",
        "mpi-2 tests/spmd/test_clipping_strangers.py -k scaler",
    ),
    Mutation(
        "what a call finds on one rank alone is raised on all",
        "overlap/core/closing.py",
        "failed=failure is not None, clipped=clipped.number)",
        "clipped=clipped.number)",
        "mpi-2 tests/spmd/test_between_calls.py -k refused_on_every_rank and wfbp and replan",
    ),
]
