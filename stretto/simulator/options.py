"""Parsing of the options of `stretto simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite

from msgspec import structs

from stretto.errors import mistyped
from stretto.faults import plan
from stretto.run_config import RunConfig
from stretto.simulator.compute import speed
from stretto.simulator.compute.cost_model import AUTO, CostModel, parse
from stretto.simulator.config import Simulation, check
from stretto.simulator.network import topology
from stretto.units import seconds


def simulation(config: RunConfig, options: Mapping[str, str]) -> Simulation:
    """Return the checked simulation of a run configuration and options, given as texts by name.

    Measured step times are not included yet. Raises LaunchError or RecipeError.
    """
    numbers = {name: whole(name, options[name]) for name in ("workers", "seed", "servers") if name in options}
    faults, step_time = options.get("faults", ""), options.get("step_time", AUTO)
    parsed = Simulation(
        structs.replace(config, recipe=options.get("recipe"), **numbers),
        parse(step_time, lambda: CostModel(0.0)),
        topology.parse(options.get("network", "instant")),
        speed.parse(options.get("speeds", "equal")),
        plan.parse(faults) if faults.strip() else (),
        _processors(options.get("processors")),
        **_limits(options.get("until")),
    )
    return check(parsed)


WHOLE_NUMBER_OPTIONS = {
    "workers": ("the number of workers", "-n 4"),
    "seed": ("the seed", "--seed 1"),
    "servers": ("the number of servers", "--servers 2"),
}
"""Description and example of the options with whole numbers, by name."""


def whole(name: str, text: str) -> int:
    """Return the whole number given for an option. Raises LaunchError."""
    description, example = WHOLE_NUMBER_OPTIONS[name]
    if not (text.isascii() and text.strip().removeprefix("-").isdecimal() and len(text) < 19):
        raise mistyped(f"{description} cannot be {text}", text, "a whole number", example)
    return int(text)


def _limits(until: str | None) -> dict[str, float]:
    """Return the limits that end the run before the script does."""
    if until is None:
        return {}
    name, _, value = until.partition("=")
    parsed = seconds(value.strip()) if name.strip() == "time" else _float_or_none(value)
    if name.strip() not in ("samples", "time") or parsed is None or not (parsed > 0 and isfinite(parsed)):
        problem, expected = f"--until cannot be {until!r}", "samples= with a number, or time= with a time"
        raise mistyped(problem, until, expected, '--until "samples=1e6", or --until "time=1h"')
    return {"time_s": parsed} if name.strip() == "time" else {"samples": parsed}


def _float_or_none(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _processors(text: str | None) -> float | None:
    if text is None:
        return None
    parsed = _float_or_none(text)
    if parsed is None or not 0 < parsed < inf:
        raise mistyped(f"there cannot be {text} processors", text, "more than 0", "--processors 2")
    return parsed
