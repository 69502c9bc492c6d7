"""Encoding of ascending indices: Rice codes of the gaps, a bitmap, or the word "all".

    message = empty                                            nothing
            | 253                                              all n
            | 254, n bits                                      bitmap, least significant bit first
            | b in 0..30, count (LEB128), count codes, 0...    Rice's code of the gaps with b low bits

A gap is `index - previous - 1`, with -1 before the first. Its code is `gap >> b` ones, a zero, and the low b bits of
it, least significant first, in a little-endian stream of bits that ends with zeros to a whole byte. With count entries
drawn at random from n the code is within 4% of the entropy, about `count * (log2(n / count) + 1.5)` bits.

The shortest of the three is taken, Rice before bitmap, and "all" whenever count == n. So the bytes are at most
`1 + ceil(n / 8)`. Of the b with the fewest bits the lowest is taken. It is one of floor(log2(mean gap)) (0 for a mean
below 1) and its neighbours -1, +1, +2: `bits(b) = count (b + 1) + sum(gap >> b)` is convex in b, falls while
2^b < mean / 3 and no longer falls where 2^b >= mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

ALL, BITMAP, MOST_LOW_BITS = 253, 254, 30
"""First bytes of messages without Rice codes, and the maximum of low bits of a Rice code."""


def pack_indices(indices: Tensor, n: int) -> Tensor:
    """Return the message (uint8) for `indices`: int32, ascending, distinct, all below `n`."""
    count = indices.numel()
    if count == 0:
        return indices.new_empty(0, dtype=torch.uint8)
    if count == n:
        return indices.new_tensor([ALL], dtype=torch.uint8)
    positions = indices.long()
    gaps = positions.diff(prepend=positions.new_tensor([-1])) - 1
    bits, low = min((_rice_bits(gaps, low), low) for low in _low_bits_tried(int(positions[-1]) + 1 - count, count))
    head = [low, *_varint(count)]
    if len(head) + (bits + 7) // 8 <= 1 + (n + 7) // 8:
        return _joined(head, _rice(gaps, low, bits))
    return _joined([BITMAP], positions.new_zeros(n, dtype=torch.uint8).index_fill_(0, positions, 1))


def unpack_indices(message: Tensor, n: int) -> tuple[Tensor, int]:
    """Return (indices (count,) int32 ascending, bytes used of `message`); other bytes may follow.

    Raise ValueError if the message is cut off, has an index outside `n`, or has ones in its padding.
    """
    if message.numel() == 0:
        return message.new_empty(0, dtype=torch.int32), 0
    kind = int(message[0])
    if kind == ALL and n > 0:
        return torch.arange(n, dtype=torch.int32, device=message.device), 1
    if kind == BITMAP:
        return _from_bitmap(message, n)
    if kind <= MOST_LOW_BITS:
        return _from_rice(message, n, kind)
    raise ValueError(f"{kind} is not the first byte of a message about indices")


def pack_bits(bits: Tensor) -> Tensor:
    """Pack bits (uint8, 0 or 1) into bytes, least significant first; the last byte is padded with zeros."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Unpack the bits (uint8, 0 or 1) of bytes, least significant first."""
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).view(-1)


def _joined(head: list[int], bits: Tensor) -> Tensor:
    return torch.cat([bits.new_tensor(head), pack_bits(bits)])


def _low_bits_tried(gaps: int, count: int) -> range:
    middle = max((gaps // count).bit_length() - 1, 0)
    return range(max(middle - 1, 0), min(middle + 2, MOST_LOW_BITS) + 1)


def _rice_bits(gaps: Tensor, low: int) -> int:
    return gaps.numel() * (low + 1) + int((gaps >> low).sum())


def _rice(gaps: Tensor, low: int, bits: int) -> Tensor:
    quotients = gaps >> low
    zeros = (quotients + 1 + low).cumsum(0) - low - 1
    stream = torch.ones(bits, dtype=torch.uint8, device=gaps.device)
    stream[zeros] = 0
    for bit in range(low):
        stream[zeros + 1 + bit] = (gaps >> bit & 1).to(torch.uint8)
    return stream


def _varint(number: int) -> list[int]:
    encoded = []
    while number >= 128:
        encoded.append(number & 127 | 128)
        number >>= 7
    return [*encoded, number]


def _count(message: Tensor) -> tuple[int, int]:
    """Return the number after the first byte, of at most five bytes, and the offset of its end."""
    number = 0
    for index, byte in enumerate(message[1:6].tolist()):
        number |= (byte & 127) << 7 * index
        if byte < 128:
            return number, index + 2
    raise ValueError("a message about indices ends in its count, or the count does not end")


def _from_bitmap(message: Tensor, n: int) -> tuple[Tensor, int]:
    used_bytes = 1 + (n + 7) // 8
    if message.numel() < used_bytes:
        raise ValueError(f"a bitmap of {n} bits is cut off after {message.numel() - 1} bytes")
    bits = unpack_bits(message[1:used_bytes])
    if bool(bits[n:].any()):
        raise ValueError(f"a bitmap of {n} bits has ones after its end")
    return bits[:n].nonzero().view(-1).int(), used_bytes


def _from_rice(message: Tensor, n: int, low: int) -> tuple[Tensor, int]:
    count, start = _count(message)
    if not 1 <= count <= n:
        raise ValueError(f"a message about indices speaks of {count} entries of {n}")
    max_bits = count * (low + 1) + (n >> low)
    bits = unpack_bits(message[start : start + (max_bits + 7) // 8])
    zeros = _next_zero(bits)
    starts = _orbit((zeros + low + 1).clamp(max=bits.numel() + 1), count)
    end = int(starts[count])
    used_bytes = start + (end + 7) // 8
    if end > bits.numel():
        raise ValueError(f"a message about {count} indices is cut off or speaks of places outside {n}")
    ends = zeros[starts[:-1]]
    gaps = ends - starts[:-1] << low
    for bit in range(low):
        gaps |= bits[ends + 1 + bit].long() << bit
    positions = (gaps + 1).cumsum(0) - 1
    if int(positions[-1]) >= n or bool(bits[end : (used_bytes - start) * 8].any()):
        raise ValueError(f"a message about indices has an index outside {n}, or does not end in zeros")
    return positions.int(), used_bytes


def _next_zero(bits: Tensor) -> Tensor:
    """Return for each position, and two after the end, the next position of a zero."""
    length = bits.numel()
    positions = torch.arange(length + 2, device=bits.device)
    positions[:length].masked_fill_(bits.bool(), length + 1)
    return positions.flip(0).cummin(0).values.flip(0)


def _orbit(following: Tensor, count: int) -> Tensor:
    """Return 0, f(0), f(f(0)), ... up to `count` terms, doubling them by squaring the power of f."""
    terms = following.new_zeros(1)
    while terms.numel() <= count:
        terms = torch.cat([terms, following[terms]])
        if terms.numel() <= count:
            following = following[following]
    return terms[: count + 1]
