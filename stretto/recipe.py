"""A recipe: one answer to each of the five questions, checked when it is built."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

from stretto.axis import Answer
from stretto.errors import RecipeError, explain
from stretto.how import Codec, exact
from stretto.then import OnParameters, Then, add, outer, replace, step
from stretto.what import What, gradients, parameters, updates
from stretto.when import When, together
from stretto.whom import Whom, everyone


@dataclass(frozen=True, repr=False)
class Recipe(Answer):
    """How workers learn together: what they exchange, when, with whom, in what encoding, and what is done then.

    >>> print(Recipe(what=updates(), when=together(every=16), then=add()))
    Recipe(what=updates(), when=together(every=16), then=add())

    Printed it can be typed back: `stretto run train.py --recipe "local_sgd(every=16)"`. Two recipes are equal when
    their five answers are, whatever they were called. Raises RecipeError when the answers do not fit together.
    """

    what: What = gradients()
    when: When = together()
    whom: Whom = everyone()
    how: Codec = exact()
    then: Then = step()
    called: str = field(default="", compare=False, kw_only=True)
    """The short text, when it was made by one of `stretto.recipes`."""

    axis = "recipe"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_then(self)
        _check_when(self)

    def __str__(self) -> str:
        return self.called or self.spelled()

    def spelled(self) -> str:
        """The long form, whatever the recipe is called."""
        answers = [f"{one.name}={getattr(self, one.name)}" for one in _axes() if _differs(self, one.name)]
        return f"Recipe({', '.join(answers)})"

    def words(self) -> dict[str, str]:
        """The five answers as text."""
        return {one.name: str(getattr(self, one.name)) for one in _axes()}

    def sources(self) -> tuple[str, ...]:
        """The papers of its parts, each once."""
        papers = (paper for one in _axes() for paper in getattr(self, one.name).sources())
        return tuple(dict.fromkeys(papers))


def _axes() -> list[Field[Any]]:
    return [one for one in fields(Recipe) if one.name != "called"]


def _differs(recipe: Recipe, name: str) -> bool:
    return bool(getattr(recipe, name) != Recipe.__dataclass_fields__[name].default)


THENS: dict[type[What], tuple[type[Then], ...]] = {
    gradients: (step,),
    parameters: (replace,),
    updates: (add, outer),
}
"""What can be done with the answer to each kind of question: a gradient is not a set of parameters."""


def _check_then(recipe: Recipe) -> None:
    fitting = THENS[type(recipe.what)]
    if isinstance(recipe.then, fitting):
        return
    raise RecipeError(
        explain(
            f"what={recipe.what} and then={recipe.then} do not fit: {_reason(recipe.then)}",
            got=f"what={recipe.what}, then={recipe.then}",
            expected=f"with what={recipe.what}, then= one of " + ", ".join(f"{one.__name__}()" for one in fitting),
            to_type=f"Recipe(what={recipe.what}, when={recipe.when}, then={fitting[0].__name__}())",
        )
    )


def _reason(then: Then) -> str:
    if isinstance(then, replace):
        return "replace() takes the answer as the parameters"
    if isinstance(then, OnParameters):
        return f"{type(then).__name__}() adds a change to the parameters last agreed"
    return "step() gives the answer to the optimizer as a gradient"


def _check_when(recipe: Recipe) -> None:
    if not isinstance(recipe.what, gradients) or recipe.when == together():
        return
    raise RecipeError(
        explain(
            f"gradients are exchanged in every backward pass, not {recipe.when}",
            got=f"what={recipe.what}, when={recipe.when}",
            expected="when=together(every=1) with gradients; to exchange less often, exchange updates or parameters",
            to_type=f"Recipe(what=updates(), when={recipe.when}, then=add()), or accumulate with stretto.no_sync()",
        )
    )
