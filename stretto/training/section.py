"""One section of a process, from one `distribute` to the next, and the totals of the sections before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stretto.checkpoint.storage import State
from stretto.interval import Interval
from stretto.membership.epoch_numbers import numbered

COUNTS = ("number", "epochs", "rounds", "global_steps", "samples", "seconds")
"""Fields of the counts that a worker sends to another one."""


@dataclass
class Section:
    """Position of a section among those of its process.

    The coordinator, the shards and the other workers number requests for a global step, rounds, parameter sets and
    epochs over all sections. A section counts its own from 0; the fields hold the totals of all sections before it.
    """

    number: int = 1
    """The first is 1."""
    step_requests: int = 0
    rounds: int = 0
    global_steps: int = 0
    samples: int = 0
    epochs: int = 0
    parameter_sets: int = 0
    sent: int = 0
    received: int = 0
    """Bytes that this process has sent and received."""
    seconds: float = 0.0
    """Seconds from the zero of the first section's clock to the zero of this one's."""
    checkpoints: Interval | None = None
    """Interval between checkpoints, as far as it has passed in the sections before; None in the first."""
    lost: list[tuple[int, str]] = field(default_factory=list)
    """Losses of streams in the sections before: the epoch, and a text."""
    state: State | None = None
    """State to continue from: another worker's, or a checkpoint's."""
    notices: list[str] = field(default_factory=list)
    """Notices that arose before the event log was open."""

    def take_state(self) -> State | None:
        """Return the state to continue from, and let go of it."""
        state, self.state = self.state, None
        return state

    def epoch_number(self, own: int) -> int:
        """Return the number by which a server knows epoch `own` of this section."""
        return numbered(self.number, own)

    def facts(self) -> dict[str, Any]:
        """Return the counts that a worker sends to another one."""
        return {name: getattr(self, name) for name in COUNTS}


def continued(state: State, notices: list[str] | None = None) -> Section:
    """Return the section that a state belongs to: the first one if the state is empty or names no section."""
    facts = state.facts.get("section", {})
    return Section(**facts, state=state if state.facts else None, notices=notices or [])
