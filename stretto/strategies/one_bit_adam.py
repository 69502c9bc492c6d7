"""Adam with a frozen variance: after a warm-up it steps with the agreed momentum, over the variance as it was then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer

from stretto.errors import ModelError, explain
from stretto.recipe.what import momenta
from stretto.strategies.step_hooks import StepHooks


class FrozenVariance:
    """Takes the place of Adam's own step once `is_warm` says so; the script sees the same optimizer.

    Adam gets no gradients then, so that it changes nothing, and what it would have done is done here, with the learning
    rate, eps and decoupled weight decay of its groups as they are now. Its exp_avg shows the agreed momentum. A number
    that had no gradient in all of the warm-up has no variance to be divided by, and stays as it is.
    """

    def __init__(self, optimizer: Optimizer, what: momenta, is_warm: Callable[[], bool]) -> None:
        _refuse(optimizer, what)
        self._optimizer, self._is_warm = optimizer, is_warm
        self._held: list[tuple[dict[str, Any], Parameter, Tensor]] = []
        self._scales: dict[Parameter, Tensor] = {}
        self._hooks = StepHooks(optimizer, self._before, self._after)

    def release(self) -> None:
        """Take the hooks off the optimizer."""
        self._hooks.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hold the momenta back from Adam."""
        if not self._is_warm():
            return
        pairs = [(group, one) for group in optimizer.param_groups for one in group["params"]]
        self._held = [(group, one, one.grad) for group, one in pairs if one.grad is not None]
        for _, one, _ in self._held:
            one.grad = None

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held, self._held = self._held, []
        for group, one, momentum in held:
            one.grad = momentum
            state = optimizer.state[one]
            if "exp_avg" not in state:
                continue
            if group.get("decoupled_weight_decay") or isinstance(optimizer, AdamW):
                one.mul_(1 - float(group["lr"]) * float(group["weight_decay"]))
            state["exp_avg"].copy_(momentum)
            one.addcdiv_(momentum, self._scale(group, one, state), value=-float(group["lr"]))

    def _scale(self, group: dict[str, Any], one: Parameter, state: dict[str, Any]) -> Tensor:
        """The denominator, frozen when it is first asked for."""
        if one not in self._scales:
            correction = 1 - float(group["betas"][1]) ** float(state["step"])
            v = state["exp_avg_sq"]
            scale = (v / correction).sqrt_().add_(float(group["eps"]))
            self._scales[one] = scale.masked_fill_(v == 0, torch.inf)
        return self._scales[one]


def _refuse(optimizer: Optimizer, what: momenta) -> None:
    """Only Adam has the momentum and the variance that are meant, and one beta1."""
    fits = type(optimizer) in (Adam, AdamW)
    betas = {group["betas"][0] for group in optimizer.param_groups} if fits else set()
    coupled = [
        one
        for one in optimizer.param_groups
        if one.get("weight_decay") and type(optimizer) is Adam and not one.get("decoupled_weight_decay")
    ]
    unusual = [key for key in ("amsgrad", "maximize") if any(one.get(key) for one in optimizer.param_groups)]
    if fits and betas == {what.beta} and not coupled and not unusual:
        return
    got = [type(optimizer).__name__, *(f"beta1={beta}" for beta in sorted(betas)), *unusual]
    raise ModelError(
        explain(
            f"{what} steps with Adam's momentum over Adam's variance",
            got=", ".join(got + ["weight_decay"] * bool(coupled)),
            expected=f"torch.optim.Adam without weight decay, or AdamW, with beta1={what.beta}, no amsgrad or maximize",
            to_type=f"optimizer = torch.optim.AdamW(model.parameters(), betas=({what.beta}, 0.999))",
        )
    )
