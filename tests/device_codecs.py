"""Exchanges of codecs on the second device, which tests run in a child process."""

from __future__ import annotations

import second_device  # noqa: F401  registers the device
import torch
from torch import Tensor

from stretto.codecs import CodecContext
from stretto.codecs.conformance import hold
from stretto.recipe.parser import parse

WORKERS, ROUNDS, LENGTHS = 3, 3, (5, 200)


def differing(codecs: list[str]) -> list[str]:
    """Return the codecs whose means, or residuals, on the device have other bits than on the CPU, and their errors."""
    return [problem for text in codecs if (problem := _problem(text))]


def _problem(text: str) -> str:
    for length in LENGTHS:
        near = _exchanged(text, length, torch.device("cpu"))
        try:
            far = _exchanged(text, length, torch.device("far", 0))
        except Exception as error:
            return f"{text}, {length} numbers: {type(error).__name__}: {error}"
        if not all(map(torch.equal, near, far)):
            return f"{text}, {length} numbers: other bits"
    return ""


def _exchanged(text: str, length: int, device: torch.device) -> list[Tensor]:
    codec, source = parse(f"allreduce(how={text})").how, torch.Generator().manual_seed(length)

    def drawn() -> Tensor:
        return torch.randn(length, generator=source).to(device)

    thetas, residuals = ([make() for _ in range(WORKERS)] for make in (drawn, lambda: 0 * drawn()))
    states = [
        codec.init_state(torch.zeros(length, device=device), CodecContext(worker, WORKERS, 7, (), theta))
        for worker, theta in enumerate(thetas)
    ]
    found = []
    for _ in range(ROUNDS):
        arguments = zip([drawn() / WORKERS for _ in range(WORKERS)], states, residuals, strict=True)
        kept = codec.keeps_residual
        means, _ = hold([codec.average(x, state, None if kept else residual) for x, state, residual in arguments])
        if any(one.device != device for one in means):
            raise AssertionError(f"a mean on {means[0].device}")
        found += [one.cpu().clone() for one in (*means, *residuals)]
    return found
