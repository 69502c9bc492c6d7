"""What a person types becomes a recipe: calls with plain values are read, nothing is ever run."""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable
from typing import Any

from stretto import how, recipes, then, what, when, whom
from stretto.axis import Answer, nearest
from stretto.errors import RecipeError, explain
from stretto.recipe import Recipe

EXAMPLE = "local_sgd(every=16)"
LONGEST = 10_000
_one_at_a_time = threading.Lock()
"""Python 3.11 counts the depth of a syntax tree in one place for all threads, and fails when two build one at once."""


def _answers() -> dict[str, Callable[..., Any]]:
    found = (value for room in (what, when, whom, how, then) for value in vars(room).values())
    leaves = (one for one in found if isinstance(one, type) and issubclass(one, Answer))
    return {one.__name__: one for one in leaves if one.__name__.islower()}


WORDS: dict[str, Callable[..., Any]] = {**_answers(), "Recipe": Recipe, **recipes.NAMED}
"""All names that may stand in a recipe."""


def parse(text: str) -> Recipe:
    """The recipe that a text spells, short or long. Raises RecipeError on anything else; runs nothing.

    >>> parse("local_sgd(every=4)").spelled()
    'Recipe(what=parameters(), when=together(every=4), then=replace())'
    >>> parse("allreduce") == parse("Recipe()")
    True
    """
    if len(text) > LONGEST:
        raise _not_a_recipe(text[:40] + "...", f"a text of {len(text)} characters")
    try:
        with _one_at_a_time:
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise _not_a_recipe(text, str(error)) from None
    value = _value(tree, text)
    if isinstance(value, Recipe):
        return value
    raise _not_a_recipe(text, f"{value}, which is {_kind(value)}")


def _kind(value: object) -> str:
    return f"an answer to {value.axis!r}, one of five" if isinstance(value, Answer) else "no recipe"


def _not_a_recipe(text: str, got: str) -> RecipeError:
    return RecipeError(
        explain(
            f"not a recipe: {text}",
            got=got,
            expected="a recipe's name with its options (see `stretto recipes`), or Recipe(what=..., when=..., ...)",
            to_type=f'--recipe "{EXAMPLE}"',
        )
    )


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _negative(node, text)
    if isinstance(node, ast.Name):
        return _call(node.id, [], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if any(keyword.arg is None for keyword in node.keywords):
            raise _not_a_recipe(text, "an option without a name")
        options = {str(keyword.arg): _value(keyword.value, text) for keyword in node.keywords}
        return _call(node.func.id, [_value(one, text) for one in node.args], options)
    raise _not_a_recipe(text, f"`{ast.unparse(node)}`, which is code, not a value")


def _negative(node: ast.UnaryOp, text: str) -> int | float:
    value = _value(node.operand, text)
    if isinstance(value, int | float):
        return -value
    raise _not_a_recipe(text, f"`{ast.unparse(node)}`")


def _call(name: str, args: list[Any], options: dict[str, Any]) -> Any:
    make = WORDS.get(name)
    if make is None:
        raise _unknown_name(name)
    _check_options(name, make, args, options)
    return make(*args, **options)


def _unknown_name(name: str) -> RecipeError:
    near = nearest(name, WORDS)
    return RecipeError(
        explain(
            f"no recipe or answer is called {name!r}",
            got=name,
            expected="one of " + ", ".join(sorted(WORDS)),
            to_type=f'--recipe "{near}"' if near else f'--recipe "{EXAMPLE}"',
        )
    )


def _check_options(name: str, make: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> None:
    allowed = [one for one in inspect.signature(make).parameters if one != "called"]
    wrong = next((one for one in options if one not in allowed), None)
    if wrong is not None:
        near = nearest(wrong, allowed)
        example = f"{name}({near}={options[wrong]})" if near else f"{name}()"
        raise RecipeError(
            explain(f"{name} has no option {wrong!r}", got=wrong, expected=_options(allowed), to_type=example)
        )
    try:
        inspect.signature(make).bind(*args, **options)
    except TypeError as error:
        raise RecipeError(
            explain(f"{name}: {error}", got=f"{name}(...)", expected=_options(allowed), to_type=f"{name}(...)")
        ) from None


def _options(allowed: list[str]) -> str:
    return "the options " + ", ".join(allowed) if allowed else "no options"
