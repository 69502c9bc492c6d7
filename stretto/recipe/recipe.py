"""A recipe: one answer to each of the five questions, checked when it is built."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from dataclasses import replace as replaced
from typing import Any

from stretto.codecs import Codec, exact
from stretto.errors import RecipeError, explain
from stretto.recipe.then import (
    OnParameters,
    Then,
    add,
    constant,
    delay_compensated,
    frozen_variance,
    mix,
    outer,
    pull,
    replace,
    step,
)
from stretto.recipe.what import What, gradient_differences, gradients, momenta, parameters, updates
from stretto.recipe.when import When, on_arrival, overhead, together
from stretto.recipe.whom import Whom, everyone, server
from stretto.spec import Answer


@dataclass(frozen=True, repr=False)
class Recipe(Answer):
    """Algorithm of distributed training, as answers to the five questions what, when, whom, how and then.

    >>> print(Recipe(what=updates(), when=together(every=16), then=add()))
    Recipe(what=updates(), when=together(every=16), then=add())

    Its text can be typed back: `stretto run --recipe "local_sgd(every=16)" train.py`. Two recipes are equal if
    their five answers are, whatever their names. Raises RecipeError if the answers do not fit together.
    """

    what: What = gradients()
    when: When = together()
    whom: Whom = everyone()
    how: Codec = exact()
    then: Then = step()
    called: str = field(default="", compare=False, kw_only=True)
    """Short text of a recipe made by a function of `stretto.recipes`."""

    axis = "recipe"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = (_check_whom, _check_differences, _check_mix, _check_then, _check_weight, _check_when, _check_how)
        for check in checks:
            check(self)
        for answer in (self.what, self.when, self.whom, self.how, self.then):
            answer.check_recipe(self)

    def __str__(self) -> str:
        return self.called or self.spelled()

    def spelled(self) -> str:
        """Return the long form of the recipe."""
        answers = [f"{axis.name}={getattr(self, axis.name)}" for axis in _axes() if _differs(self, axis.name)]
        return f"Recipe({', '.join(answers)})"

    def words(self) -> dict[str, str]:
        """Return the five answers as text."""
        return {axis.name: str(getattr(self, axis.name)) for axis in _axes()}

    @property
    def asynchronous(self) -> bool:
        """True if a server applies exchanges on arrival, so that workers do not wait for each other."""
        return isinstance(self.when, on_arrival)

    def step_of_all(self, workers: int) -> float:
        """Return how many whole updates the server adds, where each of equally fast workers sends one.

        Above 1 the steps of workers that computed on the same parameters add up, like a larger learning rate.

        >>> from stretto.recipe.whom import server
        >>> Recipe(updates(), on_arrival(), server(), then=add()).step_of_all(3)
        3.0
        """
        if not (isinstance(self.when, on_arrival) and isinstance(self.then, add)):
            return 1.0
        return workers * self.then.weight.of(workers - 1, workers) / self.when.collect

    @property
    def shards(self) -> int:
        """Number of shards of its parameter server; 0 without one."""
        return self.whom.shards

    @property
    def strategy(self) -> str:  # type: ignore[override]
        """Import path of its strategy, named by the first of then, whom, when and what that names one."""
        named = (answer.strategy for answer in (self.then, self.whom, self.when, self.what))
        return next(path for path in named if path)

    @property
    def moves_rows(self) -> bool:
        """True if its server adds changes to each number alone, so that rows without a change need not travel."""
        is_added = isinstance(self.then, add) and not isinstance(self.then.weight, delay_compensated)
        return self.asynchronous and is_added and self.how == exact()

    def sources(self) -> tuple[str, ...]:
        """Return the papers of all answers, each once."""
        papers = (paper for axis in _axes() for paper in getattr(self, axis.name).sources())
        return tuple(dict.fromkeys(papers))


def has_shares(recipe: Recipe) -> bool:
    """Return True if each worker waits for all others, so that it may have an unequal share of a global step."""
    return not recipe.asynchronous and isinstance(recipe.whom, everyone | server)


def refuse_shares(recipe: Recipe, asked: str) -> None:
    """Raise RecipeError for an option on shares under a recipe whose workers do not wait for all others."""
    if has_shares(recipe):
        return
    why = (
        "its workers do not wait: each takes the next batch as soon as it is ready, so a fast one takes more"
        if recipe.asynchronous
        else "a worker mixes its model with those of its neighbours alone, and keeps an even share"
    )
    raise RecipeError(
        explain(
            f"{asked} does not fit {recipe}: {why}",
            got=f"{asked} --recipe {recipe}",
            expected=f"a recipe whose workers wait for all others, or no {asked.split()[0]}",
            to_type=f'{asked} --recipe "local_sgd(every=16)"',
        )
    )


def _axes() -> list[Field[Any]]:
    return [field for field in fields(Recipe) if field.name != "called"]


def _differs(recipe: Recipe, name: str) -> bool:
    return bool(getattr(recipe, name) != Recipe.__dataclass_fields__[name].default)


THENS: dict[type[When], dict[type[What], tuple[type[Then], ...]]] = {
    together: {
        gradients: (step,),
        gradient_differences: (step,),
        momenta: (frozen_variance,),
        parameters: (replace,),
        updates: (add, outer),
    },
    on_arrival: {gradients: (add,), parameters: (pull, replace), updates: (add, outer)},
}
"""Answers to *then* that fit each pair of *when* and *what*."""


def _check_whom(recipe: Recipe) -> None:
    if recipe.shards or (not recipe.asynchronous and isinstance(recipe.whom, everyone)) or recipe.then.strategy:
        return
    if not recipe.asynchronous:
        raise RecipeError(
            explain(
                f"{recipe.whom} gives weights of some workers, and then={recipe.then} needs the mean of all",
                got=f"whom={recipe.whom}, then={recipe.then}",
                expected="then=mix(), or whom=everyone()",
                to_type=f"Recipe(what=parameters(), when=together(), whom={recipe.whom}, then=mix())",
            )
        )
    raise RecipeError(
        explain(
            f"when={recipe.when} needs a server for updates to arrive at",
            got=f"when={recipe.when}, whom={recipe.whom}",
            expected="whom=server(shards=n)",
            to_type=f"Recipe(what={recipe.what}, when={recipe.when}, whom=server(), then={_fitting_then(recipe)})",
        )
    )


def _check_differences(recipe: Recipe) -> None:
    """Refuse asynchronous recipes and unfit codecs: a shared state needs all workers and separate messages."""
    if not isinstance(recipe.what, gradient_differences | momenta):
        return
    if recipe.asynchronous:
        raise RecipeError(
            explain(
                f"what={recipe.what} adds up states that all workers keep, so all must receive every message",
                got=f"what={recipe.what}, when={recipe.when}",
                expected="when=together()",
                to_type=f"Recipe(what={recipe.what}, how={recipe.how})",
            )
        )
    if isinstance(recipe.what, momenta):
        return
    silent = recipe.what.groups > 1
    if not recipe.how.pair or (silent and recipe.how.linear):
        raise RecipeError(
            explain(
                f"what={recipe.what} can't be sent as {recipe.how}",
                got=f"what={recipe.what}, how={recipe.how}",
                expected="a codec that is a pair of encode and decode"
                + (", whose messages are not summed by an all-reduce: some workers send nothing" if silent else ""),
                to_type=f"Recipe(what={recipe.what}, how=error_feedback(top_k(0.01)))",
            )
        )


def _check_mix(recipe: Recipe) -> None:
    """Refuse recipes with `mix` that do not exchange plain parameters among workers that wait for each other."""
    is_fitting = recipe.what == parameters() and not recipe.asynchronous and not recipe.shards and recipe.how == exact()
    if not isinstance(recipe.then, mix) or is_fitting:
        return
    whom = "" if recipe.shards else f"whom={recipe.whom}, "
    raise RecipeError(
        explain(
            "then=mix() mixes the parameters themselves, exactly, with those of peers that wait for each other",
            got=f"what={recipe.what}, when={recipe.when}, whom={recipe.whom}, how={recipe.how}",
            expected='what=parameters(), when=together(), how=exact(), and whom=neighbours("ring") or another topology',
            to_type=f"Recipe(what=parameters(), {whom}then=mix())",
        )
    )


def _thens(recipe: Recipe) -> tuple[type[Then], ...]:
    """Return the answers to *then* that fit; none where a word of another package checks the recipe itself."""
    by_what = {} if recipe.then.strategy else THENS.get(type(recipe.when), {})
    return next((by_what[kind] for kind in type(recipe.what).__mro__ if kind in by_what), ())


def _fitting_then(recipe: Recipe) -> str:
    fitting = _thens(recipe)
    return str(recipe.then) if isinstance(recipe.then, fitting) or not fitting else f"{fitting[0].__name__}()"


def _check_then(recipe: Recipe) -> None:
    fitting = _thens(recipe)
    if not fitting or (isinstance(recipe.then, fitting) and not _is_frozen_alone(recipe)):
        return
    answers = f"what={recipe.what}, when={recipe.when}"
    whom = f", whom={recipe.whom}" if recipe.shards else ""
    raise RecipeError(
        explain(
            f"what={recipe.what} and then={recipe.then} do not fit: {_reason(recipe)}",
            got=f"{answers}, then={recipe.then}",
            expected=f"with {answers}, then= one of " + ", ".join(f"{then.__name__}()" for then in fitting),
            to_type=f"Recipe({answers}{whom}, then={_fitting_then(recipe)})",
        )
    )


def _is_frozen_alone(recipe: Recipe) -> bool:
    """Return True if the variance would be frozen without an exchange of momenta."""
    return isinstance(recipe.then, frozen_variance) and not isinstance(recipe.what, momenta)


def _reason(recipe: Recipe) -> str:
    then = recipe.then
    if isinstance(then, frozen_variance) or isinstance(recipe.what, momenta):
        return "frozen_variance() steps with a momentum, and only it does"
    if isinstance(then, pull):
        return "pull() applies to a server's and a worker's parameters, on arrival"
    if isinstance(then, replace):
        return "replace() takes the answer as the parameters"
    if isinstance(then, OnParameters):
        return f"{type(then).__name__}() adds a change to the parameters last agreed"
    return "step() passes the answer to the optimizer as a gradient"


def _check_weight(recipe: Recipe) -> None:
    if recipe.asynchronous or not isinstance(recipe.then, add) or isinstance(recipe.then.weight, constant):
        return
    raise RecipeError(
        explain(
            f"nothing is stale under {recipe.when}, so {recipe.then.weight} has nothing to weigh",
            got=f"when={recipe.when}, then={recipe.then}",
            expected="a constant weight, or when=on_arrival()",
            to_type=f"Recipe(what={recipe.what}, when=on_arrival(), whom=server(), then={recipe.then})",
        )
    )


def _check_when(recipe: Recipe) -> None:
    if isinstance(recipe.what, gradients) and recipe.when not in (together(), _every_step(recipe.when)):
        expected = "every=1 with gradients; to exchange less often, exchange updates or parameters"
        whom = f", whom={recipe.whom}" if recipe.shards else ""
        raise RecipeError(
            explain(
                f"gradients are exchanged in every backward pass, not {recipe.when}",
                got=f"what={recipe.what}, when={recipe.when}",
                expected=expected,
                to_type=f"Recipe(what=updates(), when={recipe.when}{whom}, then=add()), "
                "or accumulate with stretto.no_sync()",
            )
        )
    if isinstance(getattr(recipe.when, "every", None), overhead) and not isinstance(recipe.whom, everyone):
        raise RecipeError(
            explain(
                f"the local steps of {recipe.when} are agreed among workers that all exchange with each other",
                got=f"when={recipe.when}, whom={recipe.whom}",
                expected="every= a number of steps, or whom=everyone()",
                to_type=f"Recipe(what={recipe.what}, when=together(every=16), whom={recipe.whom}, then={recipe.then})",
            )
        )
    if recipe.asynchronous and isinstance(recipe.what, parameters) and recipe.what.optimizer_state != "keep":
        raise RecipeError(
            explain(
                "a server on arrival has no optimizer's state",
                got=f"what={recipe.what}, when={recipe.when}",
                expected='optimizer_state="keep"',
                to_type=f"Recipe(what=parameters(), when={recipe.when}, whom={recipe.whom}, then={recipe.then})",
            )
        )


def _every_step(when: When) -> When | None:
    return replaced(when, every=1) if isinstance(when, on_arrival) else None


def _check_how(recipe: Recipe) -> None:
    if recipe.how.needs_theta and not isinstance(recipe.what, gradients):
        raise RecipeError(
            explain(
                f"{recipe.how} compares gradients with how far the parameters moved",
                got=f"what={recipe.what}, how={recipe.how}",
                expected="what=gradient_differences() or what=gradients()",
                to_type=f"Recipe(what=gradient_differences(0.01), how={recipe.how})",
            )
        )
    if recipe.asynchronous and (not recipe.how.pair or recipe.how.needs_theta):
        raise RecipeError(
            explain(
                f"{recipe.how} needs collective operations of all workers, and on arrival there are none",
                got=f"when={recipe.when}, how={recipe.how}",
                expected="a codec that is a pair of encode and decode",
                to_type=f"Recipe(what={recipe.what}, when={recipe.when}, whom={recipe.whom}, then={recipe.then})",
            )
        )
    is_whole = isinstance(recipe.what, parameters) and not (recipe.how.elementwise and recipe.how.reply is None)
    if recipe.asynchronous and is_whole:
        raise RecipeError(
            explain(
                "parameters are sent whole to a server on arrival: a part of them does not determine the rest",
                got=f"what={recipe.what}, when={recipe.when}, how={recipe.how}",
                expected="how=exact() or how=cast(), or what=updates()",
                to_type=f"Recipe(what=updates(), when={recipe.when}, whom={recipe.whom}, how={recipe.how}, then=add())",
            )
        )
    if recipe.how.reply is not None and not recipe.asynchronous:
        raise RecipeError(
            explain(
                f"{recipe.how} encodes a server's replies, and under {recipe.when} no server replies",
                got=f"when={recipe.when}, how={recipe.how}",
                expected="when=on_arrival() and whom=server(), or the codec of one direction",
                to_type=f"Recipe(what=updates(), when=on_arrival(), whom=server(), how={recipe.how}, then=add())",
            )
        )
