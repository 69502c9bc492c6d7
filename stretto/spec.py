"""Base of the answers to the five questions: small frozen values, validated when built, printed as typed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from stretto.errors import RecipeError, explain


@dataclass(frozen=True)
class Range:
    """Numbers that a field allows: `least <= x`, `above < x`, `most >= x`, `below > x`."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, x: float) -> bool:
        """Return True if x is in the range; NaN and infinity are in none."""
        return (
            (self.least is None or x >= self.least)
            and (self.above is None or x > self.above)
            and (self.most is None or x <= self.most)
            and (self.below is None or x < self.below)
            and abs(x) < float("inf")
        )

    def __str__(self) -> str:
        signs = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{sign} {bound:g}" for sign, bound in signs.items() if bound is not None)


class Answer:
    """Base of all answers. Subclasses are frozen dataclasses whose fields are numbers, names or answers.

    `str(answer)` is the text that `stretto.recipe.parse` reads: fields at their defaults are left out, fields
    without a default stand first and without their name. Building one with a wrong field raises RecipeError.
    """

    papers: ClassVar[tuple[str, ...]] = ()
    """Publications of the answer, as `Author year (arXiv number)`."""
    axis: ClassVar[str] = ""
    """Question that it answers; empty for a part of an answer."""
    strategy: ClassVar[str] = ""
    """Import path of the strategy of recipes with this answer, unless another answer names one before it."""

    def check_recipe(self, recipe: Any) -> None:
        """Raise RecipeError if the other answers of a recipe do not fit this one."""

    def sources(self) -> tuple[str, ...]:
        """Return the papers of this answer with its options."""
        return self.papers

    def __post_init__(self) -> None:
        for name, kind in kinds(type(self)).items():
            object.__setattr__(self, name, _checked(self, name, kind))

    def __str__(self) -> str:
        shown = [text for field in fields(self) if (text := _shown(self, field))]  # type: ignore[arg-type]
        return f"{typed_name(type(self))}({', '.join(shown)})"

    __repr__ = __str__


def kinds(answer: type[Answer]) -> Mapping[str, Any]:
    """Return the field types of an answer, with their ranges."""
    if answer not in _kinds:
        hints = get_type_hints(answer, include_extras=True)
        _kinds[answer] = {field.name: hints[field.name] for field in fields(answer)}  # type: ignore[arg-type]
    return _kinds[answer]


_kinds: WeakKeyDictionary[type, Mapping[str, Any]] = WeakKeyDictionary()
"""Field types of the answers that were built: to read them takes a millisecond."""


def typed_name(answer: type[Answer]) -> str:
    """Return the name of an answer in a recipe's text: with its import path if it is from another package."""
    if answer.__module__.partition(".")[0] == "stretto" or "<locals>" in answer.__qualname__:
        return answer.__name__
    return f"{answer.__module__}.{answer.__qualname__}"


def literal(value: object) -> str:
    """Return a field's value as a recipe's text."""
    return '"' + value + '"' if isinstance(value, str) else str(value)


def signature(make: Callable[..., object]) -> str:
    """Return the call of what makes a recipe or a layout, with its defaults, as a text.

    >>> def local(every: int, weight: float = 0.5) -> None: ...
    >>> signature(local)
    'local(every, weight=0.5)'
    """
    options = inspect.signature(make).parameters.values()
    shown = (one.name if one.default is one.empty else f"{one.name}={literal(one.default)}" for one in options)
    return f"{make.__name__}({', '.join(shown)})"


def sentence(documented: object) -> str:
    """Return the first line of a docstring."""
    return (documented.__doc__ or "").partition("\n")[0]


class FieldError(RecipeError):
    """Invalid value of a field; `needed` describes valid ones, `sample` is one."""

    def __init__(self, field: str, of: str, value: object, kind: Any, to_type: str) -> None:
        self.field, self.value, self.kind = field, value, kind
        self.needed, self.sample = _needed(value, kind), _sample(kind)
        super().__init__(
            explain(
                f"{field} of {of} must be {self.needed}, got {literal(value)}",
                got=f"{literal(value)} ({type(value).__name__})",
                expected=describe(kind),
                to_type=to_type,
            )
        )

    def renamed(self, field: str, of: str) -> FieldError:
        """Return the same error for an option of a recipe that the value was typed for."""
        return FieldError(field, of, self.value, self.kind, f"{of}({field}={self.sample})")


def _needed(value: object, kind: Any) -> str:
    """Return a description of valid values: only the range if the type is right."""
    base, *ranges = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if ranges and _fit(value, base)[0]:
        return " and ".join(map(str, ranges))
    return describe(kind)


def _shown(answer: Answer, field: Field[Any]) -> str:
    value = getattr(answer, field.name)
    if field.default is MISSING:
        return literal(value)
    return "" if value == field.default else f"{field.name}={literal(value)}"


def _checked(answer: Answer, name: str, kind: Any) -> object:
    value = getattr(answer, name)
    fit, as_kind = _fit(value, kind)
    if fit:
        return as_kind
    raise FieldError(name, type(answer).__name__, value, kind, _example(answer, name))


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    """Return whether the value is of the kind, and the value converted to it (an int to a float)."""
    origin = get_origin(kind)
    if origin is Annotated:
        base, *ranges = get_args(kind)
        fit, value = _fit(value, base)
        return fit and all(range_.holds(value) for range_ in ranges if value is not None), value
    if origin is Literal:
        return value in get_args(kind), value
    if origin in (Union, UnionType):
        return next((found for one in get_args(kind) if (found := _fit(value, one))[0]), (False, value))
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number, float(value) if number else value
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool)), value


def describe(kind: Any) -> str:
    """Return a field type in words."""
    origin = get_origin(kind)
    if origin is Annotated:
        base, *ranges = get_args(kind)
        return " ".join([describe(base), *(str(range_) for range_ in ranges)])
    if origin is Literal:
        return " or ".join(literal(choice) for choice in get_args(kind))
    if origin in (Union, UnionType):
        return " or ".join(describe(one) for one in get_args(kind))
    plain = {
        int: "a whole number",
        float: "a number",
        str: "a name in quotes",
        bool: "True or False",
        NoneType: "None",
    }
    return plain.get(kind) or (f"an answer to {kind.axis!r}" if kind.axis else str(kind.example))


def _example(answer: Answer, name: str) -> str:
    """Return the text of the answer with a valid value for `name`."""
    made = type(answer)
    sample = _sample(kinds(made)[name])
    shown = []
    for field in fields(made):  # type: ignore[arg-type]
        if field.default is MISSING:
            shown.append(sample if field.name == name else literal(getattr(answer, field.name)))
        elif field.name == name:
            shown.append(f"{name}={sample}")
    return f"{typed_name(made)}({', '.join(shown)})"


def _sample(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        base, *ranges = get_args(kind)
        tries = (1, 16, 0.5, 2)
        held = (x for x in tries if _fit(x, base)[0] and all(r.holds(x) for r in ranges))
        return str(next(held, 1))
    if origin is Literal:
        return literal(get_args(kind)[0])
    if origin in (Union, UnionType):
        return _sample(get_args(kind)[0])
    return {int: "1", float: "0.5", bool: "True", str: '"name"'}.get(kind, f"{getattr(kind, 'example', 'exact()')}")
