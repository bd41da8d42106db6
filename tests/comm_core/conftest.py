"""These tests run inside every rank of a job of any size: over MPI under mpirun, over the local backend alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import comm_core


@pytest.fixture(scope="session")
def world() -> comm_core.Communicator:
    launched = any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    return comm_core.mpi() if launched else comm_core.local()


@pytest.fixture
def comm(world: comm_core.Communicator) -> Iterator[comm_core.Communicator]:
    """The communicator of all ranks, which begin and end every test together."""
    world.barrier()
    yield world
    world.barrier()
    assert world.pending() == []
