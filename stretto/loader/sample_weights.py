"""Sample counts that weight an exchange, and the times at which workers were ready for one."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from stretto.errors import ModelError, explain
from stretto.loader.global_step import Parts
from stretto.runtime.phase_timer import Stopwatch
from stretto.transport import Transport


class Weights:
    """Samples since the last exchange: each worker knows its own and the sum, which give its weight in the mean.

    Where the script weighs its batches (see `stretto.weight`), its numbers take the place of the samples, and the sum
    is agreed before the exchange.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._own = self._total = 0
        self._global_steps: list[tuple[int, int]] = []
        """Samples of this worker and of all workers, by global step."""
        self._parts: list[Parts] = []
        self._removed: dict[int, int] = {}
        """Number of `_parts` that were subtracted from the total, by failed worker."""
        self._spent = False
        self._weighs = self._is_sum = False
        """True if the script weighs its batches; if its losses are sums."""
        self._numbers: list[float | None] = []
        """The script's weight of this worker's batch, by global step; None if it has not given one."""
        self._agreed: dict[int, float] = {}
        """By worker: the sum of these weights that it has told for the next exchange."""

    def add(self, own: int, total: int, parts: Parts | None) -> None:
        """Add a global step. Samples that an exchange has carried do not weigh again."""
        if self._spent:
            self._own = self._total = 0
            self._global_steps.clear()
            self._parts.clear()
            self._removed.clear()
            self._numbers.clear()
            self._agreed.clear()
            self._spent = False
        self._own += own
        self._total += total
        self._global_steps.append((own, total))
        self._numbers.append(None if own else 0.0)
        if parts is not None:
            self._parts.append(parts)

    @property
    def is_weighed(self) -> bool:
        """True if the script weighs its batches."""
        return self._weighs

    def weigh(self, number: float | None, is_sum: bool) -> None:
        """Give the batch of the last global step this weight, or have gradients added; a step without samples has 0."""
        self._weighs, self._is_sum = number is not None, is_sum
        if number is not None and self._global_steps and self._global_steps[-1][0]:
            self._numbers[-1] = number

    def agree(self) -> None:
        """Agree on the sum of the script's weights before an exchange; of samples it is known."""
        if not self._weighs or self._spent or self._agreed:
            return
        given = [number for number in self._numbers if number is not None]
        if self._numbers and not given:
            raise ModelError(_not_weighed())
        received = self._transport.all_gather_bytes(struct.pack("<d", sum(given)))
        told = (struct.unpack("<d", one)[0] for one in received)
        self._agreed = dict(zip(self._transport.members, told, strict=True))

    def remove_failed(self, gone: Sequence[int]) -> None:
        """Remove the samples of failed workers, whose contribution will not arrive."""
        for worker in gone:
            self._total -= sum(part(worker) for part in self._parts[self._removed.get(worker, 0) :])
            self._removed[worker] = len(self._parts)
            self._agreed.pop(worker, None)

    def forget(self, global_steps: int) -> None:
        """Remove the samples of the last global steps, which produced no gradient, from the next exchange's weights."""
        for _ in range(0 if self._spent else min(global_steps, len(self._global_steps))):
            own, total = self._global_steps.pop()
            self._numbers.pop()
            self._own -= own
            self._total -= total
            if len(self._parts) > len(self._global_steps):
                part = self._parts.pop()
                self._total += sum(
                    part(worker) for worker, removed in self._removed.items() if removed > len(self._parts)
                )
                self._removed = {worker: min(removed, len(self._parts)) for worker, removed in self._removed.items()}

    @property
    def is_carried(self) -> bool:
        """True if exchanges have carried all samples."""
        return self._spent or not self._total

    @property
    def has_own(self) -> bool:
        """True if this worker has samples since the last exchange."""
        return self._own > 0

    @property
    def has_any(self) -> bool:
        """True if any worker has samples since the last exchange; failed workers have none."""
        return self._total > 0

    def share(self) -> float:
        """Return this worker's fraction of the samples since the last exchange; 1/workers if there were none.

        Of the script's weights likewise, but 0 if their sum is 0; 1 where losses are sums.
        """
        if self._is_sum:
            return float(self._own > 0)
        if self._agreed:
            total = sum(self._agreed.values())
            return self._agreed[self._transport.number] / total if total else 0.0
        return self._own / self._total if self._total else 1 / self._transport.workers

    def carried(self) -> None:
        """Note that an exchange has ended; a second one in the same global step has the same weights."""
        self._spent = True


class Arrivals:
    """Times at which this worker was ready for each exchange, and how long each blocked it.

    The waiting time follows later, when the workers have shared these times.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._notes: list[tuple[float, float]] = []

    def note(self, now: float, blocked_s: float) -> None:
        """Note an exchange that ended at `now` and blocked this worker for `blocked_s` seconds."""
        self._notes.append((now - blocked_s, blocked_s))

    def settle(self, timer: Stopwatch, message: bytes) -> list[bytes]:
        """Share the times with the other workers, and count the time until the last worker was ready as waiting.

        A message of each worker, of equal lengths, is sent with the times; return all of them.
        """
        notes, self._notes, length = self._notes, [], len(message)
        own = message + struct.pack(f"<{len(notes)}d", *(ready for ready, _ in notes))
        received = self._transport.all_gather_bytes(own)
        messages, received = [one[:length] for one in received], [one[length:] for one in received]
        if self._transport.workers == 1 or len({len(one) for one in received}) > 1:
            return messages
        last = np.frombuffer(b"".join(received)).reshape(len(received), len(notes)).max(0).tolist()
        waited = sum(min(blocked, max(late - ready, 0.0)) for (ready, blocked), late in zip(notes, last, strict=True))
        timer.move("exchanging", "waiting", waited)
        return messages


def _not_weighed() -> str:
    return explain(
        "no batch of this exchange has a weight, and earlier ones had",
        got="an exchange whose batches the script has not weighed",
        expected="stretto.weight(n) in each batch, or in one of those whose gradients are accumulated, at all workers",
        to_type="stretto.weight(n) before loss.backward()",
    )
