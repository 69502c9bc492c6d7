"""Running the script's `evaluate` on the agreed model, without leaving a trace in the training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.errors import EvaluateError, explain
from stretto.runtime.device_random import device_states, set_device_states
from stretto.runtime.kept_modules import kept_modules
from stretto.strategies.model_sync import given

Metrics = dict[str, float]
Evaluate = Callable[[Any], Mapping[str, float]]


class Predictions:
    """Notes what a model predicts while it is called: the index of the largest output, for each held-out case."""

    def __init__(self) -> None:
        self._seen: list[NDArray[np.int32]] = []

    def note(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook."""
        scores = _first_floating(output)
        if scores is not None and scores.dim() >= 2 and scores.shape[1 if scores.dim() > 3 else -1] > 1:
            best = scores.detach().argmax(1 if scores.dim() > 3 else -1)
            self._seen.append(best.reshape(-1).to("cpu", torch.int32).numpy())

    def all(self) -> NDArray[np.int32] | None:
        """The predictions in order; None when the model gives no scores of classes."""
        return np.concatenate(self._seen) if self._seen else None


def _first_floating(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return next((found for one in parts if (found := _first_floating(one)) is not None), None)


def run(evaluate: Evaluate, model: nn.Module) -> tuple[Metrics, NDArray[np.int32] | None]:
    """Call the script's function; return its metrics and the predictions of the model. Raises EvaluateError."""
    predictions = Predictions()
    takes_hooks = not isinstance(model, torch.jit.ScriptModule)
    hook = model.register_forward_hook(predictions.note) if takes_hooks else nullcontext()
    try:
        with hook, _untouched(model):
            found = evaluate(given(model))
    except Exception as error:
        problem = f"evaluate raised {type(error).__name__}: {error}"
        raise EvaluateError(
            explain(problem, got="an exception", expected="a dict of numbers", to_type="see the traceback above")
        ) from error
    return _numbers(found), predictions.all()


def _numbers(found: object) -> Metrics:
    if isinstance(found, Mapping) and found:
        named = {str(name): _number(value) for name, value in found.items()}
        if all(value is not None for value in named.values()):
            return {name: value for name, value in named.items() if value is not None}
    raise EvaluateError(
        explain(
            "evaluate did not return numbers",
            got=f"{found!r:.200}",
            expected="a dict of numbers with at least one entry",
            to_type='return {"test_accuracy": correct / total}',
        )
    )


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Modes and buffers of the modules and the random states are after it what they were before it."""
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    of_devices = device_states()
    try:
        with kept_modules(model):
            yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        set_device_states(of_devices)
