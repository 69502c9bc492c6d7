"""Codec and outer state of an exchange, copied to an exchange of other parameters, for parameters that are in both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.codecs import Codec
from stretto.strategies.flat_buffers import FlatBuffer, ParameterSlice
from stretto.strategies.local_updates import RoundRange


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """A codec's state for elements `start` to `stop` of a flat buffer."""

    state: Any
    part: FlatBuffer
    start: int
    stop: int


Residuals = list[tuple[FlatBuffer, Tensor]]
"""For each flat buffer, the flat residual."""


def residuals(codec: Codec, pieces: Sequence[Piece]) -> Residuals:
    """Return the residuals of a codec with error feedback, by part; nothing for one without."""
    found: dict[int, tuple[FlatBuffer, Tensor]] = {}
    for one in pieces:
        residual = codec.residual(one.state)
        if residual is not None:
            _, flat = found.setdefault(id(one.part), (one.part, torch.zeros_like(one.part.theta)))
            flat[one.start : one.stop].copy_(residual.reshape(-1))
    return list(found.values())


@torch.no_grad()
def add_residuals(codec: Codec, before: Residuals, pieces: Sequence[Piece]) -> None:
    """Add the residuals of parameters that are in these pieces, too."""
    for part in {id(one.part): one.part for one in pieces}.values() if before else ():
        flat = torch.zeros_like(part.theta)
        for source, known in before:
            for old, new in _in_both(source, part):
                new.view(flat).copy_(old.view(known))
        for one in pieces:
            if one.part is part and codec.residual(one.state) is not None:
                codec.add_residual(one.state, flat[one.start : one.stop])


@torch.no_grad()
def carry_over(before: Sequence[RoundRange], after: Sequence[RoundRange]) -> None:
    """Let parameters that were exchanged before keep their agreed values, and their outer velocity."""
    for source in before:
        for one in after:
            for old, new in _in_both(source.part, one.part):
                new.view(one.state.agreed).copy_(old.view(source.state.agreed))
                if source.state.velocity is not None:
                    if one.state.velocity is None:
                        one.state.velocity = torch.zeros_like(one.state.agreed)
                    new.view(one.state.velocity).copy_(old.view(source.state.velocity))


def _in_both(one: FlatBuffer, other: FlatBuffer) -> Iterator[tuple[ParameterSlice, ParameterSlice]]:
    """Yield the slices of parameters that are in both buffers; none if the dtypes differ."""
    if one.theta.dtype != other.theta.dtype:
        return
    places = {id(slot.parameter): slot for slot in one.slots if slot.home is None}
    for slot in other.slots:
        if slot.home is None and id(slot.parameter) in places:
            yield places[id(slot.parameter)], slot
