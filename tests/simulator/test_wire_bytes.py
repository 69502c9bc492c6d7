"""Bytes of collectives and messages: properties for any number of workers and any size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.collective_ops import Exchange
from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import CHUNK_BYTES, encode
from stretto.simulator.network import wire_bytes
from stretto.transport import gloo_ring
from tests.encrypted_ends import encrypted

crews = st.integers(1, 40)
octets = st.one_of(st.integers(0, 300), st.integers(0, 1 << 25))


def _total(pairs) -> tuple[int, int]:
    sent, received = zip(*pairs, strict=True)
    return sum(sent), sum(received)


@given(crews, octets, st.sampled_from([1, 2, 4, 8]))
def test_ring_sends_as_much_as_it_receives_and_at_least_the_lower_bound(workers, numbers, item) -> None:
    nbytes = numbers * item
    sent, received = _total(gloo_ring.all_reduce_bytes(worker, workers, nbytes, item) for worker in range(workers))
    data = 2 * (workers - 1) * nbytes
    headers = sent - data
    assert sent == received
    assert headers % (3 * gloo_ring.HEADER_BYTES) == 0
    messages = headers // (3 * gloo_ring.HEADER_BYTES)
    segments = max(-(-nbytes // gloo_ring.SEGMENT_BYTES) + workers, 2 * workers)
    assert messages <= 2 * (workers - 1) * segments
    assert messages * gloo_ring.SEGMENT_BYTES >= data


@given(crews, st.integers(1, 30))
def test_ring_of_equal_chunks_costs_all_workers_the_same(workers, numbers) -> None:
    """2(N-1)/N * B plus headers: two segments per chunk, N-1 chunks, reduce-scatter and all-gather."""
    nbytes = 2 * workers * 4 * numbers
    moved = 2 * (workers - 1) * nbytes // workers + 3 * gloo_ring.HEADER_BYTES * 4 * (workers - 1)
    for worker in range(workers):
        assert gloo_ring.all_reduce_bytes(worker, workers, nbytes) == (moved, moved)


@given(st.integers(2, 6), st.integers(1, 12), st.sampled_from([2, 4, 8]), st.data())
def test_the_ring_message_by_message(workers, numbers, item, data) -> None:
    """Follow each segment: in step t worker r sends chunk r+1+t (reduce-scatter), then r+t (all-gather), to r-1."""
    numbers = data.draw(st.sampled_from([numbers, numbers * 997, numbers << 19]))
    nbytes = numbers * item
    segments = -(-max(-(-nbytes // gloo_ring.SEGMENT_BYTES), 2 * workers) // workers) * workers
    length = -(-numbers // segments) * item
    sent, received = [0] * workers, [0] * workers
    for worker in range(workers):
        for step in range(workers - 1):
            for chunk in ((worker + 1 + step) % workers, (worker + step) % workers):
                for segment in range(chunk * segments // workers, (chunk + 1) * segments // workers):
                    held = min(length, nbytes - segment * length)
                    if held > 0:
                        to = (worker - 1) % workers
                        sent[worker] += 96 + held
                        received[to] += 96 + held
                        sent[to] += 48
                        received[worker] += 48
    assert list(zip(sent, received, strict=True)) == [
        gloo_ring.all_reduce_bytes(w, workers, nbytes, item) for w in range(workers)
    ]


@given(st.lists(octets, min_size=1, max_size=20))
def test_all_gather_receives_what_was_sent(sizes) -> None:
    sent, received = _total(wire_bytes.all_gather_bytes(worker, sizes) for worker in range(len(sizes)))
    assert sent == received
    others = len(sizes) - 1
    pieces = sum(-(-size // wire_bytes.PIECE_BYTES) for size in sizes)
    assert sent == others * (sum(sizes) + 144 * pieces + len(sizes) * (288 + 8))


@given(crews, octets, st.data())
def test_broadcast_tree_reaches_each_worker_once(workers, length, data) -> None:
    root = data.draw(st.integers(0, workers - 1))
    pairs = [wire_bytes.broadcast_bytes(worker, workers, root, length) for worker in range(workers)]
    sent, received = _total(pairs)
    pieces = [min(wire_bytes.PIECE_BYTES, length - at) for at in range(0, length, wire_bytes.PIECE_BYTES)]
    rounds = [256] if length <= 248 else [256, *pieces]
    assert sent == received == (workers - 1) * sum(144 + one for one in rounds)
    teller_sends_to = (workers - 1).bit_length()
    assert pairs[root] == (
        teller_sends_to * sum(96 + one for one in rounds),
        teller_sends_to * 48 * len(rounds),
    )
    assert pairs == [
        wire_bytes.broadcast_bytes((worker + 1) % workers, workers, (root + 1) % workers, length)
        for worker in range(workers)
    ]


@pytest.mark.parametrize(("longest", "moved"), [(0, 544), (248, 544), (249, 1081), (1000, 1832)])
def test_long_byte_message_is_gathered_twice(longest: int, moved: int) -> None:
    for workers in (1, 2, 5):
        assert wire_bytes.all_gather_message_bytes(workers, longest) == ((workers - 1) * moved, (workers - 1) * moved)


def test_single_worker_sends_nothing() -> None:
    alone = [
        gloo_ring.all_reduce_bytes(0, 1, 1000),
        wire_bytes.all_gather_bytes(0, [1000]),
        wire_bytes.all_gather_message_bytes(1, 1000),
        wire_bytes.broadcast_bytes(0, 1, 0, 1000),
        wire_bytes.connect_bytes(1),
    ]
    assert alone == [(0, 0)] * len(alone)


def test_bytes_equal_recorded_kernel_counts() -> None:
    """Recorded over the loopback interface, with 3 and 4 workers and one shard."""
    assert [gloo_ring.all_reduce_bytes(worker, 3, 4) for worker in range(3)] == [(148, 148), (196, 248), (248, 196)]
    assert [gloo_ring.all_reduce_bytes(worker, 3, 56, 8) for worker in range(3)] == [
        (848, 728),
        (728, 856),
        (952, 944),
    ]
    assert gloo_ring.all_reduce_bytes(0, 2, 12_000_004) == (12_001_732, 12_001_732)
    assert [wire_bytes.all_gather_bytes(worker, [0, 1000, 2000]) for worker in range(3)] == [
        (688, 3784),
        (2832, 2784),
        (4832, 1784),
    ]
    assert [wire_bytes.broadcast_bytes(worker, 4, 3, 1000) for worker in range(4)] == [
        (1544, 1544),
        (96, 1448),
        (96, 1448),
        (2896, 192),
    ]
    assert wire_bytes.connect_bytes(4) == (12, 12)
    assert [wire_bytes.rendezvous_bytes(workers) for workers in (2, 3, 5, 8)] == [
        (364, 437),
        (568, 554),
        (1024, 788),
        (1828, 1139),
    ]
    assert wire_bytes.handshake_bytes(0, False) == (115, 107)
    assert wire_bytes.handshake_bytes(0, True) == (614, 301)
    assert wire_bytes.handshake_bytes(12, True) == (615, 301)


@pytest.mark.parametrize(
    ("length", "plain", "sealed"),
    [
        (0, 25, 58),
        (1, 28, 94),
        (240, 268, 341),
        (256, 292, 358),
        (CHUNK_BYTES, 1048614, 1048680),
        (CHUNK_BYTES + 1, 1048619, 1048751),
        (4 * CHUNK_BYTES, 4194375, 4194639),
    ],
)
def test_rpc_message_bytes_equal_recorded_kernel_counts(length: int, plain: int, sealed: int) -> None:
    tensors = [("uint8", length)]
    assert wire_bytes.message_bytes(m.Header(1, m.Gather(1, None), tensors), False) == plain
    assert wire_bytes.message_bytes(m.Header(1, m.Gather(1, None), tensors), True) == sealed


edges = st.sampled_from([-1, 0, 1]).flatmap(
    lambda by: st.sampled_from([1, 255, CHUNK_BYTES // 4, CHUNK_BYTES // 2, CHUNK_BYTES, 2 * CHUNK_BYTES]).map(
        lambda at: at + by
    )
)
bodies = st.sampled_from(
    [m.Push(1, 300, 70000, 8, 0.1), m.PushReply(3, [(1, 2, 3, 4)], [], 0.5), m.Result(), m.Settle(1, list(range(40)))]
)


@given(st.lists(st.tuples(st.sampled_from(["uint8", "float32", "int64"]), edges), max_size=4), bodies, st.booleans())
def test_rpc_message_costs_its_frames(tensors, body, encrypted) -> None:
    parts = [torch.empty(length, dtype=getattr(torch, dtype)) for dtype, length in tensors]
    frames = [memoryview(frame).nbytes for message in encode(5, body, parts) for frame in message]
    on_wire = [one + 33 for one in frames] if encrypted else frames
    expected = sum(one + (2 if one < 256 else 9) for one in on_wire)
    assert wire_bytes.message_bytes(m.Header(5, body, tensors), encrypted) == expected


@given(st.integers(0, 1 << 40))
def test_larger_request_number_takes_its_msgpack_size(number) -> None:
    more = len(msgspec.msgpack.encode(number)) - 1
    at_zero = wire_bytes.message_bytes(m.Header(0, m.Result(), []), False)
    assert wire_bytes.message_bytes(m.Header(number, m.Result(), []), False) == at_zero + more


def test_exchanges_of_ranks_cost_as_many_bytes_as_sent() -> None:
    ends = encrypted(2)
    for size in (0, 1, 1 << 16, (1 << 16) + 1, 1 << 20, 3 << 20, (4 << 20) + 5, (9 << 20) + 1):
        before = sum(end.traffic().bytes_sent for end in ends)
        tensors = (torch.zeros(size, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8))
        handles = [end.submit(Exchange(1 - end.worker, one)) for end, one in zip(ends, tensors, strict=True)]
        for handle in handles:
            handle.wait()
        assert sum(end.traffic().bytes_sent for end in ends) - before == wire_bytes.sealed_exchange_bytes(size)
    before = sum(end.traffic().bytes_sent for end in ends)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda end: end.all_gather_bytes(b"7 bytes"), ends)) == [[b"7 bytes"] * 2] * 2
    assert sum(end.traffic().bytes_sent for end in ends) - before == wire_bytes.sealed_gather_bytes(2, 7)
    for end in ends:
        end.close()
