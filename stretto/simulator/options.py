"""What is typed for a simulation, read: its order, and the world in which it is to be carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, isfinite

from stretto.errors import mistyped
from stretto.faults import plan
from stretto.launcher.config import RunConfig
from stretto.simulator.compute import speed
from stretto.simulator.compute.cost_model import AUTO, CostModel, parse
from stretto.simulator.config import Simulation, check
from stretto.simulator.network import topology
from stretto.units import seconds


def simulation(order: RunConfig, typed: Mapping[str, str]) -> Simulation:
    """The simulation that the options have typed, by their names, of an order that they are taken into; checked.

    Whatever of the time of a step is to be measured is not yet in it. Raises LaunchError or RecipeError.
    """
    numbers = {name: whole(name, typed[name]) for name in ("workers", "seed", "servers") if name in typed}
    faults, step_time = typed.get("faults", ""), typed.get("step_time", AUTO)
    asked = Simulation(
        replace(order, recipe=typed.get("recipe"), **numbers),  # type: ignore[arg-type]
        parse(step_time, lambda: CostModel(0.0)),
        topology.parse(typed.get("network", "instant")),
        speed.parse(typed.get("speeds", "equal")),
        plan.parse(faults) if faults.strip() else (),
        _processors(typed.get("processors")),
        **_ends(typed.get("until")),
    )
    return check(asked)


WHAT = {
    "workers": ("the number of workers", "-n 4"),
    "seed": ("the seed", "--seed 1"),
    "servers": ("the number of servers", "--servers 2"),
    "min_workers": ("the least number of workers", "--min-workers 2"),
    "max_workers": ("the largest number", "--max-workers 8"),
}
"""What an option is called before a person, and what may be typed for it."""


def whole(name: str, text: str) -> int:
    """A whole number, for the option of that name. Raises LaunchError."""
    what, to_type = WHAT[name]
    if not (text.isascii() and text.strip().removeprefix("-").isdecimal() and len(text) < 19):
        raise mistyped(f"{what} cannot be {text}", text, "a whole number", to_type)
    return int(text)


def _ends(until: str | None) -> dict[str, float]:
    """When the run ends before the script does."""
    if until is None:
        return {}
    name, _, value = until.partition("=")
    read = seconds(value.strip()) if name.strip() == "time" else _number(value)
    if name.strip() not in ("samples", "time") or read is None or not (read > 0 and isfinite(read)):
        problem, expected = f"--until cannot be {until!r}", "samples= with a number, or time= with a time"
        raise mistyped(problem, until, expected, '--until "samples=1e6", or --until "time=1h"')
    return {"time_s": read} if name.strip() == "time" else {"samples": read}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _processors(text: str | None) -> float | None:
    if text is None:
        return None
    read = _number(text)
    if read is None or not 0 < read < inf:
        raise mistyped(f"there cannot be {text} processors", text, "more than 0", "--processors 2")
    return read
