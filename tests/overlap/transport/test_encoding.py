"""Letters are data: what goes in comes out, and bytes from elsewhere make nothing but data."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import pickle
import random
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy
import pytest
import torch

from overlap.horovod.controller.request import Kind, Request, Response, TensorSpec
from overlap.transport.encoding import NotData, can_travel, decode, encode, travels


@travels
class Colour(Enum):
    RED = 1


@dataclass(frozen=True)
class Stranger:
    value: int


REQUEST = Request(Kind.ALLTOALL, "ä 'name'", 3, (TensorSpec((2, 0), "float32"),), prescale=0.1, splits=(1, 2))
VALUES = [
    None,
    True,
    -(2**70),
    0.1,
    math.inf,
    "text \ud83d \u2028",
    b"\0bytes",
    1 + 2j,
    [],
    (1, [2, (3,)], {"a": {4, 5}}),
    {1: "one", (2, 3): frozenset({6}), None: {}},
    REQUEST,
    Response(REQUEST, rows=((1, 2), (3,))),
    Colour.RED,
    torch.bfloat16,
]


def _json_letter(header: Any, behind: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + behind


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_out_as_they_went_in(value: Any) -> None:
    back = decode(encode(value))
    assert back == value
    assert type(back) is type(value)


def test_floats_keep_all_their_bits() -> None:
    for value in (0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308):
        assert struct.pack("<d", decode(encode(value))) == struct.pack("<d", value)
    assert math.isnan(decode(encode(math.nan)))


def test_subclasses_of_containers_come_out_plain() -> None:
    assert type(decode(encode(torch.Size([2, 3])))) is tuple
    assert type(decode(encode(collections.OrderedDict(a=1)))) is dict


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)], ids=str)
def test_tensors_keep_their_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, dtype=torch.float64).to(dtype)
    after = torch.arange(3)
    back, _, behind = decode(encode([value, b"between", after]))
    assert back.dtype is dtype
    assert back.shape == value.shape
    assert torch.equal(back, value)
    assert torch.equal(behind, after)
    back.zero_()  # is writable


def test_views_and_graphs_travel_as_values() -> None:
    value = torch.randn(4, 3, requires_grad=True)
    assert torch.equal(decode(encode(value.t()[1:])), value.detach().t()[1:])
    assert torch.equal(decode(encode(torch.tensor([1j]).conj())), torch.tensor([-1j]))


def test_numbers_of_numpy() -> None:
    for value in (numpy.float32(0.1), numpy.int64(7), numpy.arange(6.0).reshape(2, 3)):
        back = decode(encode(value))
        assert type(back) is type(value)
        assert numpy.array_equal(back, value)
        assert back.dtype == value.dtype


@pytest.mark.parametrize(
    "value",
    [lambda: None, object(), Stranger(1), [print], {"a": Stranger}, torch.ones(2).to_sparse(), numpy.array([object()])],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_refused_where_it_is_sent(value: Any) -> None:
    assert not can_travel(value)
    with pytest.raises(NotData, match="cannot be sent in a letter, which holds plain data"):
        encode(value)


class Command:
    """Runs when it is unpickled."""

    ran = False

    def __reduce__(self) -> Any:
        return Command.run, ()

    @staticmethod
    def run() -> None:
        Command.ran = True


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (pickle.dumps(Command()), "no letter|a header of"),
        (b"", "no letter"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes in a letter of 8"),
        (_json_letter(1, b"more"), "4 bytes are left over"),
        (_json_letter({"bytes": 5}, b"four"), "5 bytes of content are announced, and 4 are there"),
        (_json_letter({"bytes": -1}, b"four"), "-1 bytes of content"),
        (_json_letter({"tensor": ["float32", [2**60]]}), "bytes of content are announced, and 0 are there"),
        (_json_letter({"tensor": ["float32", [-1, -1]]}, b"four"), "a shape of"),
        (_json_letter({"tensor": ["load", [1]]}, b"four"), "a dtype of 'load'"),
        (_json_letter({"dtype": "os"}), "a dtype of 'os'"),
        (_json_letter({"array": ["|O", [1], False]}, b"eightbyt"), "an array of"),
        (_json_letter({"object": ["Popen", [["true"]]]}), "no letter: KeyError: 'Popen'"),
        (_json_letter({"object": ["Request", ["too few"]]}), "no letter: ValueError"),
        (_json_letter({"object": ["Colour", [1]]}), "no letter: TypeError"),
        (_json_letter({"enum": ["Request", "kind"]}), "Request is no enum"),
        (_json_letter({"enum": ["Colour", "BLUE"]}), "no letter: KeyError: 'BLUE'"),
        (_json_letter({"unheard": 1}), "no letter: KeyError"),
        (_json_letter({"tuple": [], "set": []}), "no letter: ValueError"),
        (_json_letter({"set": [[1]]}), "no letter: TypeError"),
        (struct.pack("<Q", 4) + b"1e5x", "no letter: JSONDecodeError"),
        (struct.pack("<Q", 200_000) + b"[" * 100_000 + b"]" * 100_000, "no letter: RecursionError"),
    ],
    ids=lambda value: None,
)
def test_bytes_from_elsewhere_are_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(NotData, match=reason):
        decode(payload)
    assert not Command.ran


def test_damaged_letters_make_data_or_are_refused() -> None:
    whole = encode([REQUEST, torch.arange(5.0), {"lr": 0.1, "betas": (0.9, 0.999)}])
    draw = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with contextlib.suppress(NotData):
            decode(bytes(damaged[: draw.choice((len(damaged), draw.randrange(len(damaged))))]))
