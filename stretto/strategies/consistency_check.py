"""Replicas that must be equal are compared by their hashes; a difference names the tensor and the worker.

So are the learning rates that schedulers have chosen by a number, as `ReduceLROnPlateau` does.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from torch import Tensor

from stretto.errors import ReplicasDifferError, explain
from stretto.membership.loop_positions import named
from stretto.strategies.tensor_sync import crc
from stretto.transport import Transport


def compare(
    transport: Transport, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor], rates: Sequence[float], when: str
) -> None:
    """Raise ReplicasDifferError unless all workers hold the same bits, and have the same learning rates `rates`.

    `wholes` are hashed each time; `parts`, the named tensors in them, only to name a difference. Every worker raises.
    """
    own_rates = packed_rates(rates)
    mine = struct.pack(f"<{1 + len(wholes)}I", zlib.crc32(own_rates), *(crc(one) for one in wholes.values()))
    if len(set(transport.all_gather_bytes(mine))) == 1:
        return
    check_rates(transport.all_gather_bytes(own_rates), "worker")
    sums = struct.pack(f"<{len(parts)}I", *(crc(one) for one in parts.values()))
    raise ReplicasDifferError(_difference(list(parts), transport.all_gather_bytes(sums), when))


def packed_rates(rates: Sequence[float]) -> bytes:
    """Return learning rates as a message."""
    return msgspec.msgpack.encode(rates)


def check_rates(packed: Sequence[bytes], of: str) -> None:
    """Raise ReplicasDifferError unless these are equal: the learning rates of each worker, or process of one."""
    if len(set(packed)) == 1:
        return
    each = [msgspec.msgpack.decode(one, type=list[float]) for one in packed]
    shown = "; ".join(", ".join(f"{rate:g}" for rate in rates) or "none" for rates in each)
    raise ReplicasDifferError(
        explain(
            f"learning rates differ by {of}: schedulers were stepped with other numbers, such as a loss of each",
            got=f"learning rates {shown} by {of}",
            expected="the same number everywhere; the loss of a batch is that of the samples of one process",
            to_type="scheduler.step(validation_loss), of data that each process evaluates whole after the epoch",
        )
    )


def _difference(names: list[str], sums: list[bytes], when: str) -> str:
    for index, name in enumerate(names):
        values = [struct.unpack_from("<I", one, 4 * index)[0] for one in sums]
        common, times = Counter(values).most_common(1)[0]
        if times < len(values):
            apart = [worker for worker, value in enumerate(values) if value != common]
            return (
                f"replicas differ {when}: {name} of {named(apart)} differs from the other workers'\n"
                f"  got: checksums {', '.join(f'{value:08x}' for value in values)} by worker\n"
                f"  expected: the same bits everywhere\n"
                f"  try: look for code that changes the model on one worker only, or a random layer seeded differently"
            )
    return f"replicas differ {when}, in a tensor that only some workers have"
