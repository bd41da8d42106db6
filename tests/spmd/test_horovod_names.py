"""Collectives by name: any order, disagreements, refusals, process sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear as hvd
from overlap.horovod.controller.errors import Mismatch

pytestmark = pytest.mark.four_ranks


def _usable() -> None:
    """Nothing is left over from what went wrong: the next operations match."""
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="x").tolist() == [hvd.size()] * 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_every_rank_may_ask_in_an_order_of_its_own() -> None:
    count = 30
    order = torch.randperm(count, generator=torch.Generator().manual_seed(hvd.rank())).tolist()
    handles = {}
    for index in order:
        kind = index % 3
        value = torch.full((index + 1,), float(hvd.rank() + index))
        if kind == 0:
            handles[index] = hvd.allreduce_async(value, op=hvd.Sum, name=f"tensor {index}")
        elif kind == 1:
            handles[index] = hvd.allgather_async(value, name=f"tensor {index}")
        else:
            handles[index] = hvd.broadcast_async(value, 0, name=f"tensor {index}")
    for index in reversed(order):
        ranks = [float(rank + index) for rank in range(hvd.size())]
        expected = {
            0: [sum(ranks)] * (index + 1),
            1: [value for value in ranks for _ in range(index + 1)],
            2: [ranks[0]] * (index + 1),
        }
        assert hvd.synchronize(handles[index]).tolist() == expected[index % 3]


def test_unnamed_operations_match_in_the_order_of_their_calls() -> None:
    handles = [hvd.allreduce_async(torch.full((1,), float(index)), op=hvd.Sum) for index in range(5)]
    assert [hvd.synchronize(handle).item() for handle in handles] == [index * hvd.size() for index in range(5)]


def test_a_name_in_flight_is_refused_on_this_rank_alone() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="again")
        if hvd.size() > 1:
            with pytest.raises(ValueError, match=r"allreduce 'again' is under way already on rank 0"):
                hvd.allreduce_async(torch.ones(2), name="again")
        other = hvd.broadcast_async(torch.zeros(1), 0, name="again")  # another kind: another operation
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="again")
        other = hvd.broadcast_async(torch.ones(1), 0, name="again")
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2
    assert hvd.synchronize(other).item() == 0
    _usable()


# What rank 0 asks for and what the others do, and what everybody is told.
DISAGREEMENTS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "shape": (
        lambda: hvd.allreduce(torch.ones(2), name="x"),
        lambda: hvd.allreduce(torch.ones(3), name="x"),
        r"allreduce 'x': shapes differ between ranks: \(2,\) on rank 0 and \(3,\) on rank 1",
    ),
    "dimensions": (
        lambda: hvd.allreduce(torch.ones(2, 2), name="x"),
        lambda: hvd.allreduce(torch.ones(4), name="x"),
        r"\(2, 2\) on rank 0 and \(4,\) on rank 1",
    ),
    "dtype": (
        lambda: hvd.allreduce(torch.ones(2), name="x"),
        lambda: hvd.allreduce(torch.ones(2).double(), name="x"),
        "float32 on rank 0 and float64 on rank 1",
    ),
    "op": (
        lambda: hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum),
        lambda: hvd.allreduce(torch.ones(2), name="x", op=hvd.Max),
        "reduction differs between ranks: SUM on rank 0 and MAX on rank 1",
    ),
    "prescale": (
        lambda: hvd.allreduce(torch.ones(2), name="x", prescale_factor=0.5),
        lambda: hvd.allreduce(torch.ones(2), name="x"),
        r"prescale_factor differs between ranks: 0.5 on rank 0 and 1.0 on rank 1",
    ),
    "root": (
        lambda: hvd.broadcast(torch.ones(2), 0, name="x"),
        lambda: hvd.broadcast(torch.ones(2), 1, name="x"),
        "broadcast 'x': root_rank differs between ranks: 0 on rank 0 and 1 on rank 1",
    ),
    "columns": (
        lambda: hvd.allgather(torch.ones(1, 2), name="x"),
        lambda: hvd.allgather(torch.ones(2, 3), name="x"),
        r"beyond the first dimension: \(1, 2\) on rank 0 and \(2, 3\) on rank 1",
    ),
    "rows": (
        lambda: hvd.reducescatter(torch.ones(4, 2), name="x"),
        lambda: hvd.reducescatter(torch.ones(8, 2), name="x"),
        r"\(4, 2\) on rank 0 and \(8, 2\) on rank 1",
    ),
    "size of a group": (
        lambda: hvd.grouped_allreduce([torch.ones(2)] * 2, name="x"),
        lambda: hvd.grouped_allreduce([torch.ones(2)] * 3, name="x"),
        "number of tensors differs between ranks: 2 on rank 0 and 3 on rank 1",
    ),
    "member of a group": (
        lambda: hvd.grouped_allgather([torch.ones(1), torch.ones(2)], name="x"),
        lambda: hvd.grouped_allgather([torch.ones(1), torch.ones(2).half()], name="x"),
        "tensor 1 of 2: dtypes differ between ranks: float32 on rank 0 and float16 on rank 1",
    ),
    "splits refused on one rank": (
        lambda: hvd.alltoall(torch.ones(4), [1] * 9, name="x"),
        lambda: hvd.alltoall(torch.ones(hvd.size()), name="x"),
        r"splits should be .* numbers of rows",
    ),
    "sparse on one rank": (
        lambda: hvd.allreduce(torch.ones(2).to_sparse(), name="x"),
        lambda: hvd.allreduce(torch.ones(2), name="x"),
        "dense tensors and was given torch.sparse_coo",
    ),
    "parameters of different names": (
        lambda: hvd.broadcast_parameters({"a": torch.ones(1)}, 0),
        lambda: hvd.broadcast_parameters({"b": torch.ones(1)}, 0),
        "names differ between ranks: a on rank 0 and b on rank 1",
    ),
    "parameters of different shapes": (
        lambda: hvd.broadcast_parameters({"w": torch.ones(1), "v": torch.ones(2)}, 0),
        lambda: hvd.broadcast_parameters({"w": torch.ones(2), "v": torch.ones(2)}, 0),
        r"'w': shapes differ between ranks: \(1,\) on rank 0 and \(2,\) on rank 1",
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_all_told_both_values_and_go_on(what: str) -> None:
    if hvd.size() == 1:
        pytest.skip("nobody to disagree with")
    first, others, message = DISAGREEMENTS[what]
    call = first if hvd.rank() == 0 else others
    # A rank whose own arguments are refused hears it as ValueError, which Mismatch is too.
    with pytest.raises(ValueError, match=message) as caught:
        call()
    if hvd.rank() == 1:
        assert isinstance(caught.value, Mismatch)
        assert isinstance(caught.value, hvd.HorovodInternalError)
    _usable()


def test_a_tensor_is_not_touched_where_ranks_disagree() -> None:
    if hvd.size() == 1:
        pytest.skip("nobody to disagree with")
    mine = torch.full((2 + hvd.rank(),), 5.0)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce_(mine, name="x", prescale_factor=2.0)
    assert mine.tolist() == [5.0] * len(mine)


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no tensor": (lambda: hvd.allreduce_([1.0]), TypeError, "takes tensors and was given a list"),  # type: ignore[arg-type]
    "a root that is no rank": (lambda: hvd.broadcast(torch.ones(1), 99), ValueError, "root_rank 99 is not one of"),
    "a root of another type": (lambda: hvd.broadcast(torch.ones(1), "0"), TypeError, "should be a rank and is '0'"),  # type: ignore[arg-type]
    "a tensor without values": (lambda: hvd.allreduce(torch.ones(1, device="meta")), ValueError, "has no values"),
    "a nested tensor": (
        lambda: hvd.allgather(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])),
        ValueError,
        "was given a nested one",
    ),
    "no process set": (lambda: hvd.allreduce(torch.ones(1), process_set=[0]), TypeError, "a ProcessSet and is list"),  # type: ignore[arg-type]
    "a factor that is no number": (lambda: hvd.allreduce(torch.ones(1), prescale_factor="x"), ValueError, "'x'"),  # type: ignore[arg-type]
    "no reduction": (lambda: hvd.allreduce(torch.ones(1), op="sum"), ValueError, "op should be Average, Sum"),
    "adasum": (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), NotImplementedError, "Adasum is not offered"),
    "scalar to scatter": (lambda: hvd.reducescatter(torch.tensor(1.0)), ValueError, "was given a scalar"),
    "scalar to exchange": (lambda: hvd.alltoall(torch.tensor(1.0)), ValueError, "was given a scalar"),
    "float splits": (lambda: hvd.alltoall(torch.ones(1), torch.ones(1)), ValueError, "whole numbers"),
    "splits of other rows": (lambda: hvd.alltoall(torch.ones(1), [7] * hvd.size()), ValueError, "add up to"),
    "complex maximum": (lambda: hvd.allreduce(torch.ones(1, dtype=torch.cfloat), op=hvd.Max), RuntimeError, "MAX"),
    "a name of another type": (lambda: hvd.allreduce(torch.ones(1), name=3), TypeError, "should be a string"),  # type: ignore[arg-type]
    "parameters": (lambda: hvd.broadcast_parameters(torch.ones(1), 0), ValueError, "params should be"),
    "an optimizer": (lambda: hvd.broadcast_optimizer_state(3, 0), TypeError, "torch.optim.Optimizer"),  # type: ignore[arg-type]
    "a device": (lambda: hvd.join(-2), ValueError, "device should be"),
    "a process set of names": (lambda: hvd.ProcessSet(["a"]), ValueError, "made of ranks"),  # type: ignore[list-item]
    "a process set of a communicator": (lambda: hvd.ProcessSet(object()), ValueError, "was given object"),  # type: ignore[arg-type]
    "a process set that is not registered": (
        lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])),
        ValueError,
        "is not registered",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused_with_what_was_given(what: str) -> None:
    call, kind, message = BAD[what]
    with pytest.raises(kind, match=message):
        call()
    _usable()


def test_a_group_of_some_ranks() -> None:
    size, me = hvd.size(), hvd.rank()
    even = hvd.add_process_set(range(0, size, 2)) if size > 2 else hvd.add_process_set([0]) if size > 1 else None
    if even is None:
        with pytest.raises(ValueError, match="same ranks"):
            hvd.add_process_set([0])
        return
    members = list(range(0, size, 2)) if size > 2 else [0]
    assert (even.ranks, even.size(), even.included()) == (members, len(members), me in members)
    with pytest.raises(ValueError, match="same ranks"):
        hvd.add_process_set(members)
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(even)
    if me in members:
        assert even.rank() == members.index(me)
        assert hvd.allreduce(torch.tensor([float(me)]), op=hvd.Sum, process_set=even).item() == sum(members)
        assert hvd.allgather(torch.tensor([me]), process_set=even).tolist() == members
        root = members[-1]
        assert hvd.broadcast(torch.tensor([me]), root, process_set=even).item() == root
        assert hvd.broadcast_object(me, root, process_set=even) == root
        rows = torch.full((len(members),), me)
        assert hvd.alltoall(rows, process_set=even).tolist() == members  # type: ignore[union-attr]
        share = hvd.reducescatter(rows, op=hvd.Sum, process_set=even)
        assert share.tolist() == [sum(members)]
        leaf = torch.ones(1, requires_grad=True)
        hvd.allreduce(leaf * (me + 1), process_set=even).backward()
        hvd.barrier(process_set=even)
    else:
        with pytest.raises(ValueError, match=f"rank {me} is not in the process set"):
            hvd.allreduce(torch.ones(1), process_set=even)
        with pytest.raises(ValueError, match="is not in the process set"):
            even.rank()
    _usable()
    assert hvd.remove_process_set(even) is True
    assert hvd.remove_process_set(even) is False
    assert (even.process_set_id, even.size(), even.rank(), even.included()) == (None, None, None, None)
    with pytest.raises(ValueError, match="is not registered"):
        hvd.allreduce(torch.ones(1), process_set=even)


def test_the_set_of_all_ranks() -> None:
    everybody = hvd.global_process_set
    assert (everybody.process_set_id, everybody.ranks) == (0, list(range(hvd.size())))
    assert (everybody.size(), everybody.rank(), everybody.included()) == (hvd.size(), hvd.rank(), True)
    assert hvd.remove_process_set(everybody) is False


def test_sets_that_ranks_disagree_about() -> None:
    if hvd.size() == 1:
        pytest.skip("nobody to disagree with")
    with pytest.raises(hvd.HorovodInternalError, match="ranks of the process set differ"):
        hvd.add_process_set([0] if hvd.rank() == 0 else [0, 1])
    with pytest.raises(hvd.HorovodInternalError, match="not in this job"):
        hvd.add_process_set([0, 50])
    _usable()


def test_facts() -> None:
    assert hvd.is_initialized()
    assert 0 <= hvd.local_rank() < hvd.local_size() <= hvd.size()
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)  # tests run on one host
    assert not (hvd.mpi_enabled() and hvd.gloo_enabled())
    if hvd.mpi_enabled():
        assert hvd.mpi_built()
        assert hvd.mpi_threads_supported() is True
    else:
        with pytest.raises(ValueError, match="not over MPI"):
            hvd.mpi_threads_supported()
    assert not any((hvd.ddl_built(), hvd.ccl_built(), hvd.nccl_built(), hvd.cuda_built(), hvd.rocm_built()))


@pytest.mark.parametrize("named", ["pairs", "module", "nothing"])
def test_the_optimizer_has_horovods_private_names_for_its_parameters(named: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    given = {"pairs": model.named_parameters(), "module": model, "nothing": None}[named]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), given)
    names = optimizer._parameter_names
    assert set(names) == set(model.parameters())
    if given is not None:
        assert names == {param: name for name, param in model.named_parameters()}
    assert optimizer._requires_update == set(model.parameters()) - {model[0].weight}
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert len(optimizer._parameter_names) == len(set(optimizer._parameter_names.values())) == 5
