"""The names of the literature: points of the five questions, without logic.

Each function gives a `Recipe`; its docstring's first line says what it is, `stretto recipes` lists them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

from stretto.axis import literal
from stretto.how import Codec, exact
from stretto.recipe import Recipe
from stretto.then import outer, replace, step
from stretto.what import gradients, parameters, updates
from stretto.when import together

P = ParamSpec("P")


def named(make: Callable[P, Recipe]) -> Callable[P, Recipe]:
    """Let the recipe print as the call that made it."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Recipe:
        recipe = make(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        options = ", ".join(f"{name}={literal(value)}" for name, value in given.items())
        object.__setattr__(recipe, "called", f"{make.__name__}({options})" if options else make.__name__)
        return recipe

    return made


@named
def allreduce(how: Codec = exact()) -> Recipe:
    """Exchange the gradient in every backward pass: one machine with the joined batch, to rounding.

    `g = sum_i (n_i / n) g_i`
    """
    return Recipe(what=gradients(), when=together(), how=how, then=step())


@named
def local_sgd(
    every: int = 16,
    optimizer_state: str = "keep",
    after: int = 0,
    how: Codec = exact(),
) -> Recipe:
    """Train alone for `every` steps, then replace the parameters by their mean (parameter averaging).

    `theta = sum_i (n_i / n) theta_i`; with `after=n` the workers average at every step until step n.
    """
    what = parameters(optimizer_state)  # type: ignore[arg-type]
    return Recipe(what=what, when=together(every=every, after=after), how=how, then=replace())


@named
def diloco(
    every: int = 500,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    how: Codec = exact(),
) -> Recipe:
    """Train alone for `every` steps, then step an outer Nesterov SGD with the mean change (DiLoCo).

    `d = sum_i (n_i / n) (theta_old - theta_i);  theta = Nesterov(theta_old, d)`
    """
    then = outer(lr=outer_lr, momentum=outer_momentum)
    return Recipe(what=updates(), when=together(every=every), how=how, then=then)


NAMED: dict[str, Callable[..., Recipe]] = {make.__name__: make for make in (allreduce, local_sgd, diloco)}


@dataclass(frozen=True)
class Entry:
    """What is known of a named recipe, read off the code."""

    name: str
    sentence: str
    signature: str
    words: dict[str, str]
    papers: tuple[str, ...]


def catalogue() -> list[Entry]:
    """All named recipes with their five answers at the defaults, for lists and tables."""
    return [_entry(make) for make in NAMED.values()]


def _entry(make: Callable[..., Recipe]) -> Entry:
    recipe = make()
    options = inspect.signature(make).parameters.values()
    signature = ", ".join(f"{one.name}={literal(one.default)}" for one in options)
    sentence = (make.__doc__ or "").partition("\n")[0]
    return Entry(make.__name__, sentence, f"{make.__name__}({signature})", recipe.words(), recipe.sources())


def markdown_table(entries: Sequence[Entry]) -> str:
    """The recipes as a table in Markdown, as the README shows them."""
    head = ["recipe", "what it does", "what", "when", "whom", "how", "then", "papers"]
    rows = [
        [f"`{one.signature}`", one.sentence, *(f"`{word}`" for word in one.words.values()), "; ".join(one.papers)]
        for one in entries
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
