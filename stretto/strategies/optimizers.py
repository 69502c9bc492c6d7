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
    """The parameter groups and the state of several optimizers, in the order in which the script gave them."""

    def __init__(self, each: Sequence[Optimizer]) -> None:
        self.each = tuple(each)

    def __len__(self) -> int:
        return len(self.each)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.each)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for optimizer in self.each for group in optimizer.param_groups]

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters of all groups."""
        return [one for optimizer in self.each for one in parameters_of(optimizer)]

    def states(self) -> list[tuple[Parameter, dict[str, Any]]]:
        """Return each parameter with the state that its optimizer keeps of it, empty where there is none."""
        return [(one, each.state.get(one, {})) for each in self.each for one in parameters_of(each)]

    def replace_states(self, states: Sequence[tuple[Parameter, dict[str, Any]]]) -> None:
        """Put these states in place of what there is."""
        given = {id(parameter): state for parameter, state in states}
        for optimizer in self.each:
            optimizer.state.clear()
            for one in parameters_of(optimizer):
                if found := given.get(id(one)):
                    optimizer.state[one].update(found)


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

    A line search asks for the loss as often as the worker's own loss makes it, while each backward pass is an exchange
    that all workers take part in. A codec with a state (or a recipe that keeps one) would take the gradients that one
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
    if any(isinstance(one, LBFGS) and one.param_groups[0]["line_search_fn"] for one in optimizers):
        raise ModelError(
            explain(
                f"{recipe} exchanges gradients in each backward pass, and a line search makes another number of them "
                "on each worker",
                got="torch.optim.LBFGS with line_search_fn",
                expected="the same number of backward passes on every worker",
                to_type='--recipe "local_sgd(every=1)", or LBFGS without line_search_fn',
            )
        )
    if len(optimizers) > 1 and (type(recipe.what) is not gradients or recipe.how.keeps_residual):
        raise ModelError(
            explain(
                f"{recipe} remembers gradients, and can't tell those of {len(optimizers)} optimizers apart",
                got=f"{len(optimizers)} optimizers",
                expected="one optimizer, or a recipe without such a memory",
                to_type='--recipe allreduce, or --recipe "local_sgd(every=16)"',
            )
        )
