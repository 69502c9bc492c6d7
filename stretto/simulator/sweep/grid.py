"""What a sweep asks: axes with their values as they are typed, and the points of the grid that they span."""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import LaunchError, mistyped
from stretto.launcher import entry
from stretto.launcher.config import RunConfig
from stretto.recipe.parser import WORDS
from stretto.recipe.parser import parse as parse_recipe
from stretto.report.target import Target
from stretto.run_dir import cores
from stretto.spec import nearest
from stretto.units import spelled

if TYPE_CHECKING:
    from stretto.simulator.config import Simulation

WORKERS, RECIPE, STEP_TIME = "workers", "recipe", "step_time"
OPTIONS = (WORKERS, "seed", "network", "speeds", STEP_TIME, "faults", RECIPE, "until")
"""The options of a simulation that can be swept."""

EXAMPLE = '--sweep "workers=1,2,4,...,64"'
DOTS = "..."
MOST_VALUES = 1000
NAME = re.compile(r"(--)?[A-Za-z][\w-]*", re.ASCII)
NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?")
QUOTES = "\"'"


@dataclass(frozen=True)
class Axis:
    """One thing that is varied, and its values as text."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class SweepOrder:
    """A grid of simulations of one script.

    `options` are those of `stretto simulate` by name (`step_time` for `--step-time`), with their values as typed; what
    can't be swept is in the `order`. `sweep` has an axis a text, `target` is what counts as done, and `jobs`
    simulations go on at once: as many as there are cores unless it is said. `out` may hold the same sweep unfinished.
    `json_to` gets the records of the points, - for the standard output. `step_times` are what was measured for points
    that are `alike`.
    """

    order: RunConfig
    sweep: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    jobs: int | None = None
    out: Path | None = None
    json_to: Path | None = None
    quiet: bool = False
    step_times: Mapping[str, str] = field(default_factory=dict)

    def asked(self) -> dict[str, Any]:
        """What sweep.json keeps of it: everything that decides what the points are, and the target."""
        return {
            "script": " ".join(entry.typed(self.order.script, self.order.module)),
            "script_hash": hashlib.sha256(self.order.file().read_bytes()).hexdigest(),
            "args": list(self.order.args),
            "options": dict(self.options),
            "also": self.also,
            "sweep": {axis.name: list(axis.values) for axis in axes(self)},
            "target": str(self.goal()) if self.target is not None else None,
            "step_times": dict(self.step_times),
        }

    @property
    def also(self) -> list[str]:
        """What is typed for every simulation alike: options of the order that are not as usual."""
        order, usual = self.order, RunConfig(self.order.script)
        typed = {
            "--on-nan": order.on_nan if order.on_nan != usual.on_nan else None,
            "--failure-timeout": f"{spelled(order.failure_timeout_s)}s"
            if order.failure_timeout_s != usual.failure_timeout_s
            else None,
            "--timeout": spelled(order.timeout_s) if order.timeout_s != usual.timeout_s else None,
            "--min-workers": str(order.min_workers) if order.min_workers != usual.min_workers else None,
            "--batch": order.global_batch if order.global_batch != usual.global_batch else None,
            "--lr-scale": order.lr_scale if order.lr_scale != usual.lr_scale else None,
            "--on-resize": order.batch if order.batch != usual.batch else None,
            "--max-workers": str(order.max_workers) if order.max_workers is not None else None,
        }
        words = [word for name, value in typed.items() if value is not None for word in (name, value)]
        return ["--no-encryption"] * order.plain + words

    def goal(self) -> Target | None:
        """The target, read."""
        return None if self.target is None else Target.parse(self.target)

    def at_once(self) -> int:
        """How many simulations go on at once. Raises LaunchError for none."""
        jobs = cores() if self.jobs is None else self.jobs
        if jobs < 1:
            raise mistyped(f"the number of jobs cannot be {jobs}", jobs, "a whole number, at least 1", "--jobs 2")
        return jobs


@dataclass(frozen=True)
class Point:
    """One simulation of the grid: `name` is its folder, `values` says where on the axes it lies.

    The work of those that are `alike` takes the same: they have a recipe, wires or none, and their crowd in common.
    """

    name: str
    values: Mapping[str, str]
    options: Mapping[str, str]
    args: tuple[str, ...]
    alike: str = ""

    def words(self, order: SweepOrder, folder: Path) -> list[str]:
        """What is typed after `stretto simulate`."""
        typed = [word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", value)]
        typed += [*order.also, "--quiet", "--out", str(folder)]
        return [*typed, *entry.typed(order.order.script, order.order.module, self.args)]


# Axes


def parse(text: str) -> Axis:
    """An axis from what was typed, with `...` written out.

    >>> parse("workers=1,2,4,...,32").values, parse("every=0,5,...,20").values
    (('1', '2', '4', '8', '16', '32'), ('0', '5', '10', '15', '20'))

    `...` goes on as the three values before it, or two when there are no more, until the value after it, which it must
    meet: by equal ratios where three values have them, else by equal differences. Commas divide values, but not
    within brackets and quotes; a value of an option may stand in quotes whole. Raises LaunchError.
    """
    name, equals, rest = text.partition("=")
    name = name.strip()
    if not equals or NAME.fullmatch(name) is None:
        raise mistyped(f"not an axis: {text}", repr(text), "a name, = and values with commas between", EXAMPLE)
    name = name if name.startswith("--") else name.replace("-", "_")
    values = _written_out(_divided(rest, name), name)
    if name in OPTIONS or name.startswith("--"):
        values = [_unquoted(value) for value in values]
    twice = next((value for place, value in enumerate(values) if value in values[:place]), None)
    if twice is not None:
        raise mistyped(f"{name} has the value {twice} twice", rest, "each value once", EXAMPLE)
    return Axis(name, tuple(values))


def _divided(text: str, name: str) -> list[str]:
    """The values: commas divide, but not within brackets and quotes."""
    words, depth, quote = [""], 0, ""
    for letter in text:
        if quote or letter in QUOTES:
            quote = quote or letter if letter != quote else ""
        elif letter == "," and depth == 0:
            words.append("")
            continue
        elif depth >= 0:
            depth += (letter in "([{") - (letter in ")]}")
        words[-1] += letter
    if quote or depth:
        raise mistyped(f"a quote or a bracket of {name} has no partner", text, "both, or none", EXAMPLE)
    if not all(word.strip() for word in words):
        raise mistyped(f"{name} has an empty value", text or "nothing", "a value on each side of a comma", EXAMPLE)
    return [word.strip() for word in words]


def _unquoted(value: str) -> str:
    whole = len(value) > 2 and value[0] in QUOTES and value.find(value[0], 1) == len(value) - 1
    return value[1:-1] if whole else value


def _written_out(words: Sequence[str], name: str) -> list[str]:
    """The words with each `...` replaced by the numbers that it stands for."""
    values: list[str] = []
    for place, word in enumerate(words):
        if word == DOTS:
            values += _between(words[:place][-3:], words[place + 1 : place + 2], name)
        else:
            values.append(word)
    _check_count(len(values), name)
    return values


def _between(before: Sequence[str], after: Sequence[str], name: str) -> list[str]:
    """What `...` stands for between the values before it and the one after it."""
    text = ",".join([*before, DOTS, *after])
    if len(before) < 2 or not after:
        raise mistyped(f"{DOTS} of {name} has no values to go on from, or to", text, "1,2,...,10", EXAMPLE)
    if not all(map(NUMBER.fullmatch, (*before, *after))):
        raise mistyped(f"{DOTS} of {name} stands between what are no plain numbers", text, "1,2,4,...,64", EXAMPLE)
    *numbers, end = map(Fraction, (*before, *after))
    found = [numbers[-1]]
    upwards, following = numbers[-1] > numbers[-2], _pattern(numbers)
    if following is None:
        expected = "equal differences, or three values with equal ratios"
        raise mistyped(f"the values before {DOTS} of {name} have no pattern", text, expected, EXAMPLE)
    while found[-1] != end and (found[-1] < end) == upwards:
        found.append(following(found[-1]))
        _check_count(len(found), name)
    if found[-1] != end or len(found) == 1:
        problem, by = f"{DOTS} of {name} does not meet {after[0]}", ", ".join(map(_text, found[-2:]))
        raise mistyped(problem, f"{text}, which comes by {by}", "a last value that the pattern meets", EXAMPLE)
    return [_text(value) for value in found[1:-1]]


def _check_count(count: int, name: str) -> None:
    if count > MOST_VALUES:
        raise mistyped(f"{name} has too many values", f"{count} or more", f"at most {MOST_VALUES}", EXAMPLE)


def _pattern(numbers: Sequence[Fraction]) -> Callable[[Fraction], Fraction] | None:
    """What makes the next number of the last: a step, a ratio above 0, or None."""
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


def axes(order: SweepOrder) -> list[Axis]:
    """All axes, each once. Raises LaunchError."""
    found = [parse(text) for text in order.sweep]
    names = [axis.name for axis in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise mistyped(f"{twice} is swept twice", ", ".join(order.sweep), "one axis a name", f'--sweep "{twice}=1,2,4"')
    if not found:
        raise mistyped("there is nothing to sweep", "no --sweep", "an axis, at least one", EXAMPLE)
    return found


# Points


def points(order: SweepOrder) -> list[Point]:
    """All points of the grid, the last axis changing fastest, each checked.

    Raises LaunchError or RecipeError before anything is started.
    """
    found = axes(order)
    names = [axis.name for axis in found]
    combined = itertools.product(*(axis.values for axis in found))
    return [_point(order, place, dict(zip(names, values, strict=True))) for place, values in enumerate(combined, 1)]


def _point(order: SweepOrder, place: int, values: Mapping[str, str]) -> Point:
    from stretto.simulator.options import simulation

    options = dict(order.options) | {name: value for name, value in values.items() if name in OPTIONS}
    args = list(order.order.args)
    for name, value in values.items():
        if name.startswith("--"):
            args += [name, value]
        elif name not in OPTIONS:
            options[RECIPE] = with_option(options.get(RECIPE), name, value)
    alike = _alike(simulation(replace(order.order, args=tuple(args)), options))
    if alike in order.step_times and STEP_TIME not in values:
        options[STEP_TIME] = order.step_times[alike]
    said = "-".join(f"{name.strip('-')}={value}" for name, value in values.items())
    said = re.sub(r"[^\w.=-]+", "_", said, flags=re.ASCII)
    return Point(f"{place:03}-{said[:60]}", values, options, tuple(args), alike)


def _alike(one: Simulation) -> str:
    beside = f", {one.crowd} more at work" if one.crowd is not None else ""
    recipe = one.order.recipe or "the script's recipe"
    return f"{recipe}{beside}{'' if one.has_wires else ', without wires'}"


def with_option(recipe: str | None, name: str, value: str) -> str:
    """The text of a recipe with one of its options set, in place of the value that it had.

    >>> with_option("local_sgd(every=4, after=10)", "every", "16")
    'local_sgd(every=16, after=10)'

    Raises LaunchError when the recipe has no such option, and RecipeError when it cannot have that value.
    """
    called, given, known = _taken_apart(recipe) if recipe is not None else ("", {}, [])
    if name not in known:
        raise _unknown(name, called, known)
    given[name] = value
    return str(parse_recipe(f"{called}({', '.join(f'{one}={text}' for one, text in given.items())})"))


def _taken_apart(recipe: str) -> tuple[str, dict[str, str], list[str]]:
    """What a recipe is called, the options that were given, as text, and all that it has."""
    parse_recipe(recipe)
    tree = ast.parse(recipe.strip(), mode="eval").body
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    called = ast.unparse(call.func)
    known = [one for one in inspect.signature(WORDS[called]).parameters if one != "called"]
    given = dict(zip(known, map(ast.unparse, call.args), strict=False))
    return called, given | {str(one.arg): ast.unparse(one.value) for one in call.keywords}, known


def _unknown(name: str, called: str, known: Sequence[str]) -> LaunchError:
    near = nearest(name, [*OPTIONS, *known])
    whose = f"nor one of {called}" if called else "and there is no recipe that could have it"
    has = f"; of {called}: {', '.join(known) or 'none'}" if called else ""
    return mistyped(
        f"{name} is no option of a simulation, {whose}",
        name,
        f"one of {', '.join(OPTIONS)}{has}; or --{name} for the script",
        f'--sweep "{near}=..."' if near else EXAMPLE,
    )
