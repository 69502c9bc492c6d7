"""The state of a whole model, from the states of the ranks that hold its parts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from stretto.checkpoint.storage import State

NAMED = ("model/", "more/", "optimizer/", "buffer/", "random/", "kept/")
"""Beginnings of the names of tensors that do not depend on the layout. All others are states of exchanges."""
EXCHANGES = {
    "codec": "states of the codec",
    "outer": "momentum of the outer optimizer",
    "own": "each worker's own parameters",
    "residual": "residuals",
    "server": "momentum at the server",
}
"""Kinds of tensors that depend on the layout, in words."""
NONE: list[Any] = ["list", []]


def joined(states: Sequence[State]) -> State:
    """Return the state of a worker's whole model, from those of all its ranks.

    States of codecs and of outer optimizers belong to ranges of one rank's parameters, and are left out.
    """
    first = states[0]
    strategies = [state.facts["strategy"] for state in states]
    facts = first.facts | {"strategy": _strategy(strategies)}
    own = {worker: _own(worker, states) for worker in first.own}
    return State(facts, _named(state.tensors for state in states), own)


def without_exchanges(state: State) -> tuple[State, list[str]]:
    """Return a checkpoint's state without those of exchanges, for ranks of another layout, and what it had of them."""
    tensors = [state.tensors, *(tensors for _, tensors in state.own.values())]
    return joined([state]), in_words(name for each in tensors for name in each if not name.startswith(NAMED))


def only_of(names: Container[str], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a state of which a rank holds the parameters and buffers of these names."""
    strategy = facts["strategy"]
    moving, is_asked = strategy["moving"]
    trained = [[name for name in group if name in names] for group in strategy["trained"]]
    parts = {"trained": trained, "moving": [[name for name in moving if name in names], is_asked]}
    return {**facts, "strategy": {**strategy, **parts}}


def in_words(names: Iterable[str]) -> list[str]:
    """Return the kinds of tensors of these names, in words."""
    return [EXCHANGES.get(kind, kind) for kind in sorted({name.partition("/")[0] for name in names})]


def _named(each: Any) -> dict[str, Tensor]:
    return {name: one for tensors in each for name, one in tensors.items() if name.startswith(NAMED)}


def _own(worker: int, states: Sequence[State]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a worker's own state: random states of its rank 0, tensors of all ranks."""
    facts = states[0].own[worker][0] | {"states": {"codec_states": NONE}}
    return facts, _named(state.own[worker][1] for state in reversed(states))


def _strategy(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    trained = [
        [name for names in each for name in names] for each in zip(*(one["trained"] for one in ranks), strict=True)
    ]
    moving = sorted({name for one in ranks for name in one["moving"][0]})
    is_asked = any(one["moving"][1] for one in ranks)
    parts = {"trained": trained, "moving": [moving, is_asked], "codec_states": NONE, "outer_states": NONE}
    return {**ranks[0], **parts}
