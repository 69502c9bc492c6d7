"""Replicas that must be equal are compared by their hashes; a difference names the tensor and the worker.

So are the learning rates that schedulers have chosen by a number, as `ReduceLROnPlateau` does. All other rates are
compared where replicas differ, and among the processes of a worker.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from stretto.errors import ReplicasDifferError, explain
from stretto.membership.loop_positions import named
from stretto.strategies.tensor_sync import crc
from stretto.transport import Transport


class Rates(NamedTuple):
    """Learning rates of all parameter groups, and, again, the rates that schedulers have chosen by a number."""

    all: Sequence[float] = ()
    by_number: Sequence[float] = ()

    def packed(self) -> bytes:
        """Return all learning rates as a message."""
        return msgspec.msgpack.encode(self.all)


NO_RATES = Rates()


def compare(
    transport: Transport,
    wholes: Mapping[str, Tensor],
    parts: Mapping[str, Tensor],
    rates: Rates,
    when: str,
    steps: Sequence[int] = (),
) -> None:
    """Raise ReplicasDifferError unless all workers hold the same bits, learning rates by number, and numbers of steps.

    `wholes` are hashed each time; `parts`, the named tensors in them, only to name a difference. Every worker raises.
    """
    counted = msgspec.msgpack.encode(steps)
    chosen = zlib.crc32(counted, zlib.crc32(msgspec.msgpack.encode(rates.by_number)))
    mine = struct.pack(f"<{1 + len(wholes)}I", chosen, *(crc(one) for one in wholes.values()))
    if len(set(transport.all_gather_bytes(mine))) == 1:
        return
    check_rates(transport.all_gather_bytes(rates.packed()), "worker")
    sums = transport.all_gather_bytes(struct.pack(f"<{len(parts)}I", *(crc(one) for one in parts.values())))
    if len(set(sums)) > 1:  # not so if one worker alone has stepped a scheduler by a number, to the same rates
        raise ReplicasDifferError(_difference(list(parts), sums, when))
    made = [msgspec.msgpack.decode(one, type=list[int]) for one in transport.all_gather_bytes(counted)]
    if any(one != made[0] for one in made):
        raise ReplicasDifferError(f"the workers have made different numbers of steps {when}: {made} by worker")


def check_rates(packed: Sequence[bytes], of: str, when: str = "") -> None:
    """Raise ReplicasDifferError unless these are equal: the learning rates of each worker, or process of one."""
    if len(set(packed)) == 1:
        return
    each = [msgspec.msgpack.decode(one, type=list[float]) for one in packed]
    shown = "; ".join(", ".join(f"{rate:g}" for rate in rates) for rates in each)
    raise ReplicasDifferError(
        explain(
            f"learning rates differ by {of}{when}: they were chosen by other numbers, such as the loss of each, or "
            "after other batches",
            got=f"learning rates {shown} by {of}",
            expected="the same number everywhere; the loss of a batch is that of the samples of one process",
            to_type="scheduler.step(validation_loss), of data that each process evaluates whole after the epoch; in an "
            "epoch at a number of stretto.steps(), not of a counter that differs among workers",
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
                f"  try: torch.manual_seed(0) before a layer is made or drawn again after stretto.distribute, since "
                f"each worker has random numbers of its own; or look for code that changes the model on one worker only"
            )
    return f"replicas differ {when}, in a tensor that only some workers have"
