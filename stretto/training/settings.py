"""The state besides parameters and optimizers that a worker's steps change, for checkpoints and workers that join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler

from stretto.errors import ModelError, explain
from stretto.strategies.optimizers import Optimizers
from stretto.training.schedule import Schedules
from stretto.training.schedulers import schedulers_of

Plain = dict[str, Any]


class Settings:
    """State besides the parameters that a step changes: optimizer settings, schedulers and gradient scalers.

    `scalers` returns the script's gradient scalers. `schedules` holds the schedulers' position.
    """

    def __init__(
        self, optimizers: Optimizers, scalers: Callable[[], list[GradScaler]], schedules: Schedules | None = None
    ) -> None:
        self._schedules = schedules
        self._optimizers, self._find = optimizers, scalers
        self._scalers: list[GradScaler] = []

    def state(self) -> list[list[Plain]]:
        """Return the plain values of the optimizer's groups, the schedulers and the scalers."""
        positions = [self._schedules.state()] if self._schedules is not None else []
        return [[_plain(settings) for settings in kind] for kind in self._kinds()] + [positions]

    def take(self, state: list[list[Plain]]) -> None:
        """Adopt the state of another worker."""
        groups, schedulers, scalers, *rest = state
        for position in rest[0] if rest else ():
            if self._schedules is not None:
                self._schedules.take(position)
        own = self._kinds()
        if len(groups) != len(own[0]):
            raise ModelError(
                explain(
                    "the optimizers of the workers have other parameter groups",
                    got=f"{len(own[0])} groups here, {len(groups)} at another worker",
                    expected="the same groups at all workers",
                    to_type="add parameter groups between two epochs, on every worker",
                )
            )
        for setting, plain in [*zip(own[0], groups, strict=True), *zip(own[1], schedulers, strict=False)]:
            _take(setting, plain)
        for scaler, plain in zip(self._scalers, scalers, strict=False):
            scaler.load_state_dict(plain)

    def _kinds(self) -> list[list[Plain]]:
        schedulers = [vars(scheduler) for optimizer in self._optimizers.all for scheduler in schedulers_of(optimizer)]
        return [self._optimizers.param_groups, schedulers, self._scaler_states()]

    def _scaler_states(self) -> list[Plain]:
        self._scalers = [scaler for scaler in self._find() if scaler.is_enabled()]
        return [scaler.state_dict() for scaler in self._scalers]


def _plain(settings: dict[str, Any]) -> Plain:
    return {name: value for name, value in settings.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, int | float | str | bool | None)


def _take(settings: dict[str, Any], received: Plain) -> None:
    for name, value in received.items():
        settings[name] = tuple(value) if isinstance(settings.get(name), tuple) else value
