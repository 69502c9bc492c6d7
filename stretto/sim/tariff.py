"""What work takes, as it is typed for `--step-time`."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import LaunchError, explain
from stretto.sim.speeds import seconds

EXAMPLE = '--step-time "5ms, 0.2ms encoding, 0.1ms applying"'
NAMES = {"": "step_s", "encoding": "ask_s", "applying": "take_s"}


@dataclass(frozen=True)
class Tariff:
    """What the work of a worker or a server takes, in seconds; `step_s` is all that happens in a step but exchanging.

    `ask_s` is what it takes to encode one ask or update, and as much again to decode its answer; `take_s` what a server
    works on one update.
    """

    step_s: float
    ask_s: float = 0.0
    take_s: float = 0.0

    def __str__(self) -> str:
        """The text that `parse` reads, to a tenth of a microsecond."""
        times = ((getattr(self, field), name) for name, field in NAMES.items())
        return ", ".join(f"{1e3 * time:.4f}ms {name}".rstrip() for time, name in times if time or not name)


def parse(text: str) -> Tariff:
    """Read what was typed.

    >>> parse("5ms, 0.2ms encoding, 0.1ms applying")
    Tariff(step_s=0.005, ask_s=0.0002, take_s=0.0001)

    Raises LaunchError.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        time, _, name = part.strip().partition(" ")
        value, field = seconds(time), NAMES.get(name.strip())
        if value is None or field is None or field in found:
            raise _refused(text, part.strip() or "nothing")
        found[field] = value
    if "step_s" not in found:
        raise _refused(text, "no time of a step")
    return Tariff(**found)


def _refused(text: str, got: str) -> LaunchError:
    expected = "a time like 5ms, and maybe those of encoding an ask and of applying an update"
    return LaunchError(explain(f"--step-time cannot be {text!r}", got=got, expected=expected, to_type=EXAMPLE))
