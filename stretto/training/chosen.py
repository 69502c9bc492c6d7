"""Recipe and layout of a run: those of the command line, or else those that the script gives to `distribute`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from stretto.errors import RecipeError, explain
from stretto.recipe import parser
from stretto.recipe.layout import Layout, as_option, whole
from stretto.recipe.recipe import Recipe
from stretto.training.worker_context import WorkerContext

Value = TypeVar("Value")


def given_recipe(given: Recipe | str | None) -> Recipe | None:
    """Return the recipe that the script gives. Raise RecipeError for any other value."""
    example = "stretto.recipes.local_sgd(every=16)"
    return _given("recipe", given, Recipe, parser.parse, "a Recipe, or its text", example)


def given_layout(given: Layout | str | None) -> Layout | None:
    """Return the layout that the script gives. Raise RecipeError for any other value."""
    example = "stretto.layouts.pipeline(stages=2)"
    return _given("layout", given, Layout, parser.parse_layout, "a layout, or its text", example)


def _given(
    argument: str, given: object, kind: type[Value], parse: Callable[[str], Value], expected: str, example: str
) -> Value | None:
    if given is None or isinstance(given, kind):
        return given
    if isinstance(given, str):
        return parse(given)
    problem, got = f"{argument}= is no {argument}", f"{given!r:.100}"
    raise RecipeError(explain(problem, got=got, expected=expected, to_type=f"{argument}={example}"))


def chosen_recipe(context: WorkerContext, scripted: Recipe | None, layout: Layout) -> Recipe | None:
    """Return the recipe of this run; None for a run whose workers exchange nothing."""
    if context.single_process or not layout.takes_recipe:
        return None
    return parser.parse(context.recipe) if context.recipe else scripted or parser.parse("allreduce")


def chosen_layout(context: WorkerContext, scripted: Layout | None) -> Layout:
    """Return the layout of this run's workers. Raise RecipeError if the script's needs more processes."""
    if context.layout is not None:
        return parser.parse_layout(context.layout)
    ranks = scripted.ranks_in(context.workers) if scripted is not None else 1
    if scripted is None or ranks == 1 or context.workers == 1:
        return whole()
    raise RecipeError(
        explain(
            f"the script asks for workers of {ranks} processes, and they were started with one each",
            got=f"layout={scripted}, and {context.workers} workers without --layout",
            expected="the same layout on the command line, with the number of all processes",
            to_type=f"stretto run -n {scripted.ranks_in(1) * context.workers} {as_option(scripted)}",
        )
    )


def overruled(
    context: WorkerContext, recipes: tuple[Recipe | None, Recipe | None], layouts: tuple[Layout | None, Layout]
) -> Iterator[str]:
    """Yield a line for the script's recipe, and for its layout, if the command line asked for another one."""
    (scripted, recipe), (scripted_layout, layout) = recipes, layouts
    if context.single_process:
        return
    if context.recipe and scripted is not None and recipe != scripted:
        yield f"the recipe asked for, {recipe}, goes before the script's, {scripted}"
    if scripted_layout is not None and layout not in (scripted_layout, whole()):
        yield f"the layout asked for, {layout}, goes before the script's, {scripted_layout}"
