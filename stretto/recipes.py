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
from stretto.then import add, constant, equal_share, inverse_staleness, outer, pull, replace, step
from stretto.then import delay_compensated as compensated
from stretto.what import gradients, parameters, updates
from stretto.when import on_arrival, together
from stretto.whom import server

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


@named
def async_sgd(weight: float = 1.0, shards: int = 1, overlap: bool = False, how: Codec = exact()) -> Recipe:
    """Send the change of every step to a server, which adds it as it comes (asynchronous SGD).

    `theta += c * D_i`, with D_i computed on parameters that are t versions old: about N - 1 with equal workers.
    """
    when = on_arrival(overlap=overlap)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=add(constant(weight)))


@named
def downpour(
    every: int = 5, weight: float = 1.0, shards: int = 1, overlap: bool = False, how: Codec = exact()
) -> Recipe:
    """Train alone for `every` steps, then send the change to a server, which adds it as it comes (Downpour SGD).

    `theta += c * (theta_i - theta_old)`
    """
    when = on_arrival(every=every, overlap=overlap)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=add(constant(weight)))


@named
def staleness_aware(collect: int = 1, shards: int = 1, overlap: bool = False, how: Codec = exact()) -> Recipe:
    """Asynchronous SGD that weighs each update by the inverse of its staleness.

    `theta += (1/s) sum_l D_l / max(t_l, 1)` over the s updates that are collected
    """
    when = on_arrival(collect=collect, overlap=overlap)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=add(inverse_staleness()))


@named
def soft_sync(collect: int = 2, shards: int = 1, overlap: bool = False, how: Codec = exact()) -> Recipe:
    """Apply the mean of the first `collect` updates that are there, whosever they are (soft synchronisation).

    `theta += (1/s) sum_l D_l`; n-softsync of N workers collects s = N / n.
    """
    when = on_arrival(collect=collect, overlap=overlap)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=add())


@named
def stale_synchronous(bound: int = 4, shards: int = 1, overlap: bool = False, how: Codec = exact()) -> Recipe:
    """Asynchronous SGD in which a worker `bound` rounds ahead of the slowest is made to wait (SSP).

    `theta += D_i / N`: one round of all workers adds up to their mean, and a bound of 0 is the barrier.
    """
    when = on_arrival(bound=bound, overlap=overlap)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=add(equal_share()))


@named
def elastic_averaging(
    every: int = 10, alpha: float = 0.1, shards: int = 1, overlap: bool = False, how: Codec = exact()
) -> Recipe:
    """Every `every` steps pull a worker and the server's parameters towards each other (elastic averaging SGD).

    `e = alpha * (x_i - c);  x_i -= e;  c += e`; the server's c is the model that is evaluated.
    """
    when = on_arrival(every=every, overlap=overlap)
    return Recipe(what=parameters(), when=when, whom=server(shards), how=how, then=pull(alpha))


@named
def delay_compensated(
    lam: float = 2.0, m: float = 0.95, adaptive: bool = True, shards: int = 1, overlap: bool = False
) -> Recipe:
    """Asynchronous SGD whose server corrects each update for what has changed since (DC-ASGD).

    `theta -= lr * (g + lambda * g * g * (theta - theta_old))`, with g the update divided by -lr: the gradient itself
    with plain SGD.
    """
    then = add(compensated(lam=lam, m=m, adaptive=adaptive))
    return Recipe(what=updates(), when=on_arrival(overlap=overlap), whom=server(shards), then=then)


@named
def async_diloco(
    every: int = 500,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    shards: int = 1,
    overlap: bool = False,
    how: Codec = exact(),
) -> Recipe:
    """Train alone for `every` steps, then let the server step an outer SGD with delayed Nesterov momentum.

    `d = theta_old - theta_i;  theta -= lr * d / N, and every N-th time the momentum too`
    """
    when, then = on_arrival(every=every, overlap=overlap), outer(lr=outer_lr, momentum=outer_momentum)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=then)


SYNCHRONOUS = (allreduce, local_sgd, diloco)
ASYNCHRONOUS = (
    async_sgd,
    downpour,
    staleness_aware,
    soft_sync,
    stale_synchronous,
    elastic_averaging,
    delay_compensated,
    async_diloco,
)
NAMED: dict[str, Callable[..., Recipe]] = {make.__name__: make for make in (*SYNCHRONOUS, *ASYNCHRONOUS)}


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
