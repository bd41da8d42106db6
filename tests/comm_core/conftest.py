"""These tests run inside every rank of a job of any size: over MPI under mpirun, over the local backend alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import comm_core


@pytest.fixture(scope="session")
def world() -> comm_core.Communicator:
    launched = any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if not launched:
        return comm_core.local()
    over_mpi = comm_core.mpi()
    backend = os.environ.get("COMM_CORE_TEST_BACKEND", "mpi")
    if backend == "mpi":
        return over_mpi
    apart = backend == "sockets"  # as on machines of their own, where several connections share what there is to send
    sockets = 3 if apart else 1
    exchange = comm_core.exchange_over(over_mpi)
    return comm_core.tcp(over_mpi.rank, over_mpi.size, exchange, sockets=sockets, apart=apart)


@pytest.fixture
def comm(world: comm_core.Communicator) -> Iterator[comm_core.Communicator]:
    """The communicator of all ranks, which begin and end every test together."""
    world.barrier()
    yield world
    world.barrier()
    assert world.pending() == []
