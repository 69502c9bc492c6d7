"""What work takes, as it is typed for `--step-time`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stretto.errors import LaunchError, explain
from stretto.units import seconds

AUTO = "auto"
EXAMPLE = '--step-time "5ms, 0.2ms encoding, 0.1ms applying"'
NAMES = {
    "": "step_s",
    "per pass": "pass_s",
    "encoding": "ask_s",
    "applying": "take_s",
    "per exchange": "exchange_s",
    "per telling": "telling_s",
    "per message": "message_s",
    "per MB": "megabyte_s",
    "per parcel": "parcel_s",
    "per MB of parcels": "parcel_megabyte_s",
    "per MB over links": "link_megabyte_s",
}
MEGABYTE = 1e6


@dataclass(frozen=True)
class CostModel:
    """What the work of a worker or a server takes, in seconds; `step_s` is all that happens in a step but exchanging.

    `pass_s` is what a pass over the data takes besides its steps, `ask_s` what it takes to encode one ask or update,
    and as much again to decode its answer; `take_s` what a server works on one update. The others are what the wires
    take of a processor, at each end: without a centre for an exchange, for each message of it and for its bytes, and
    besides for telling words; at a server for a parcel and for its bytes, encryption included, and besides for those of
    them that go over a link.
    """

    step_s: float
    ask_s: float = 0.0
    take_s: float = 0.0
    exchange_s: float = 0.0
    message_s: float = 0.0
    megabyte_s: float = 0.0
    parcel_s: float = 0.0
    parcel_megabyte_s: float = 0.0
    link_megabyte_s: float = 0.0
    pass_s: float = 0.0
    telling_s: float = 0.0

    def wire_s(self, messages: float, nbytes: float, tellings: int = 0) -> float:
        """What an exchange takes of the processor of one worker, who sends and receives so much."""
        own = self.exchange_s + self.telling_s * tellings
        return own + self.message_s * messages + self.megabyte_s * nbytes / MEGABYTE

    def post_s(self, nbytes: float) -> float:
        """What sending a parcel takes, and receiving it again."""
        return self.parcel_s + self.parcel_megabyte_s * nbytes / MEGABYTE

    def link_s(self, nbytes: float) -> float:
        """What the links take for a parcel, at both ends together."""
        return 2 * self.link_megabyte_s * nbytes / MEGABYTE

    def __str__(self) -> str:
        """The text that `parse` reads, to a tenth of a microsecond."""
        times = ((getattr(self, field), name) for name, field in NAMES.items())
        return ", ".join(f"{1e3 * time:.4f}ms {name}".rstrip() for time, name in times if time or not name)


def parse(text: str, measured: Callable[[], CostModel] | None = None) -> CostModel:
    """Read what was typed. `auto` is what was `measured`; what is typed behind it goes before that.

    >>> found = parse("5ms, 0.2ms encoding, 0.1ms applying")
    >>> found.step_s, found.ask_s, found.take_s
    (0.005, 0.0002, 0.0001)

    Raises LaunchError.
    """
    found: dict[str, float] = {}
    parts = [part.strip() for part in text.split(",")]
    is_auto = measured is not None and parts[0] == AUTO
    for part in parts[is_auto:]:
        time, _, name = part.partition(" ")
        value, field = seconds(time), NAMES.get(name.strip())
        if value is None or field is None or field in found:
            raise _refused(text, part or "nothing")
        found[field] = value
    if measured is not None and is_auto:
        return replace(measured(), **found)
    if "step_s" not in found:
        raise _refused(text, "no time of a step")
    return CostModel(**found)


def _refused(text: str, got: str) -> LaunchError:
    expected = "a time like 5ms, and maybe those of encoding an ask and of applying an update"
    return LaunchError(explain(f"--step-time cannot be {text!r}", got=got, expected=expected, to_type=EXAMPLE))
