"""Cost model of computing and communication, and the text of `--step-time`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stretto.call_syntax import Words
from stretto.units import TIMES

AUTO = "auto"
SAMPLE = "sample_s"
NAMES = {
    "": "step_s",
    "per sample": SAMPLE,
    "per micro-batch": "turns_s",
    "per epoch": "epoch_s",
    "encoding": "codec_s",
    "applying": "update_s",
    "per exchange": "exchange_s",
    "per conversion": "conversion_s",
    "per message": "message_s",
    "per MB": "megabyte_s",
    "per RPC message": "rpc_message_s",
    "per MB of RPC messages": "rpc_megabyte_s",
    "per MB over links": "link_megabyte_s",
}
STAGES = "turns_s"
"""Field with a time for each stage of a pipeline."""
MEGABYTE = 1e6


@dataclass(frozen=True)
class CostModel:
    """Processor time in seconds of the operations of a worker or a server.

    A step without communication takes `step_s`, and `sample_s` for each of its samples; `epoch_s` is an epoch besides
    its steps; of a worker in pipeline stages
    `turns_s` are the forward and backward passes of a micro-batch in each stage, and `step_s` is a step besides them;
    `codec_s` encoding one tensor or update, and also decoding its result; `update_s` applying one update at a server.
    The others are the costs of transports at each end. Collectives: `exchange_s` per operation, `message_s` per
    message, `megabyte_s` per MB, and `conversion_s` per conversion between bytes and tensors. Parameter server,
    encryption included: `rpc_message_s` per message, `rpc_megabyte_s` per MB, and `link_megabyte_s` besides for each MB
    that passes a link.
    """

    step_s: float
    codec_s: float = 0.0
    update_s: float = 0.0
    exchange_s: float = 0.0
    message_s: float = 0.0
    megabyte_s: float = 0.0
    rpc_message_s: float = 0.0
    rpc_megabyte_s: float = 0.0
    link_megabyte_s: float = 0.0
    epoch_s: float = 0.0
    conversion_s: float = 0.0
    turns_s: tuple[float, ...] = ()
    sample_s: float = 0.0

    def step_of(self, samples: int) -> float:
        """Return the time of a step with this number of samples."""
        return self.step_s + self.sample_s * samples

    def collective_s(self, messages: float, nbytes: float, conversions: int = 0) -> float:
        """Return the processor time of one worker for a collective in which it sends and receives this much."""
        fixed_s = self.exchange_s + self.conversion_s * conversions
        return fixed_s + self.message_s * messages + self.megabyte_s * nbytes / MEGABYTE

    def message_time_s(self, nbytes: float) -> float:
        """Return the time for sending a message to or from a server, which is also that for receiving it."""
        return self.rpc_message_s + self.rpc_megabyte_s * nbytes / MEGABYTE

    def link_s(self, nbytes: float) -> float:
        """Return the processor time of a link for a message, at both ends together."""
        return 2 * self.link_megabyte_s * nbytes / MEGABYTE

    def __str__(self) -> str:
        """Return the text that `parse` reads, rounded to 0.1 microseconds, or 0.1 nanoseconds a sample."""
        times = ((getattr(self, field), name, 7 if field == SAMPLE else 4) for name, field in NAMES.items())
        return ", ".join(f"{_times(time, digits)} {name}".rstrip() for time, name, digits in times if time or not name)


def parse(text: str, measured: Callable[[], CostModel] | None = None) -> CostModel:
    """Parse the text of `--step-time`. `auto` stands for the `measured` model, whose values the rest overrides.

    >>> model = parse("5ms, 0.2ms encoding, 0.1ms applying")
    >>> model.step_s, model.codec_s, model.update_s
    (0.005, 0.0002, 0.0001)

    Raises LaunchError.
    """
    values: dict[str, Any] = {}
    words = Words(
        text,
        "--step-time",
        "5ms, 10us per sample, 0.2ms encoding, 0.1ms applying",
        "the time of a step such as 5ms, optionally with those of each sample, of encoding a tensor and of applying an "
        "update",
    )
    is_auto = False
    for start in words.listed(","):
        if start == 0 and measured is not None and words.skip(AUTO):
            is_auto = True
            continue
        times = [words.quantity(TIMES)]
        while words.next[:1].isdigit():
            times.append(words.quantity(TIMES))
        offset = words.at
        field = NAMES.get(words.typed() if words.next not in ("", ",") else "")
        if field is None or field in values:
            raise words.refused(f"nothing, or once each: {', '.join(NAMES)[2:]}", offset)
        if field != STAGES and len(times) > 1:
            raise words.refused("`per micro-batch` after the times of several stages", offset)
        values[field] = tuple(times) if field == STAGES else times[0]
    if measured is not None and is_auto:
        return replace(measured(), **values)
    if "step_s" not in values:
        raise words.refused(problem="--step-time has no time of a step")
    return CostModel(**values)


def _times(value: float | tuple[float, ...], digits: int) -> str:
    return " ".join(f"{1e3 * time:.{digits}f}ms" for time in (value if isinstance(value, tuple) else (value,)))
