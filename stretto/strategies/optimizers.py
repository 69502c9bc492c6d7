"""The optimizers of a script, seen as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from stretto.errors import ModelError, explain
from stretto.recipe.recipe import Recipe
from stretto.recipe.what import gradients


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def device_of_state(group: dict[str, Any], parameter: Parameter, dims: int) -> torch.device:
    """Return the device of an entry of a parameter's state: of counters the CPU, unless the optimizer is fused."""
    on_device = dims or group.get("fused") or group.get("capturable")
    return parameter.device if on_device else torch.device("cpu")


class Optimizers:
    """The parameter groups and the state of several optimizers, in the order in which the script gave them.

    `each` are those that step parameters; an optimizer around another one (SAM, Lookahead) is in `around`, by the
    number of the one within it, from the outermost one on.
    """

    def __init__(self, given: Sequence[Optimizer]) -> None:
        found: dict[int, tuple[Optimizer, list[Optimizer]]] = {}
        for inner, wrappers in [pair for one in given for pair in _within(one)]:
            known = found.setdefault(id(inner), (inner, []))[1]
            known += [one for one in wrappers if not any(one is other for other in known)]
        self.each = tuple(inner for inner, _ in found.values())
        self.around = tuple(tuple(wrappers) for _, wrappers in found.values())

    def __len__(self) -> int:
        return len(self.each)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.each)

    @property
    def all(self) -> list[Optimizer]:
        """The optimizers and those around them."""
        return [one for inner, wrappers in zip(self.each, self.around, strict=True) for one in (*wrappers, inner)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for optimizer in self.each for group in optimizer.param_groups]

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters of all groups."""
        return [one for optimizer in self.each for one in parameters_of(optimizer)]

    def states(self) -> list[tuple[Parameter, dict[str, Any]]]:
        """Return each parameter with the state that its optimizer keeps of it, empty where there is none.

        The state of an optimizer around it is added, by names with the prefix "around".
        """
        found: list[tuple[Parameter, dict[str, Any]]] = []
        for optimizer, by_prefix in self._by_prefix():
            for parameter in parameters_of(optimizer):
                kept = [(prefix, one.state.get(parameter, {})) for prefix, one in by_prefix]
                found.append((parameter, {f"{prefix}{name}": one[name] for prefix, one in kept for name in one}))
        return found

    def replace_states(self, states: Sequence[tuple[Parameter, dict[str, Any]]]) -> None:
        """Put these states in place of what there is."""
        given = {id(parameter): state for parameter, state in states}
        for optimizer, by_prefix in self._by_prefix():
            for _, one in by_prefix:
                one.state.clear()
            for parameter in parameters_of(optimizer):
                for name, value in given.get(id(parameter), {}).items():
                    prefix, one = next(pair for pair in by_prefix if name.startswith(pair[0]))
                    one.state[parameter][name.removeprefix(prefix)] = value

    def _by_prefix(self) -> list[tuple[Optimizer, list[tuple[str, Optimizer]]]]:
        """Return each optimizer with those that keep state of its parameters, itself last, and their prefixes."""
        return [
            (inner, [*((f"around{number} ", one) for number, one in enumerate(wrappers)), ("", inner)])
            for inner, wrappers in zip(self.each, self.around, strict=True)
        ]


def _within(optimizer: Optimizer) -> Iterator[tuple[Optimizer, tuple[Optimizer, ...]]]:
    """Yield the optimizers that step the parameters of this one, each with those around it."""
    inner = held_by(optimizer)
    for one in inner:
        for innermost, wrappers in _within(one):
            yield innermost, (optimizer, *wrappers)
    if not inner:
        yield optimizer, ()


def held_by(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that this one is around: attributes of it that hold all of its parameters between them.

    >>> inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    >>> outer = torch.optim.SGD(inner.param_groups)
    >>> outer.base_optimizer = inner
    >>> held_by(outer) == [inner], held_by(inner)
    (True, [])
    """
    attributes = [value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")]
    kept = [one for value in attributes for one in (value if isinstance(value, list | tuple) else [value])]
    inner = [one for one in kept if isinstance(one, Optimizer) and hasattr(one, "_optimizer_step_pre_hooks")]
    own = {id(one) for one in parameters_of(optimizer)}
    held = [{id(one) for one in parameters_of(each)} for each in inner]
    is_around = bool(inner) and all(one <= own for one in held) and own == set().union(*held)
    return inner if is_around or (inner and not own) else []


def refuse_shared_parameters(model: nn.Module, optimizers: Optimizers) -> None:
    """Raise ModelError if two optimizers hold the same parameter: an exchange follows the steps of one optimizer."""
    times = Counter(id(one) for one in optimizers.parameters)
    shared = [name for name, one in model.named_parameters() if times[id(one)] > 1]
    if shared or max(times.values(), default=0) > 1:
        raise ModelError(
            explain(
                f"two optimizers hold the same {'parameter' if len(shared) == 1 else 'parameters'}, which a run of "
                "several workers cannot exchange for both",
                got=f"{', '.join(shared[:4])}{' and others' if len(shared) > 4 else ''} in more than one optimizer",
                expected="each parameter in one optimizer",
                to_type="one optimizer over all parameters, and one step on the sum of the losses; or the shared "
                "parameters in one of the two optimizers alone",
            )
        )


def refuse_optimizers(recipe: Recipe, optimizers: Optimizers, workers: int) -> None:
    """Raise ModelError for optimizers that cannot train right under a recipe.

    L-BFGS chooses the length of its step: where a server adds whole updates, the model moves several such lengths.

    A codec with a state (or a recipe that keeps one) would take the gradients that one
    model gets in the other's backward pass for its own.
    """
    added = recipe.step_of_all(workers)
    if added > 1 and any(isinstance(one, LBFGS) for one in optimizers):
        raise ModelError(
            explain(
                f"L-BFGS chooses the length of its step, and {recipe} adds the steps of {workers} workers",
                got=f"torch.optim.LBFGS, and a server that adds up to {added:.3g} whole updates of the same parameters",
                expected="updates that are averaged, or another optimizer",
                to_type='--recipe "local_sgd(every=16)", or --recipe "stale_synchronous(bound=4)" without waiting',
            )
        )
    if not isinstance(recipe.what, gradients) or recipe.asynchronous:
        return
    if len(optimizers) > 1 and (type(recipe.what) is not gradients or recipe.how.keeps_residual):
        raise ModelError(
            explain(
                f"{recipe} remembers gradients, and can't tell those of {len(optimizers)} optimizers apart",
                got=f"{len(optimizers)} optimizers",
                expected="one optimizer, or a recipe without such a memory",
                to_type='--recipe allreduce, or --recipe "local_sgd(every=16)"',
            )
        )
