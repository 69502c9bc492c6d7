"""One section of a process: from one `distribute` to the next; with what the sections before it counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stretto.checkpoint.storage import State
from stretto.membership.epoch_numbers import numbered

COUNTS = ("number", "passes", "rounds", "hands", "samples", "seconds")
"""The fields that a worker hands over to another one."""


@dataclass
class Section:
    """The place of a section among those of its process.

    The coordinator, the shards and the other workers know turns, rounds, arenas and epochs by numbers that only rise.
    A section counts its own from 0; the fields hold what all sections before it came to.
    """

    number: int = 1
    """The first is 1."""
    turns: int = 0
    rounds: int = 0
    hands: int = 0
    samples: int = 0
    passes: int = 0
    parameter_sets: int = 0
    sent: int = 0
    received: int = 0
    """Bytes that this process has sent and received."""
    seconds: float = 0.0
    """From the zero of the first section's clock to the zero of this one's."""
    state: State | None = None
    """The state to continue from: another worker's, or a checkpoint's."""
    notices: list[str] = field(default_factory=list)
    """Texts for the user that were found before there was a log to write them to."""

    def pass_number(self, own: int) -> int:
        """Return the number by which a server knows epoch `own` of this section."""
        return numbered(self.number, own)

    def facts(self) -> dict[str, Any]:
        """Return the counts that a worker hands over to another one."""
        return {name: getattr(self, name) for name in COUNTS}


def continued(state: State, notices: list[str] | None = None) -> Section:
    """Return the section that a state is of. An empty state, or one without a section, is of the first."""
    facts = state.facts.get("section", {})
    return Section(**facts, state=state if state.facts else None, notices=notices or [])
