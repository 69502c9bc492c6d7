"""How fast are the kernels in Triton, as a share of a copy on the device? It needs a GPU.

100 million numbers. GB/s count the gradient once, 4n bytes a pass, whatever is read and written besides: the copy reads
and writes once, a kernel with the residual reads two vectors and writes one at the least. The sides take turns; times
are those of the device's own events, after a round that compiles; top-k is torch's, and two passes that write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import in_turns
from stretto.kernels import gpu

NUMBERS = 100_000_000
ROUNDS = 15
BUCKET = 2048
TAU = 2.59
"""One number in a hundred of the gradient and residual below is larger."""

Pass = Callable[[Tensor, Tensor | None, Tensor], Any]
Stopwatch = Callable[[Callable[[], Any]], float]

CASES: dict[str, Pass] = {
    "above 1%": lambda x, owed, _: gpu.take_above(x, owed, TAU),
    "moved 1%": lambda x, owed, ones: gpu.take_moved(x, owed, ones, TAU),
    "threshold 1%": lambda x, owed, _: gpu.take_threshold(x, owed, TAU),
    "top-k 1%": lambda x, owed, _: gpu.take_largest(x, owed, x.numel() // 100),
    "top-64 of 4096": lambda x, owed, _: gpu.take_largest_per_chunk(x, owed, 4096, 64),
    "sign, two means": lambda x, owed, _: gpu.sign_pack(x, owed, BUCKET, True),
    "8 bits, stochastic": lambda x, owed, _: gpu.quantise(x, owed, 127, BUCKET, "max", 1),
    "4 bits, stochastic": lambda x, owed, _: gpu.quantise(x, owed, 7, BUCKET, "max", 1),
    "ternary": lambda x, owed, _: gpu.quantise(x, owed, 1, BUCKET, "max", 1),
}


def run(rounds: int | None = None) -> None:
    """Measure, print, keep."""
    if not (torch.cuda.is_available() and gpu.THERE):
        missing = "Triton is not installed" if torch.cuda.is_available() else "torch finds no GPU"
        raise SystemExit(f"there are no kernels of a GPU to measure here: {missing}")
    found = measured("cuda", rounds or ROUNDS, NUMBERS, seconds_on_device)
    print("\n".join(lines(found)))
    about = {"numbers": NUMBERS, "gpu": torch.cuda.get_device_name()}
    print(f"kept in {save('gpu', {**about, 'cases': found}, trial=(rounds or ROUNDS) < ROUNDS)}")


def seconds_on_device(work: Callable[[], Any]) -> float:
    """The time between two events of the device, which lie around the work."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measured(device: str, rounds: int, numbers: int, stopwatch: Stopwatch) -> dict[str, Any]:
    """For each case the speeds of the copy and of the kernel, with a residual and without, and their ratios."""
    draw = torch.Generator(device).manual_seed(0)
    x, kept = (torch.randn(numbers, generator=draw, device=device) * size for size in (1.0, 0.1))
    return {name: _case(kernel, x, kept, rounds, stopwatch) for name, kernel in CASES.items()}


def _case(kernel: Pass, x: Tensor, kept: Tensor, rounds: int, stopwatch: Stopwatch) -> dict[str, Any]:
    owed, copy, ones = kept.clone(), torch.empty_like(x), torch.ones_like(x)

    def with_residual() -> float:
        owed.copy_(kept)
        return stopwatch(lambda: kernel(x, owed, ones))

    sides: dict[str, Callable[[], float]] = {
        "copy": lambda: stopwatch(lambda: copy.copy_(x)),
        "with residual": with_residual,
        "without": lambda: stopwatch(lambda: kernel(x, None, ones)),
    }
    return _record(in_turns(sides, rounds), 4 * x.numel() / 1e9)


def _record(seconds: Mapping[str, Sequence[float]], gb: float) -> dict[str, Any]:
    shares = {name: Ratio.of([seconds[name]], [seconds["copy"]]) for name in ("with residual", "without")}
    return {
        "gb_per_s": {name: Spread.of([gb / one for one in each]).record() for name, each in seconds.items()},
        "of_copy": {name: share.record() for name, share in shares.items()},
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """A line for each case: GB/s, and the share of the copy's."""
    for name, one in found.items():
        speeds = {side: each["median"] for side, each in one["gb_per_s"].items()}
        said = ", ".join(f"{side} {speeds[side]:.0f} ({share['median']:.2f})" for side, share in one["of_copy"].items())
        yield f"{name:20} GB/s (share of the copy's {speeds['copy']:.0f}): {said}"
