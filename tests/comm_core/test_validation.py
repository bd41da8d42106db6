"""What does not fit raises a typed error that names it, before anything is sent."""

from __future__ import annotations

import array
from collections.abc import Callable

import numpy as np
import pytest

import comm_core
from comm_core import Buffer, Communicator, DType, InvalidUsage, ReduceOp, Unsupported

F2, F4 = np.float16, np.float32
Call = Callable[[Communicator], object]


def _frozen(count: int) -> np.ndarray:
    data = np.zeros(count, F4)
    data.flags.writeable = False
    return data


def _shifted(count: int) -> np.ndarray:
    """Elements that begin one byte behind an address that is aligned."""
    return np.zeros(F4().itemsize * count + 1, np.uint8)[1:].view(F4)


WRONG: dict[str, tuple[Call, str]] = {
    "recv of another type": (lambda c: c.all_reduce(np.zeros(3, F4), np.zeros(3)), "float32 .* float64"),
    "recv of another size": (lambda c: c.all_reduce(np.zeros(3, F4), np.zeros(4, F4)), "3 .* 4"),
    "recv read-only": (lambda c: c.all_reduce(np.zeros(3, F4), _frozen(3)), "recv is read-only"),
    "broadcast to read-only": (
        lambda c: c.broadcast(_frozen(3), (c.rank + 1) % c.size) if c.size > 1 else c.recv(_frozen(3), 0),
        "read-only",
    ),
    "bytes are read-only": (lambda c: c.recv(b"abc", 0), "read-only"),
    "strided": (lambda c: c.all_reduce(np.zeros(6, F4)[::2], np.zeros(3, F4)), "not C-contiguous"),
    "fortran order": (lambda c: c.send(np.zeros((2, 3), F4, order="F"), 0), "not C-contiguous"),
    "not aligned": (lambda c: c.all_reduce(_shifted(3), np.zeros(3, F4)), "send: .* 1 bytes beyond .* element size 4"),
    "moved and not aligned": (lambda c: c.broadcast(_shifted(3)), "buffer: .* 1 bytes beyond .* element size 4"),
    "no buffer at all": (lambda c: c.all_reduce([1.0], np.zeros(1)), "buffer protocol, got list"),
    "chunk of another size": (
        lambda c: c.reduce_scatter(np.zeros(4 * c.size, F4), np.zeros(5, F4)),
        "recv has 5 .* chunk has 4",
    ),
    "counts that do not add up": (
        lambda c: c.reduce_scatter(np.zeros(4, F4), np.zeros(3, F4), counts=[3] + [0] * (c.size - 1)),
        "add up to 3 but send has 4",
    ),
    "counts that are too many": (
        lambda c: c.all_gather(np.zeros(1, F4), np.zeros(4, F4), counts=[1] * (c.size + 3)),
        f"{'counts'} has",
    ),
    "counts below zero": (
        lambda c: c.all_gather(np.zeros(1, F4), np.zeros(4, F4), counts=[-1] * c.size),
        "negative entry -1",
    ),
    "counts that overflow": (
        lambda c: c.all_gather(np.zeros(1, F4), np.zeros(4, F4), counts=[2**62] * c.size),
        "add up to more",
    ),
    "root out of range": (lambda c: c.broadcast(np.zeros(3), c.size), "root .* is not a rank of 0"),
    "negative root": (lambda c: c.reduce(np.zeros(3), np.zeros(3), root=-1), "root -1"),
    "peer out of range": (lambda c: c.send(np.zeros(3), c.size), "peer"),
    "post to nobody": (lambda c: c.post(c.size, b""), "peer"),
    "tag out of range": (lambda c: c.send(np.zeros(3), 0, 1024), "tag 1024 is not in 0..1023"),
    "negative tag": (lambda c: c.recv(np.zeros(3), 0, -1), "tag -1"),
    "root without recv": (lambda c: c.reduce(np.zeros(3), None, root=c.rank), "needs a recv"),
    "all_to_all for oneself": (
        lambda c: c.all_to_all(np.zeros(c.size), np.zeros(2 * c.size), recv_counts=[2] * c.size),
        "sends to itself",
    ),
    "scatter into its input": (
        lambda c: (lambda x: c.reduce_scatter(x, x[: x.size // c.size]))(np.zeros(8 * c.size)),
        "share memory",
    ),
    "partial overlap": (lambda c: (lambda x: c.all_reduce(x[:-1], x[1:]))(np.zeros(9)), "overlap in part"),
    "wide beside fp32": (
        lambda c: c.all_gather(np.zeros(1, F4), np.zeros(c.size, F4), wide_recv=np.zeros(c.size, F4)),
        "wide_recv is float32 and recv is float32; float32 stands beside float16",
    ),
    "wide of another size": (
        lambda c: c.reduce_scatter(np.zeros(4 * c.size, F2), np.zeros(4, F2), wide_send=np.zeros(3, F4)),
        "wide_send has 3 elements but send has [0-9]+",
    ),
    "rounded into its input": (
        lambda c: (lambda x: c.reduce_scatter(x.view(F2)[: 4 * c.size], np.zeros(4, F2), wide_send=x))(
            np.zeros(4 * c.size, F4)
        ),
        "wide_send shares memory with send",
    ),
    "differ of others": (lambda _: comm_core.differ(np.zeros(3, F2), np.zeros(4, F4)), "got 3 of float16 and 4 of"),
    "negative color": (lambda c: c.split(-2), "color"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(comm: Communicator, what: str) -> None:
    call, message = WRONG[what]
    with pytest.raises(InvalidUsage, match=message) as caught:
        call(comm)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, comm_core.Error)


def test_parts_that_do_not_divide(comm: Communicator) -> None:
    if comm.size > 1:
        with pytest.raises(InvalidUsage, match="do not divide"):
            comm.all_to_all(np.zeros(comm.size + 1), np.zeros(comm.size + 1))
        data = np.zeros(4 * comm.size)
        wrong = (comm.rank + 1) % comm.size
        with pytest.raises(InvalidUsage, match="own chunk"):
            comm.all_gather(data[4 * wrong : 4 * wrong + 4], data)


@pytest.mark.parametrize("kind", ["complex64", ">f4", "uint16", "uint32", "U1", "datetime64[s]"])
def test_types_that_cannot_travel(comm: Communicator, kind: str) -> None:
    data = np.zeros(4, kind)
    with pytest.raises((Unsupported, InvalidUsage)):
        comm.broadcast(data)


def test_everything_with_the_buffer_protocol_travels(comm: Communicator) -> None:
    for data in (bytearray(b"abc"), array.array("i", [1, 2, 3]), memoryview(bytearray(b"xyz")), np.ones((2, 2))):
        comm.broadcast(data)
    comm.all_reduce(array.array("d", [1.0]), result := array.array("d", [0.0]))
    assert result[0] == comm.size


def test_buffer_describes_memory() -> None:
    data = np.zeros(4, np.int16)
    buffer = Buffer(data.ctypes.data, 4, DType.INT16, readonly=True, owner=data)
    assert (buffer.address, buffer.count, buffer.dtype, buffer.nbytes) == (data.ctypes.data, 4, DType.INT16, 8)
    assert buffer.readonly
    assert buffer.owner is data
    assert [d.itemsize for d in DType] == [2, 2, 4, 8, 1, 2, 4, 8, 1, 1]
    for arguments in ((0, 1), (data.ctypes.data, -1), (data.ctypes.data + 1, 1), (data.ctypes.data, 2**62)):
        with pytest.raises(InvalidUsage):
            Buffer(*arguments, DType.INT16)
    with pytest.raises(InvalidUsage, match=r"Buffer: .* 1 bytes beyond a multiple of the element size 2"):
        Buffer(data.ctypes.data + 1, 1, DType.INT16)
    assert Buffer(0, 0, DType.FLOAT32).count == 0


def test_the_errors_form_a_tree() -> None:
    assert issubclass(comm_core.MpiError, comm_core.TransportError)
    assert issubclass(comm_core.TimeoutError, TimeoutError)
    for name in ("InvalidUsage", "Unsupported", "TimeoutError", "TransportError", "MpiError"):
        kind = getattr(comm_core, name)
        assert issubclass(kind, comm_core.Error)
        assert issubclass(kind, RuntimeError)
        assert kind.__module__ == "comm_core"


def test_a_closed_communicator_says_so(comm: Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    part.close()
    part.close()
    with pytest.raises(InvalidUsage, match="is closed"):
        part.barrier()
    with pytest.raises(InvalidUsage, match="is closed"):
        part.receive_post(0)


def test_the_stub_names_what_the_module_has() -> None:
    import ast
    from pathlib import Path

    from comm_core import _C

    tree = ast.parse((Path(comm_core.__file__).parent / "_C.pyi").read_text())
    stubs = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    public = {name for name in vars(_C) if not name.startswith("_")}
    assert public == {name for name in stubs if not name.startswith("_")}
    for name, node in stubs.items():
        if isinstance(node, ast.ClassDef) and name in ("Buffer", "Work", "Communicator"):
            members = {n.name for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("__")}
            assert members == {m for m in vars(getattr(_C, name)) if not m.startswith("_")}, name
    assert {e.name for e in ReduceOp} == {"SUM", "AVG", "MIN", "MAX", "PROD"}


def test_blocks_are_of_8_or_4_bits_and_of_wide_numbers() -> None:
    numbers, wire = np.zeros(3, np.float32), np.zeros(8, np.uint8)
    addresses = wire.ctypes.data, numbers.ctypes.data
    assert comm_core.blockwise_bytes(3, 4) == 8
    with pytest.raises(InvalidUsage, match="8 or 4 bits, got 3"):
        comm_core.blockwise_bytes(3, 3)
    with pytest.raises(InvalidUsage, match="8 or 4 bits, got 2"):
        comm_core.encode_blockwise(*addresses, 3, 2, DType.FLOAT32)
    with pytest.raises(InvalidUsage, match="float32 or float64, got float16"):
        comm_core.decode_blockwise(*reversed(addresses), 3, 4, DType.FLOAT16)
