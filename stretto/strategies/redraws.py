"""Layers that a script draws again between two steps: values that have nothing to do with those before.

Each worker has random numbers of its own, so the new values differ among workers unless the script seeds them. A few
values of each parameter are compared before and after. Values that are clamped, scaled, masked, averaged or disturbed
by noise stay correlated with those before; values that were drawn again do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from stretto.errors import explain
from stretto.strategies.flat_buffers import FlatBuffer, ParameterSlice
from stretto.strategies.tensor_sync import crc

SAMPLES = 32
"""Largest number of values of each parameter that are compared."""
LEAST_CORRELATION = 0.5
"""Correlation of a layer's values before and after a change below which the layer was drawn again."""


class Redraws:
    """Looks for parameters that were drawn again since they were noted.

    Cost: a read of SAMPLES values of each parameter at each of `note` and `found`. On a device `found` reads them only
    after an operation on a parameter; one on `parameter.data` is not noticed there.
    """

    def __init__(self, parts: Sequence[FlatBuffer]) -> None:
        self.parts = parts
        self._samples = [_Samples(part) for part in parts if part.is_loaded and not part.width]
        self._has_noted = False

    def note(self) -> None:
        """Note the parameters: those changes are looked for that the script makes from now on."""
        for samples in self._samples:
            samples.note()
        self._has_noted = True

    def is_current(self) -> bool:
        """Return True if no exchange has changed the parameters since they were noted."""
        return self._has_noted and all(samples.is_current() for samples in self._samples)

    def found(self) -> dict[str, int]:
        """Return checksums of the parameters that were drawn again since `note`, by name."""
        if not self._has_noted:
            return {}
        changed = [samples for samples in self._samples if samples.has_changed()]
        self._has_noted = not changed
        return {name: value for samples in changed for name, value in samples.drawn_again().items()}


class _Samples:
    """Some values of each parameter in a flat buffer."""

    def __init__(self, part: FlatBuffer) -> None:
        self._part = part
        self._slots = [slot for slot in part.slots if slot.home is None and slot.stop > slot.start]
        self._counts = [min(slot.stop - slot.start, SAMPLES) for slot in self._slots]
        places = [
            torch.linspace(slot.start, slot.stop - 1, count, dtype=torch.float64, device="cpu").round().long()
            for slot, count in zip(self._slots, self._counts, strict=True)
        ]
        self._index = torch.cat(places).to(part.theta.device)
        self._addresses = [slot.view(part.theta).data_ptr() for slot in self._slots]

    def note(self) -> None:
        self._noted, self._version, self._versions = self._values(), self._part.theta._version, self._versions_now()

    def is_current(self) -> bool:
        return self._part.theta._version == self._version

    def has_changed(self) -> bool:
        addresses = [slot.parameter.data_ptr() for slot in self._slots]
        if addresses != self._addresses:
            self._part.lay_back()
        elif not self._part.theta.is_cpu:
            return self._versions_now() != self._versions
        return not torch.equal(self._values(), self._noted)

    def _versions_now(self) -> list[int]:
        return [] if self._part.theta.is_cpu else [slot.parameter._version for slot in self._slots]

    def _values(self) -> Tensor:
        return self._part.theta.index_select(0, self._index)

    def drawn_again(self) -> dict[str, int]:
        """Return checksums of the parameters of those layers whose values have nothing to do with the noted ones."""
        layers: dict[str, list[tuple[ParameterSlice, Tensor, Tensor]]] = {}
        both, start = torch.stack([self._noted, self._values()]).double().cpu(), 0
        for slot, count in zip(self._slots, self._counts, strict=True):
            before, after = both[:, start : start + count]
            start += count
            if not torch.equal(before, after):
                layers.setdefault(slot.name.rpartition(".")[0], []).append((slot, before, after))
        return {
            slot.name: crc(after)
            for changes in layers.values()
            if _correlation([(before, after) for _, before, after in changes]) < LEAST_CORRELATION
            for slot, _, after in changes
        }


def _correlation(changes: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the correlation of values before and after, each parameter about its mean; NaN for equal values."""
    before = torch.cat([one - one.mean() for one, _ in changes])
    after = torch.cat([one - one.mean() for _, one in changes])
    return float(before @ after / (before.norm() * after.norm()))


def difference(drawn: Sequence[Mapping[str, int]]) -> str | None:
    """Return the error text if these workers have drawn other values, or not all of them have; None if they agree."""
    names = dict.fromkeys(name for one in drawn for name in one)
    apart = [name for name in names if len({one.get(name) for one in drawn}) > 1]
    if not apart:
        return None
    sums = [one.get(apart[0]) for one in drawn]
    by_worker = ", ".join("as before" if value is None else f"{value:08x}" for value in sums)
    return refused(apart, f"checksums {by_worker} by worker")


def refused(names: Iterable[str], got: str) -> str:
    """Return the error text for layers of which the workers do not have the same new values."""
    return explain(
        f"a layer was drawn again in the middle of an epoch, by each worker for itself: {', '.join(sorted(names)[:4])}",
        got=f"{got}: each worker has random numbers of its own",
        expected="the same new values at all workers",
        to_type="torch.manual_seed(0) immediately before the layer is drawn again, at the same step of every worker; "
        "or the layer drawn between two epochs",
    )
