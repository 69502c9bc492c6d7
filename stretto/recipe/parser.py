"""Parser of recipes: reads calls with plain values from a text, and evaluates no code.

A codec of another package is typed with its import path, `error_feedback(mypkg.mycodec.my_codec(3))`, or with the name
of its entry point in the group `stretto.codecs`. Its module is imported, so it must be importable in every process of
the run, servers included; only a subclass of `stretto.how.Codec` is called.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from stretto import codecs
from stretto.errors import RecipeError, explain
from stretto.recipe import named, then, what, when, whom
from stretto.recipe.recipe import Recipe
from stretto.spec import Answer, nearest

EXAMPLE = "local_sgd(every=16)"
LONGEST = 10_000
RECIPES = tuple(named.NAMED)
"""Names of all recipes."""
ENTRY_POINTS = "stretto.codecs"
_one_at_a_time = threading.Lock()
"""Python 3.11 counts the depth of a syntax tree in one place for all threads, and fails when two build one at once."""


def _answers() -> dict[str, Callable[..., Any]]:
    found = (value for room in (what, when, whom, codecs, then) for value in vars(room).values())
    leaves = (one for one in found if isinstance(one, type) and issubclass(one, Answer))
    return {one.__name__: one for one in leaves if one.__name__.islower()}


ANSWERS = _answers()
WORDS: dict[str, Callable[..., Any]] = {**ANSWERS, "Recipe": Recipe, **named.NAMED}
"""All names of a recipe's text. A name of both a recipe and an answer is the recipe at the start of the text, and the
answer within brackets."""


def parse(text: str) -> Recipe:
    """Parse a recipe in short or long form. Raise RecipeError for any other text.

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
    value = _value(tree, text, WORDS)
    if isinstance(value, Recipe):
        return value
    raise _not_a_recipe(text, f"{value}, which is {_kind(value)}")


_WITHIN = {**WORDS, **ANSWERS}


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


def _value(node: ast.expr, text: str, words: Mapping[str, Callable[..., Any]]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _negative(node, text)
    if (name := _name(node)) is not None:
        return _call(words, name, [], {})
    if isinstance(node, ast.Call) and (name := _name(node.func)) is not None:
        if any(keyword.arg is None for keyword in node.keywords):
            raise _not_a_recipe(text, "an option without a name")
        options = {str(keyword.arg): _value(keyword.value, text, _WITHIN) for keyword in node.keywords}
        return _call(words, name, [_value(one, text, _WITHIN) for one in node.args], options)
    raise _not_a_recipe(text, f"`{ast.unparse(node)}`, which is code, not a value")


def _name(node: ast.expr) -> str | None:
    """Return a name, with the dots of an import path; None for any other expression."""
    if isinstance(node, ast.Attribute):
        module = _name(node.value)
        return None if module is None else f"{module}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _negative(node: ast.UnaryOp, text: str) -> int | float:
    value = _value(node.operand, text, _WITHIN)
    if isinstance(value, int | float):
        return -value
    raise _not_a_recipe(text, f"`{ast.unparse(node)}`")


def _call(words: Mapping[str, Callable[..., Any]], name: str, args: list[Any], options: dict[str, Any]) -> Any:
    make = words.get(name) or (_imported(name) if "." in name else _of_entry_point(name))
    _check_options(name, make, args, options)
    return make(*args, **options)


def import_paths(text: str) -> list[str]:
    """Return the import paths of codecs in the text of a recipe; none for a text that cannot be parsed.

    >>> import_paths("allreduce(how=mypkg.my_codec(0.5))")
    ['mypkg.my_codec']
    """
    try:
        with _one_at_a_time:
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    names = (_name(node) for node in ast.walk(tree) if isinstance(node, ast.expr))
    return [name for name in names if name is not None and "." in name]


def _imported(path: str) -> type[codecs.Codec]:
    """Return the codec of an import path. Raise RecipeError if there is none."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises while it is imported
        raise _no_codec(path, f"{type(error).__name__}: {error}") from error
    return _codec(path, found)


def _of_entry_point(name: str) -> type[codecs.Codec]:
    """Return the codec that a package has registered under this name. Raise RecipeError if none has."""
    found = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
    if found is None:
        raise _unknown_name(name)
    try:
        loaded = found.load()
    except Exception as error:  # whatever the module raises while it is imported
        raise _no_codec(f"{name} ({found.value})", f"{type(error).__name__}: {error}") from error
    return _codec(f"{name} ({found.value})", loaded)


def _codec(path: str, found: object) -> type[codecs.Codec]:
    if not isinstance(found, type) or not issubclass(found, codecs.Codec):
        raise _no_codec(path, f"a {type(found).__name__}" if not isinstance(found, type) else f"class {found.__name__}")
    if not dataclasses.is_dataclass(found):
        raise _no_codec(path, f"class {found.__name__}, which is no dataclass")
    return found


def _no_codec(path: str, got: str) -> RecipeError:
    return RecipeError(
        explain(
            f"{path} is not a codec that can be imported",
            got=got,
            expected="a frozen dataclass derived from stretto.how.Codec, in a module that every process can import",
            to_type="allreduce(how=package.module.codec(...)), with the package's folder in PYTHONPATH",
        )
    )


def _unknown_name(name: str) -> RecipeError:
    near = difflib.get_close_matches(name, [*RECIPES, *ANSWERS], n=3, cutoff=0.0)
    return RecipeError(
        explain(
            f"no recipe or answer is called {name!r}; the nearest are {', '.join(near)}",
            got=name,
            expected="one of " + ", ".join(sorted(WORDS)),
            to_type=f'--recipe "{nearest(name, RECIPES) or EXAMPLE}"',
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


def with_shards(text: str, shards: int) -> str:
    """Return the shortest text of a recipe over a parameter server with this number of shards.

    >>> with_shards("async_sgd(weight=0.5)", 2)
    'async_sgd(weight=0.5, shards=2)'
    >>> with_shards("allreduce", 2)
    'Recipe(whom=server(shards=2))'
    """
    recipe = parse(text)
    wanted = dataclasses.replace(recipe, whom=whom.server(shards), called="")
    with contextlib.suppress(RecipeError):
        name, _, options = str(recipe).partition("(")
        kept = [one for one in options.removesuffix(")").split(", ") if one and not one.startswith("shards=")]
        short = f"{name}({', '.join([*kept, f'shards={shards}'])})"
        if parse(short) == wanted:
            return short
    return str(wanted)
