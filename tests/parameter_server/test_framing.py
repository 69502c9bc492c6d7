"""Framing: every message decodes to itself; malformed ones are refused and take no more memory than their bytes."""

from __future__ import annotations

import struct
import tracemalloc
import types
import typing
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import (
    CHUNK_BYTES,
    DTYPES,
    HEADER_BYTES,
    LARGEST_FRAME,
    Assembly,
    FramingError,
    concatenated,
    decode_header,
    dtype_name,
    encode,
)

BODIES: tuple[type, ...] = get_args(m.Request) + get_args(m.Reply)
INTEGERS = st.integers(-(2**63), 2**64 - 1)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field of this type."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of(*map(values, get_args(hint)))
    if get_origin(hint) is list:
        return st.lists(values(get_args(hint)[0]), max_size=5)
    if get_origin(hint) is tuple and get_args(hint)[-1] is ...:
        return st.lists(values(get_args(hint)[0]), max_size=5).map(tuple)
    if get_origin(hint) is tuple:
        return st.tuples(*map(values, get_args(hint)))
    if isinstance(hint, type) and (issubclass(hint, msgspec.Struct) or is_dataclass(hint)):
        return messages_of(hint)
    return {int: INTEGERS, float: st.floats(allow_nan=False)}.get(hint, st.from_type(hint))


def messages_of(body: type) -> st.SearchStrategy[Any]:
    return st.builds(body, **{name: values(hint) for name, hint in typing.get_type_hints(body).items()})


def flat(dtype: str, octets: bytes) -> Tensor:
    """Draw a tensor of any bits; booleans are 0 or 1."""
    if dtype == "bool":
        return torch.tensor([one % 2 == 1 for one in octets], dtype=torch.bool)
    size = DTYPES[dtype].itemsize
    held = bytearray(octets[: len(octets) // size * size])
    return torch.frombuffer(held, dtype=DTYPES[dtype]) if held else torch.empty(0, dtype=DTYPES[dtype])


TENSORS = st.lists(st.builds(flat, st.sampled_from(sorted(DTYPES)), st.binary(max_size=100)), max_size=5)


def frames(number: int, body: m.Body, tensors: Sequence[Tensor] = ()) -> list[list[bytearray]]:
    """Return the frames of a message in the form in which a server receives them."""
    return [[bytearray(frame) for frame in message] for message in encode(number, body, tensors)]


def receive(assembly: Assembly, parcel: Sequence[Sequence[Any]]) -> bool:
    """Feed frames to an assembly as the server does: a message with a non-empty first frame begins a request."""
    done = False
    for first, *chunks in parcel:
        if len(first):
            assembly.begin(first)
        done = assembly.add(chunks)
    return done


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if both are bitwise equal."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# --- round trips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", BODIES)
def test_every_message_decodes_to_itself(body: type) -> None:
    @given(INTEGERS, messages_of(body), TENSORS)
    @settings(max_examples=examples(25))
    def check(number: int, said: m.Body, tensors: list[Tensor]) -> None:
        assembly = Assembly()
        assert receive(assembly, frames(number, said, tensors))
        head, heard = assembly.take()
        assert head.request_id == number
        assert type(head.body) is body
        assert head.body == said
        assert head.tensors == [(dtype_name(one), one.numel()) for one in tensors]
        for pieces, (dtype, _), sent in zip(heard, head.tensors, tensors, strict=True):
            assert same(concatenated(pieces, dtype), sent)

    check()


def test_all_message_types_are_covered() -> None:
    said = {one for one in vars(m).values() if isinstance(one, type) and issubclass(one, m._Message)}
    assert said - {m._Message} == set(BODIES)


@pytest.mark.parametrize(
    "lengths",
    [
        [CHUNK_BYTES // 4],
        [CHUNK_BYTES // 4 + 1],
        [3 * CHUNK_BYTES // 4 - 1, 5],
        [5, CHUNK_BYTES // 4, 5],
        [CHUNK_BYTES // 8, CHUNK_BYTES // 8, 1],
        [0, 1, 0],
        [],
    ],
)
def test_large_tensors_are_sent_in_chunks_that_fit_a_frame(lengths: list[int]) -> None:
    tensors = [torch.arange(length, dtype=torch.float32) for length in lengths]
    parcel = frames(1, m.Result(), tensors)
    for at, (first, *chunks) in enumerate(parcel):
        assert (len(first) > 0) == (at == 0)
        assert sum(map(len, chunks)) <= CHUNK_BYTES
    assert max(len(frame) for message in parcel for frame in message) <= LARGEST_FRAME
    assembly = Assembly()
    for at, message in enumerate(parcel):
        assert receive(assembly, [message]) == (at == len(parcel) - 1)
    _, heard = assembly.take()
    assert [concatenated(pieces, "float32").tolist() for pieces in heard] == [one.tolist() for one in tensors]


def test_sending_copies_nothing() -> None:
    tensor = torch.zeros(CHUNK_BYTES // 2, dtype=torch.float32)
    (_, first), (_, second) = encode(1, m.Result(), [tensor])
    tensor[0], tensor[-1] = 1, 2
    assert struct.unpack_from("<f", first)[0] == 1
    assert struct.unpack_from("<f", second, len(second) - 4)[0] == 2


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.lists(st.integers(0, 60), max_size=6))
@settings(max_examples=examples(60))
def test_every_byte_is_drained_once(lengths: list[int], drains: list[int]) -> None:
    """Pieces may be drained at any time; the remaining ones come with the whole message."""
    tensors = [torch.arange(length, dtype=torch.int16) + 100 * at for at, length in enumerate(lengths)]
    assembly, found = Assembly(), [torch.full((length,), -1, dtype=torch.int16) for length in lengths]
    assembly.begin(frames(1, m.Result(), tensors)[0][0])
    chunks = [bytearray(struct.pack("<h", one)) for tensor in tensors for one in tensor.tolist()]
    for at, chunk in enumerate(chunks):
        assert assembly.add([chunk]) == (at == len(chunks) - 1)
        if at in drains:
            for index, start, piece in assembly.drain():
                assert found[index][start : start + piece.numel()].eq(-1).all()
                found[index][start : start + piece.numel()] = piece
    _, rest = assembly.take()
    for one, pieces, sent in zip(found, rest, tensors, strict=True):
        left = concatenated(pieces, "int16")
        assert left.numel() == one.eq(-1).sum()
        one[len(one) - left.numel() :] = left
        assert torch.equal(one, sent)


def test_an_incomplete_message_is_discarded_when_the_next_begins() -> None:
    assembly = Assembly()
    long = frames(1, m.Result(), [torch.ones(CHUNK_BYTES // 4 + 10)])
    assert not receive(assembly, long[:1])
    assert assembly.request_id == 1
    assert receive(assembly, frames(2, m.Result(), [torch.zeros(3)]))
    head, heard = assembly.take()
    assert (head.request_id, concatenated(heard[0], "float32").tolist()) == (2, [0, 0, 0])
    with pytest.raises(FramingError, match="a chunk without a header"):
        receive(assembly, long[1:])


def test_unaligned_numbers_are_read() -> None:
    tensor = torch.arange(5, dtype=torch.float64)
    ((head, chunk),) = frames(1, m.Result(), [tensor])
    for shift in range(8):
        room = bytearray(shift) + chunk
        assembly = Assembly()
        assembly.begin(head)
        assert assembly.add([memoryview(room)[shift:]])
        assert torch.equal(concatenated(assembly.take()[1][0], "float64"), tensor)


# --- malformed messages --------------------------------------------------------------------------------------------


def accepted(messages: Sequence[Sequence[bytes]]) -> tuple[int, int]:
    """Feed an assembly; return the number of bytes of tensors, and of refused frames."""
    assembly, octets, refused = Assembly(), 0, 0
    for first, *chunks in messages:
        try:
            if len(first):
                assembly.begin(first)
            if assembly.add([bytearray(one) for one in chunks]):
                _, tensors = assembly.take()
                octets += sum(piece.untyped_storage().nbytes() for pieces in tensors for piece in pieces)
        except FramingError:
            refused += 1
            assembly.reset()
    return octets, refused


@given(st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=4), max_size=8))
@settings(max_examples=examples(150))
def test_random_bytes_raise_only_framing_errors(messages: list[list[bytes]]) -> None:
    octets, _ = accepted(messages)
    assert octets <= sum(len(one) for message in messages for one in message)


@given(st.sampled_from(BODIES).flatmap(messages_of), TENSORS, st.data())
@settings(max_examples=examples(150))
def test_damaged_messages_raise_only_framing_errors(said: m.Body, tensors: list[Tensor], data: Any) -> None:
    """Messages are truncated, have flipped bits, or swapped, duplicated or missing frames."""
    parcel = [[bytes(frame) for frame in message] for message in frames(7, said, tensors)]
    for _ in range(data.draw(st.integers(1, 4))):
        message = data.draw(st.sampled_from(parcel))
        at = data.draw(st.integers(0, len(message) - 1))
        match data.draw(st.sampled_from(["cut", "turn", "swap", "double", "drop", "foreign"])):
            case "cut":
                message[at] = message[at][: data.draw(st.integers(0, len(message[at])))]
            case "turn" if message[at]:
                place = data.draw(st.integers(0, len(message[at]) - 1))
                turned = bytearray(message[at])
                turned[place] ^= data.draw(st.integers(1, 255))
                message[at] = bytes(turned)
            case "swap":
                other = data.draw(st.integers(0, len(message) - 1))
                message[at], message[other] = message[other], message[at]
            case "double":
                message.insert(at, message[at])
            case "drop" if len(message) > 1:
                del message[at]
            case "foreign":
                message[at] = data.draw(st.binary(max_size=100))
    octets, _ = accepted(parcel)
    assert octets <= sum(len(one) for message in parcel for one in message)


def test_a_message_may_name_many_batches_of_an_epoch() -> None:
    """A restarted dispatcher receives all batches of the epoch, and the batches that a failed worker has left."""
    batches = list(range(0, 600_000, 6))
    for said in (m.Settle(1, batches), m.IncarnationEnded(0, 0, 1, batches), m.CountedWork(1, batches)):
        assert decode_header(frames(1, said)[0][0]).body == said


@given(st.sampled_from(BODIES).flatmap(messages_of), st.integers(0, 10_000))
@settings(max_examples=examples(60))
def test_a_truncated_header_is_refused(said: m.Body, cut: int) -> None:
    ((head,),) = frames(1, said)
    with pytest.raises(FramingError, match="no header"):
        decode_header(head[: cut % len(head)])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([1, ["EnterBarrier", 0], [["complex128", 1]]], "a tensor of 1 complex128"),
        ([1, ["EnterBarrier", 0], [["float32", -1]]], "a tensor of -1 float32"),
        ([1, ["EnterBarrier", 0], [["x" * 1000, 1]]], "a tensor of 1 xxxxxxxxxxxxxxxxxxxx$"),
        ([1, ["EnterBarrier", 0], [["float32", 1.5]]], "no header"),
        ([1, ["EnterBarrier", 0], [["float32", 2**70]]], "no header"),
        ([1, ["Exec", "import os"], []], "no header"),
        ([1, ["Contribute", 1, "max"], []], "no header"),
        ([1, ["Push", 1, 1, 1, 1, "0.1"], []], "no header"),
        (["1", ["EnterBarrier", 0], []], "no header"),
        ([1], "no header"),
        ({"number": 1}, "no header"),
        ([1, ["Refused", "x" * HEADER_BYTES], []], "a header of [0-9]+ bytes"),
    ],
)
def test_invalid_headers_are_refused(said: Any, why: str) -> None:
    text = msgspec.json.encode(said) if any(2**70 in one for one in _pairs(said)) else msgspec.msgpack.encode(said)
    with pytest.raises(FramingError, match=why):
        decode_header(text)


def _pairs(said: Any) -> list[Any]:
    return said[2] if isinstance(said, list) and len(said) > 2 else []


@pytest.mark.parametrize(
    "octets",
    [
        b"\x93\x01\x92\xa7Refused\xa1\xff\x90",  # invalid UTF-8 in a text
        b"\x93\x01\x91\xa1\xff\x90",  # in the name of a message
        b"\x93\x01\x91\xa4Rest\x91\x92\xa2\xff\xff\x01",  # in the name of a dtype
        b"\x93\x01\x91\xa4Rest\xdd\xff\xff\xff\xff",  # four billion tensors announced
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 60_000,  # deeply nested
        b"\x93\x01" + b"\x91" * 60_000,
        b"\x80",
        b"\xc1",
    ],
)
def test_malformed_headers_are_refused(octets: bytes) -> None:
    with pytest.raises(FramingError):
        Assembly().begin(octets)


@pytest.mark.parametrize("chunks", [[5], [8, 1], [8, 8], [0], [6], [4, 4, 4], [16]])
def test_chunks_that_do_not_fit_are_refused(chunks: list[int]) -> None:
    """The header announces one tensor of two numbers of four bytes."""
    assembly = Assembly()
    assembly.begin(frames(1, m.Result(), [torch.zeros(2)])[0][0])
    with pytest.raises(FramingError):
        assembly.add([bytearray(one) for one in chunks])


# --- memory ---------------------------------------------------------------------------------------------------------


def peak(act: Any) -> int:
    """Return the peak number of bytes that Python allocated."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("announced", [10 * 2**30, 2**60, 2**64 - 1])
def test_announced_tensors_take_no_memory_before_they_are_received(announced: int) -> None:
    head = msgspec.msgpack.encode([1, ["Result"], [["float64", announced], ["bool", announced]]])
    assembly = Assembly()

    def take() -> None:
        assembly.begin(head)
        for _ in range(10):
            assert not assembly.add([bytearray(80)])

    take()
    assert peak(take) < 50_000
    assert sum(piece.untyped_storage().nbytes() for _, _, piece in assembly.drain()) == 800


def test_a_header_with_many_tensors_takes_memory_in_proportion_to_its_bytes() -> None:
    """A few Python objects per tensor, and none of the billions of announced numbers."""
    head = msgspec.msgpack.encode([1, ["Result"], [["int8", 2**40]] * 4000])
    assert peak(lambda: Assembly().begin(head)) < 100 * len(head)
    empty = msgspec.msgpack.encode([1, ["Result"], [["int8", 0]] * 6000])

    def take() -> None:
        assembly = Assembly()
        assembly.begin(empty)
        assert assembly.add([])

    assert peak(take) < 100 * len(empty)


def test_incomplete_messages_do_not_accumulate() -> None:
    """Each new message replaces the last."""
    head = frames(1, m.Result(), [torch.zeros(1000)])[0][0]
    assembly = Assembly()

    def flood() -> None:
        for _ in range(200):
            assembly.begin(head)
            assembly.add([bytearray(3000)])

    assert peak(flood) < 100_000
