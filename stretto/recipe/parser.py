"""Parser of recipes and layouts: reads calls with plain values from a text, and evaluates no code.

An answer of another package is typed with its import path, `error_feedback(mypkg.mycodec.my_codec(3))`, or a codec with
the name of its entry point in the group `stretto.codecs`. Its module is imported, so it must be importable in every
process of the run, servers included; only a subclass of an answer's base, such as `stretto.how.Codec`, is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from stretto import codecs
from stretto.call_syntax import Term, Words, nearest
from stretto.errors import RecipeError, explain
from stretto.recipe import named, then, what, when, whom
from stretto.recipe.layout import LAYOUTS, Layout
from stretto.recipe.recipe import Recipe
from stretto.spec import Answer

EXAMPLE = "local_sgd(every=16)"
LONGEST = 10_000
RECIPES = tuple(named.NAMED)
"""Names of all recipes."""
ENTRY_POINTS = "stretto.codecs"
BASES = (codecs.Codec, what.What, when.When, whom.Whom, then.Then)
LAYOUT_EXAMPLE = "pipeline(stages=2)"
LAYOUT_EXPECTED = "a layout with its options (see `stretto layouts`)"
EXPECTED = "a recipe's name with its options (see `stretto recipes`), or Recipe(what=..., when=..., ...)"


def _answers() -> dict[str, Callable[..., Any]]:
    values = (value for module in (what, when, whom, codecs, then) for value in vars(module).values())
    answers = (value for value in values if isinstance(value, type) and issubclass(value, Answer))
    return {answer.__name__: answer for answer in answers if answer.__name__.islower()}


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
    words, term = _read(text)
    value = _value(term, words, WORDS)
    if isinstance(value, Recipe):
        return value
    kind = f"an answer to {value.axis!r}, one of five" if getattr(value, "axis", "") else "a plain value"
    raise words.refused(at=0, problem=f"not a recipe: {term.text} is {kind}")


_WITHIN = {**WORDS, **ANSWERS}


def parse_layout(text: str) -> Layout:
    """Parse a layout. Raise RecipeError for any other text.

    >>> parse_layout("pipeline(2, micro_batches=8)")
    pipeline(2, micro_batches=8)
    >>> parse_layout("whole").ranks_in(4)
    1
    """
    words, term = _read(text, "--layout", LAYOUT_EXAMPLE, LAYOUT_EXPECTED)
    if term.name not in LAYOUTS:
        near = nearest(term.name, LAYOUTS)
        words.example = {"whole": "whole()"}.get(near or "", LAYOUT_EXAMPLE)
        raise words.refused(at=0, problem=f"no layout is called {term.text!r}")
    layout: Layout = _value(term, words, LAYOUTS)
    return layout


def _read(text: str, option: str = "--recipe", example: str = EXAMPLE, expected: str = EXPECTED) -> tuple[Words, Term]:
    shortened = text if len(text) <= LONGEST else f"{text[:40]}... of {len(text)} characters"
    words = Words(shortened, option, example, expected, RecipeError)
    term = words.term()
    words.end()
    return words, term


def _value(term: Term, words: Words, names: Mapping[str, Callable[..., Any]]) -> Any:
    if not term.name:
        return term.value
    args = [_value(arg, words, _WITHIN) for arg in term.args]
    options = {name: _value(option, words, _WITHIN) for name, option in term.options.items()}
    make = names.get(term.name) or (_imported(term.name) if "." in term.name else _of_entry_point(term, words))
    _check_options(term, words, make, args, options)
    return make(*args, **options)


def import_paths(text: str) -> list[str]:
    """Return the import paths of answers in the text of a recipe; none for a text that cannot be parsed.

    >>> import_paths("allreduce(how=mypkg.my_codec(0.5))")
    ['mypkg.my_codec']
    """
    try:
        names = _read(text)[1].names()
    except RecipeError:
        return []
    return [name for name in names if "." in name]


def _imported(path: str) -> type[Answer]:
    """Return the answer of an import path. Raise RecipeError if there is none."""
    module, _, name = path.rpartition(".")
    try:
        imported = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises while it is imported
        raise _no_answer(path, f"{type(error).__name__}: {error}") from error
    return _answer(path, imported)


def _of_entry_point(term: Term, words: Words) -> type[Answer]:
    """Return the codec that a package has registered under this name. Raise RecipeError if none has."""
    name = term.name
    entry_point = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
    if entry_point is None:
        near = ", ".join(difflib.get_close_matches(name, [*RECIPES, *ANSWERS], n=3, cutoff=0.0))
        words.example = nearest(name, RECIPES) or EXAMPLE
        problem = f"no recipe or answer is called {name!r}; the nearest are {near}"
        raise words.refused("one of " + ", ".join(sorted(WORDS)), term.at, problem)
    try:
        loaded = entry_point.load()
    except Exception as error:  # whatever the module raises while it is imported
        raise _no_answer(f"{name} ({entry_point.value})", f"{type(error).__name__}: {error}") from error
    return _answer(f"{name} ({entry_point.value})", loaded)


def _answer(path: str, imported: object) -> type[Answer]:
    if not isinstance(imported, type) or not issubclass(imported, BASES):
        raise _no_answer(
            path, f"a {type(imported).__name__}" if not isinstance(imported, type) else f"class {imported.__name__}"
        )
    if not dataclasses.is_dataclass(imported):
        raise _no_answer(path, f"class {imported.__name__}, which is no dataclass")
    return imported


def _no_answer(path: str, got: str) -> RecipeError:
    return RecipeError(
        explain(
            f"{path} is not an answer that can be imported",
            got=got,
            expected="a frozen dataclass derived from stretto.how.Codec, or from What, When, Whom or Then, in a module "
            "that every process can import",
            to_type="allreduce(how=package.module.codec(...)), with the package's folder in PYTHONPATH",
        )
    )


def _check_options(
    term: Term, words: Words, make: Callable[..., Any], args: list[Any], options: dict[str, Any]
) -> None:
    name, signature = term.name, inspect.signature(make)
    allowed = [parameter for parameter in signature.parameters if parameter != "called"]
    expected = "the options " + ", ".join(allowed) if allowed else "no options"
    unknown = next((option for option in options if option not in allowed), None)
    if unknown is not None:
        near = nearest(unknown, allowed)
        example = f"{name}({near}={options[unknown]})" if near else f"{name}()"
        raise words.refused(expected, term.options[unknown].at - 2, f"{name} has no option {unknown!r}", example)
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        raise words.refused(expected, term.at, f"{name}: {error}", f"{name}(...)") from None


def with_shards(text: str, shards: int) -> str:
    """Return the shortest text of a recipe over a parameter server with this number of shards.

    >>> with_shards("async_sgd(weight=0.5)", 2)
    'async_sgd(weight=0.5, shards=2)'
    >>> with_shards("allreduce", 2)
    'Recipe(whom=server(shards=2))'
    """
    recipe = parse(text)
    sharded = dataclasses.replace(recipe, whom=whom.server(shards), called="")
    with contextlib.suppress(RecipeError):
        name, _, options = str(recipe).partition("(")
        other_options = [
            option for option in options.removesuffix(")").split(", ") if option and not option.startswith("shards=")
        ]
        short = f"{name}({', '.join([*other_options, f'shards={shards}'])})"
        if parse(short) == sharded:
            return short
    return str(sharded)
