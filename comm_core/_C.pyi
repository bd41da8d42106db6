"""Everything of comm_core but the backends that need a library of their own."""

import builtins
from collections.abc import Sequence
from enum import Enum
from typing import Any, NoReturn, TypeAlias

# A Buffer, or anything with the buffer protocol. (Type checkers see the protocol of numpy's arrays from Python 3.12 on.)
_Memory: TypeAlias = Any

class DType(Enum):
    FLOAT16 = 0
    BFLOAT16 = 1
    FLOAT32 = 2
    FLOAT64 = 3
    INT8 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    UINT8 = 8
    BOOL = 9
    @property
    def itemsize(self) -> int: ...

class ReduceOp(Enum):
    SUM = 0
    AVG = 1
    MIN = 2
    MAX = 3
    PROD = 4

class Error(RuntimeError): ...
class InvalidUsage(Error, ValueError): ...
class Unsupported(Error): ...
class TimeoutError(Error, builtins.TimeoutError): ...
class TransportError(Error): ...

class MpiError(TransportError):
    code: int

class NcclError(TransportError):
    code: int

class CudaError(TransportError):
    code: int

class Buffer:
    def __init__(
        self,
        address: int,
        count: int,
        dtype: DType,
        *,
        readonly: bool = False,
        owner: object = None,
        device: int | None = None,
        stream: int = 0,
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def device(self) -> int | None: ...
    @property
    def stream(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def owner(self) -> object: ...

class Work:
    @property
    def op(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    def wait(self, timeout: float | None = None) -> None:
        """None and infinity wait for ever; a negative number or NaN raises InvalidUsage, which is a ValueError."""
    def done(self) -> bool: ...
    def exception(self) -> Error | None: ...
    def order_before(self, stream: int) -> None: ...
    def describe(self) -> str: ...

class Persistent:
    """An operation of a communicator whose arguments were checked (MPI 4.0, persistent collective operations).

    It keeps the memory alive, which has to stay where it is; of a device, it follows the streams that its Buffers name.
    """

    def start(self) -> Work:
        """Issue it once more: an operation like any other, in the order of the calls, which is the same on all ranks."""

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def shard_rank(self) -> int: ...
    @property
    def shard_size(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def device(self) -> int | None: ...
    def reduce_scatter_async(
        self,
        send: _Memory,
        recv: _Memory,
        op: ReduceOp = ReduceOp.SUM,
        *,
        counts: Sequence[int] | None = None,
        wide_send: _Memory | None = None,
        wide_recv: _Memory | None = None,
        label: str = "",
    ) -> Work: ...
    def reduce_scatter_init(
        self,
        send: _Memory,
        recv: _Memory,
        op: ReduceOp = ReduceOp.SUM,
        *,
        counts: Sequence[int] | None = None,
        wide_send: _Memory | None = None,
        wide_recv: _Memory | None = None,
        label: str = "",
    ) -> Persistent: ...
    def reduce_scatter(
        self,
        send: _Memory,
        recv: _Memory,
        op: ReduceOp = ReduceOp.SUM,
        *,
        counts: Sequence[int] | None = None,
        wide_send: _Memory | None = None,
        wide_recv: _Memory | None = None,
        label: str = "",
    ) -> None: ...
    def all_gather_async(
        self,
        send: _Memory,
        recv: _Memory,
        *,
        counts: Sequence[int] | None = None,
        wide_send: _Memory | None = None,
        wide_recv: _Memory | None = None,
        label: str = "",
    ) -> Work: ...
    def all_gather_init(
        self,
        send: _Memory,
        recv: _Memory,
        *,
        counts: Sequence[int] | None = None,
        wide_send: _Memory | None = None,
        wide_recv: _Memory | None = None,
        label: str = "",
    ) -> Persistent: ...
    def all_gather(
        self,
        send: _Memory,
        recv: _Memory,
        *,
        counts: Sequence[int] | None = None,
        wide_send: _Memory | None = None,
        wide_recv: _Memory | None = None,
        label: str = "",
    ) -> None: ...
    def all_gather_counts(self, send_count: int) -> list[int]: ...
    def all_reduce_async(
        self, send: _Memory, recv: _Memory, op: ReduceOp = ReduceOp.SUM, *, label: str = ""
    ) -> Work: ...
    def all_reduce_init(
        self, send: _Memory, recv: _Memory, op: ReduceOp = ReduceOp.SUM, *, label: str = ""
    ) -> Persistent: ...
    def all_reduce(self, send: _Memory, recv: _Memory, op: ReduceOp = ReduceOp.SUM, *, label: str = "") -> None: ...
    def broadcast_async(self, buffer: _Memory, root: int = 0, *, label: str = "") -> Work: ...
    def broadcast(self, buffer: _Memory, root: int = 0, *, label: str = "") -> None: ...
    def reduce_async(
        self, send: _Memory, recv: _Memory | None, op: ReduceOp = ReduceOp.SUM, root: int = 0, *, label: str = ""
    ) -> Work: ...
    def reduce(
        self, send: _Memory, recv: _Memory | None, op: ReduceOp = ReduceOp.SUM, root: int = 0, *, label: str = ""
    ) -> None: ...
    def all_to_all_async(
        self,
        send: _Memory,
        recv: _Memory,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        label: str = "",
    ) -> Work: ...
    def all_to_all(
        self,
        send: _Memory,
        recv: _Memory,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        label: str = "",
    ) -> None: ...
    def send_async(self, buffer: _Memory, peer: int, tag: int = 0, *, label: str = "") -> Work: ...
    def send(self, buffer: _Memory, peer: int, tag: int = 0, *, label: str = "") -> None: ...
    def recv_async(self, buffer: _Memory, peer: int, tag: int = 0, *, label: str = "") -> Work: ...
    def recv(self, buffer: _Memory, peer: int, tag: int = 0, *, label: str = "") -> None: ...
    def barrier_async(self, *, label: str = "") -> Work: ...
    def barrier(self, *, label: str = "") -> None: ...
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Collective: the group of all ranks with this color, in the order of their keys; None without a color.

        A process makes communicators, by this or `mpi()`, one after the other, in the order of all ranks that share
        them: over MPI the last step of it holds up the engine, and threads that split different communicators at the
        same time may wait for each other for ever.
        """
    def part(self, ranks: Sequence[int], name: str) -> Communicator:
        """The group of these `ranks`, in this order, over the connections that there are: no rank waits for another.

        On every one of them, with a `name` that no other part of this communicator has, and on no other rank.
        Over TCP, and of one rank alone; else Unsupported.
        """
    def two_level(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Collective: a communicator of the same ranks that sends between groups only what has to be there.

        `groups` hold each rank once, and as many as each other; all ranks give the same, or all raise InvalidUsage.
        Results are those of this communicator, but for the order of additions: a group's members first, then the
        groups. Of 16-bit floats a group's sum is rounded, too, and an average is one of the groups' averages.
        """
    def hybrid(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Collective: a communicator of the same ranks with a shard for each member of a group, as in `two_level()`.

        reduce_scatter reduces over all ranks, and gives the same shard, bit for bit, to the same member of every group;
        all_gather takes place within each group. Their counts have `shard_size` entries. All else is over all ranks.
        """
    def post(self, peer: int, payload: bytes) -> Work: ...
    def receive_post(self, timeout: float | None) -> tuple[int, bytes] | None: ...
    def pending(self) -> list[Work]: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...

def local() -> Communicator: ...
def connect(provider: str, handle: int | None = None) -> Communicator: ...
def finalize() -> None: ...
def abort(code: int) -> NoReturn: ...
def modules_of_thread(ident: int) -> list[str]: ...
def blockwise_bytes(count: int, bits: int) -> int: ...
def encode_blockwise(wire: int, values: int, count: int, bits: int, dtype: DType) -> None: ...
def decode_blockwise(values: int, wire: int, count: int, bits: int, dtype: DType) -> None: ...
def copy_past_caches(target: int, source: int, nbytes: int) -> None: ...
def take_samples(kept: int, source: int, places: int, count: int, itemsize: int) -> None: ...
def changed_sample(kept: int, source: int, places: int, count: int, itemsize: int) -> int: ...
def differ(halves: _Memory, wide: _Memory) -> bool: ...
def describe(provider: str) -> dict[str, str]: ...
def interpreter_ends() -> None: ...
def release_finished() -> None: ...
