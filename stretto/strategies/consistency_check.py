"""Replicas that must be equal are compared by their hashes; a difference names the tensor and the worker."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from stretto.errors import ReplicasDifferError
from stretto.membership.loop_positions import named
from stretto.strategies.tensor_sync import crc
from stretto.transport import Transport


def compare(transport: Transport, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor], when: str) -> None:
    """Raise ReplicasDifferError unless all workers hold the same bits.

    `wholes` are hashed each time; `parts`, the named tensors in them, only to name a difference. Every worker raises.
    """
    mine = struct.pack(f"<{len(wholes)}I", *(crc(one) for one in wholes.values()))
    if len(set(transport.all_gather_bytes(mine))) == 1:
        return
    sums = struct.pack(f"<{len(parts)}I", *(crc(one) for one in parts.values()))
    raise ReplicasDifferError(_difference(list(parts), transport.all_gather_bytes(sums), when))


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
