"""The grid of a sweep: axes with their values as texts, and the points that they span."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from stretto.call_syntax import QUOTES, Words, nearest
from stretto.errors import LaunchError, mistyped
from stretto.launcher import entry
from stretto.masking import masked
from stretto.recipe.parser import WORDS
from stretto.recipe.parser import parse as parse_recipe
from stretto.report.target import Target
from stretto.run_config import RunConfig, typed_options
from stretto.run_dir import cores

if TYPE_CHECKING:
    from stretto.simulator.config import Simulation

WORKERS, RECIPE, STEP_TIME = "workers", "recipe", "step_time"
OPTIONS = (WORKERS, "seed", "network", "speeds", STEP_TIME, "faults", RECIPE, "until")
"""Options of `stretto simulate` that can be axes."""

EXAMPLE = '--sweep "workers=1,2,4,...,64"'
COMMON = (
    "plain",
    "on_nan",
    "failure_timeout_s",
    "timeout_s",
    "min_workers",
    "global_batch",
    "shares",
    "max_batch",
    "uneven",
    "lr_scale",
    "on_resize",
    "max_workers",
)
"""Options that all points have in common."""
DOTS = "..."
MOST_VALUES = 1000
NAME = re.compile(r"(--)?[A-Za-z][\w-]*", re.ASCII)
NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True)
class Axis:
    """A varied option, and its values as texts."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class SweepConfig:
    """A grid of simulations of one script.

    `options` are options of `stretto simulate` by name (`step_time` for `--step-time`), with their values as texts;
    options that cannot be swept are in `config`. `sweep` has the text of each axis, `target` the metric that counts as
    done. `jobs` is the number of simulations that run concurrently, default: the number of cores. `out` may hold the
    same sweep unfinished. `json_to` is the file for the records of the points, - for the standard output. `step_times`
    are the measured step times by `Point.cost_group`.
    """

    config: RunConfig
    sweep: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    jobs: int | None = None
    out: Path | None = None
    json_to: Path | None = None
    quiet: bool = False
    step_times: Mapping[str, str] = field(default_factory=dict)

    def asked(self) -> dict[str, Any]:
        """Return the configuration for sweep.json: everything that determines the points, and the target."""
        return {
            "script": " ".join(entry.typed(self.config.script, self.config.module)),
            "script_hash": hashlib.sha256(
                entry.file_of(self.config.script, self.config.module).read_bytes()
            ).hexdigest(),
            "args": masked(self.config.args),
            "options": dict(self.options),
            "also": self.common_options,
            "sweep": {axis.name: list(axis.values) for axis in axes(self)},
            "target": str(self.parsed_target()) if self.target is not None else None,
            "step_times": dict(self.step_times),
        }

    @property
    def common_options(self) -> list[str]:
        """Command-line options of every simulation: those of `config` that differ from their defaults."""
        return typed_options(self.config, COMMON)

    def parsed_target(self) -> Target | None:
        """Return the parsed target."""
        return None if self.target is None else Target.parse(self.target)

    def concurrency(self) -> int:
        """Return the number of concurrent simulations. Raises LaunchError if it is below 1."""
        jobs = cores() if self.jobs is None else self.jobs
        if jobs < 1:
            raise mistyped(f"the number of jobs cannot be {jobs}", jobs, "a whole number, at least 1", "--jobs 2")
        return jobs


@dataclass(frozen=True)
class Point:
    """One simulation of the grid: `name` is its folder, `values` its values by axis.

    Points of the same `cost_group` have the same costs: the same recipe, contention, and presence of a network.
    """

    name: str
    values: Mapping[str, str]
    options: Mapping[str, str]
    args: tuple[str, ...]
    cost_group: str = ""

    def words(self, config: SweepConfig, folder: Path) -> list[str]:
        """Return the arguments of `stretto simulate`."""
        typed = [word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", value)]
        typed += [*config.common_options, "--quiet", "--out", str(folder)]
        return [*typed, *entry.typed(config.config.script, config.config.module, self.args)]


# Axes


def parse(text: str) -> Axis:
    """Parse an axis, and expand `...`.

    >>> parse("workers=1,2,4,...,32").values, parse("every=0,5,...,20").values
    (('1', '2', '4', '8', '16', '32'), ('0', '5', '10', '15', '20'))

    `...` continues the pattern of the three values before it (or two, if there are no more) up to the value after it,
    which the pattern must reach: equal ratios if three values have them, else equal differences. Commas separate
    values, except within brackets and quotes; the value of an option may be quoted as a whole. Raises LaunchError.
    """
    words = Words(text, "--sweep", "workers=1,2,4,...,64", "a name, = and values with commas between")
    name = words.next
    if NAME.fullmatch(name) is None:
        raise words.refused()
    words.at += 1
    words.take("=", expected=words.expected)
    name = name if name.startswith("--") else name.replace("-", "_")
    values = _expanded([words.typed() for _ in words.listed(",")], name)
    if name in OPTIONS or name.startswith("--"):
        values = [_unquoted(value) for value in values]
    repeated = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if repeated is not None:
        raise mistyped(f"{name} has the value {repeated} twice", text, "each value once", EXAMPLE)
    return Axis(name, tuple(values))


def _unquoted(value: str) -> str:
    is_quoted = len(value) > 2 and value[0] in QUOTES and value.find(value[0], 1) == len(value) - 1
    return value[1:-1] if is_quoted else value


def _expanded(words: Sequence[str], name: str) -> list[str]:
    """Return the words with each `...` expanded."""
    values: list[str] = []
    for index, word in enumerate(words):
        if word == DOTS:
            values += _expansion(words[:index][-3:], words[index + 1 : index + 2], name)
        else:
            values.append(word)
    _check_count(len(values), name)
    return values


def _expansion(values_before: Sequence[str], values_after: Sequence[str], name: str) -> list[str]:
    """Return the expansion of `...` between the values before it and the value after it."""
    text = ",".join([*values_before, DOTS, *values_after])
    if len(values_before) < 2 or not values_after:
        raise mistyped(f"{DOTS} of {name} needs two values before it and one after it", text, "1,2,...,10", EXAMPLE)
    if not all(map(NUMBER.fullmatch, (*values_before, *values_after))):
        raise mistyped(f"{DOTS} of {name} is not between plain numbers", text, "1,2,4,...,64", EXAMPLE)
    *numbers, end = map(Fraction, (*values_before, *values_after))
    values = [numbers[-1]]
    upwards, following = numbers[-1] > numbers[-2], _pattern(numbers)
    if following is None:
        expected = "equal differences, or three values with equal ratios"
        raise mistyped(f"the values before {DOTS} of {name} have no pattern", text, expected, EXAMPLE)
    while values[-1] != end and (values[-1] < end) == upwards:
        values.append(following(values[-1]))
        _check_count(len(values), name)
    if values[-1] != end or len(values) == 1:
        problem, last = f"{DOTS} of {name} does not reach {values_after[0]}", ", ".join(map(_text, values[-2:]))
        raise mistyped(problem, f"{text}, which passes {last}", "a last value that the pattern reaches", EXAMPLE)
    return [_text(value) for value in values[1:-1]]


def _check_count(count: int, name: str) -> None:
    if count > MOST_VALUES:
        raise mistyped(f"{name} has too many values", f"{count} or more", f"at most {MOST_VALUES}", EXAMPLE)


def _pattern(numbers: Sequence[Fraction]) -> Callable[[Fraction], Fraction] | None:
    """Return the function from each number to the next (constant difference, or constant ratio above 0), or None."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(steps) == 1:
        step = steps.pop()
        return (lambda last: last + step) if step else None
    ratios = {b / a for a, b in itertools.pairwise(numbers)} if all(numbers) else set()
    ratio = ratios.pop() if len(ratios) == 1 else Fraction(0)
    return (lambda last: last * ratio) if ratio > 0 else None


def _text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return format(Decimal(value.numerator) / Decimal(value.denominator), "f")


def axes(config: SweepConfig) -> list[Axis]:
    """Return all axes. Raises LaunchError if an axis occurs twice or there is none."""
    parsed_axes = [parse(text) for text in config.sweep]
    names = [axis.name for axis in parsed_axes]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise mistyped(
            f"{repeated} is swept twice", ", ".join(config.sweep), "one axis a name", f'--sweep "{repeated}=1,2,4"'
        )
    if not parsed_axes:
        raise mistyped("there is nothing to sweep", "no --sweep", "an axis, at least one", EXAMPLE)
    return parsed_axes


# Points


def points(config: SweepConfig) -> list[Point]:
    """Return all points of the grid, checked; the last axis changes fastest.

    Raises LaunchError or RecipeError.
    """
    parsed_axes = axes(config)
    names = [axis.name for axis in parsed_axes]
    combined = itertools.product(*(axis.values for axis in parsed_axes))
    return [_point(config, index, dict(zip(names, values, strict=True))) for index, values in enumerate(combined, 1)]


def _point(config: SweepConfig, index: int, values: Mapping[str, str]) -> Point:
    from stretto.simulator.options import simulation

    options = dict(config.options) | {name: value for name, value in values.items() if name in OPTIONS}
    args = list(config.config.args)
    for name, value in values.items():
        if name.startswith("--"):
            args += [name, value]
        elif name not in OPTIONS:
            options[RECIPE] = with_option(options.get(RECIPE), name, value)
    cost_group = _cost_group(simulation(structs.replace(config.config, args=tuple(args)), options))
    if cost_group in config.step_times and STEP_TIME not in values:
        options[STEP_TIME] = config.step_times[cost_group]
    label = "-".join(f"{name.strip('-')}={value}" for name, value in values.items())
    label = re.sub(r"[^\w.=-]+", "_", label, flags=re.ASCII)
    return Point(f"{index:03}-{label[:60]}", values, options, tuple(args), cost_group)


def _cost_group(simulated: Simulation) -> str:
    contention = (
        f", {simulated.contending_processes} other busy processes" if simulated.contending_processes is not None else ""
    )
    recipe = simulated.config.recipe or "the script's recipe"
    return f"{recipe}{contention}{'' if simulated.has_network else ', without a network'}"


def with_option(recipe: str | None, name: str, value: str) -> str:
    """Return the text of a recipe with one of its options replaced.

    >>> with_option("local_sgd(every=4, after=10)", "every", "16")
    'local_sgd(every=16, after=10)'

    Raises LaunchError if the recipe has no such option, and RecipeError if the value is invalid.
    """
    recipe_name, given_options, known_options = _parsed_recipe(recipe) if recipe is not None else ("", {}, [])
    if name not in known_options:
        raise _unknown(name, recipe_name, known_options)
    given_options[name] = value
    return str(
        parse_recipe(f"{recipe_name}({', '.join(f'{option}={text}' for option, text in given_options.items())})")
    )


def _parsed_recipe(recipe: str) -> tuple[str, dict[str, str], list[str]]:
    """Return the name of a recipe, its given options as texts, and the names of all its options."""
    parse_recipe(recipe)
    call = Words(recipe, "--recipe", recipe, "a recipe").term()
    known_options = [name for name in inspect.signature(WORDS[call.name]).parameters if name != "called"]
    given_options = dict(zip(known_options, call.args, strict=False)) | dict(call.options)
    return call.name, {name: term.text for name, term in given_options.items()}, known_options


def _unknown(name: str, recipe_name: str, known_options: Sequence[str]) -> LaunchError:
    near = nearest(name, [*OPTIONS, *known_options])
    whose = f"nor one of {recipe_name}" if recipe_name else "and there is no recipe that could have it"
    options_text = f"; of {recipe_name}: {', '.join(known_options) or 'none'}" if recipe_name else ""
    return mistyped(
        f"{name} is no option of a simulation, {whose}",
        name,
        f"one of {', '.join(OPTIONS)}{options_text}; or --{name} for the script",
        f'--sweep "{near}=..."' if near else EXAMPLE,
    )
