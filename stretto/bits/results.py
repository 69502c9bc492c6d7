"""What was asked and what was found, as bits.json keeps it and `--json` tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stretto.bits.outcome import GD, Outcome
from stretto.errors import LogError
from stretto.report.run_record import write_json

NAME = "bits.json"
MOST_POINTS = 500


@dataclass
class Results:
    """A folder's bits.json, which grows with every method. `gd` is gradient descent, also where nobody asked for it."""

    folder: Path
    asked: Mapping[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    gd: Outcome | None = None

    def __post_init__(self) -> None:
        self.save()

    def add(self, outcome: Outcome) -> None:
        """One more method has ended. Live gd sends a number more than gd in memory: the others are measured by it."""
        if outcome.method == GD:
            self.gd = outcome
        self.outcomes.append(outcome)
        self.save()

    def save(self) -> None:
        """Write bits.json. Raises LogError when the disk does not take it."""
        methods = [{**one, "curve": _curve(two)} for one, two in zip(self.records(), self.outcomes, strict=True)]
        write_json(self.folder / NAME, {**self.asked, "methods": methods})

    def records(self) -> list[dict[str, Any]]:
        """What `--json` writes: one record a method."""
        return [record(one, self.gd) for one in self.outcomes]


def record(one: Outcome, gd: Outcome | None) -> dict[str, Any]:
    """What `--json` says of a method; `gd` is what its bits are measured by."""
    return {
        "method": one.method,
        "workers": one.workers,
        "rounds": one.rounds,
        "uplink_bits": one.uplink_bits,
        "saved": _saved(one, gd),
        "reached": one.reached,
        "objective_error": one.error if one.error < float("inf") else None,
    }


def _saved(one: Outcome, gd: Outcome | None) -> float | None:
    """The share of gradient descent's uplink bits that were not needed; None where one did not reach the target."""
    both = gd is not None and gd.reached and one.reached and gd.uplink_bits
    return 1 - one.uplink_bits / gd.uplink_bits if both and gd else None


def _curve(one: Outcome) -> dict[str, list[float]]:
    """Rounds, uplink bits and objective error at no more points than can be seen."""
    places = thinned(len(one.errors))
    finite = [place for place in places if one.errors[place] < float("inf")]
    return {
        "rounds": list(finite),
        "bits": [one.bits[place] for place in finite],
        "errors": [one.errors[place] for place in finite],
    }


def thinned(count: int, most: int = MOST_POINTS) -> list[int]:
    """At most so many places of `count`, evenly apart, with the first and the last.

    >>> thinned(5), thinned(100, most=4)
    ([0, 1, 2, 3, 4], [0, 33, 66, 99])
    """
    if count <= most:
        return list(range(count))
    return [place * (count - 1) // (most - 1) for place in range(most)]


def read(folder: Path) -> dict[str, Any]:
    """What a folder's bits.json holds; raises LogError when it can't be read."""
    path = folder / NAME
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise LogError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("methods"), list):
        raise LogError(f"{path} is none that `stretto bits` has written")
    return found


def best(records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The method that reached the target with the fewest bits."""
    return min((one for one in records if one["reached"]), key=lambda one: int(one["uplink_bits"]), default=None)


def verdict(records: Sequence[Mapping[str, Any]], target: float) -> str:
    """One sentence on what was found."""
    winner = best(records)
    if winner is None:
        return f"No method came within {target:g} of the optimum."
    gd = next((one for one in records if one["method"] == GD), None)
    if winner["method"] == GD:
        return f"Nothing here needs fewer bits than {GD}."
    rounds = f"{winner['rounds']:,} rounds" + (f" against {gd['rounds']:,}" if gd and gd["reached"] else "")
    saved = f", {winner['saved']:.2%} fewer bits than {GD}" if winner["saved"] is not None else ""
    return f"Fewest bits: {winner['method']}{saved}, in {rounds}."
