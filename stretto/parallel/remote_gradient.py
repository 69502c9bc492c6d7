"""Gradients that other stages hold: their 2-norms, so that a script can clip the gradients of all its parameters.

`clip_grad_norm_`, norms that a loop computes itself and `GradScaler` look at all gradients of the model, or at some. A
rank has those of its own stage; in place of others each parameter has a `RemoteGradient` after a backward pass. It is
removed while an optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stretto.errors import ModelError, explain
from stretto.parallel.link import Link
from stretto.parallel.remote_parameter import SHAPES
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.parameter_view import is_held

NORMS = {"norm", "vector_norm", "linalg_vector_norm", "_foreach_norm"}
SQUARES = {"pow", "__pow__", "square", "_foreach_pow"}
CHECKS = {"isfinite", "isnan", "isinf"}
ALIASES = {"detach", "to", "float", "double"}


class RemoteGradient(Tensor):
    """Gradient that another stage holds, of which this one knows the 2-norm: a scalar, NaN if it is not known."""

    length: Tensor

    @classmethod
    def of(cls, parameter: Tensor, length: Tensor) -> RemoteGradient:
        """Return the gradient of a parameter, without memory of its own."""
        found = length.expand(parameter.shape).as_subclass(cls)
        found.length = length
        return found

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of gradients with the norm in place of the gradient; raise ModelError for other functions."""
        name, options = function.__name__, dict(kwargs or {})
        is_property = type(function).__name__ == "method-wrapper"
        is_in_place = name.endswith("_") and not name.endswith("__")
        if name in ALIASES or (is_property and function == Tensor.data.__get__):  # type: ignore[attr-defined]
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if is_property or name in SHAPES or name.endswith("_like"):
                return function(*args, **options)
            if is_in_place and isinstance(args[0], cls) and any(_is_large(one) for one in args[1:]):
                args[0].length.fill_(float("nan"))  # its stage adds to the gradient itself
                return args[0]
            if not (is_in_place or name in CHECKS or (name in NORMS | SQUARES and _is_of_two(name, args, options))):
                raise ModelError(_other_use(name))
            found = function(*_lengths(args), **{key: _lengths(one) for key, one in options.items()})
            return args[0] if is_in_place else found


class GradientNorm:
    """The gradients of other stages at one rank. At all ranks `follow` is called in each backward pass."""

    def __init__(self, optimizers: Optimizers, link: Link) -> None:
        self._optimizers, self._link = optimizers, link
        self._trained: list[nn.Parameter] = []
        self._is_queued = False
        self._aside: list[tuple[nn.Parameter, Tensor | None]] = []
        """Gradients that are removed during a step."""
        self._ends: dict[Any, RemovableHandle] = {}
        """The last hook after a step, by optimizer."""
        self._starts = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def start(self, model: nn.Module) -> None:
        """Note the parameters of the model, once it is split: that may be within a step, in its closure."""
        given = {id(one) for one in self._optimizers.parameters}
        self._trained = [one for one in model.parameters() if id(one) in given]

    def close(self) -> None:
        """Leave the steps of the optimizers as they would be without this."""
        for hook in (*self._starts, *self._ends.values()):
            hook.remove()
        self._ends.clear()

    def follow(self) -> None:
        """Give parameters of other stages gradients at the end of the backward pass, after exchanges."""
        if not self._is_queued:
            self._is_queued = True
            _at_end(lambda: _at_end(self._set))

    def _set(self) -> None:
        self._is_queued = False
        own = {place: one.grad for place, one in enumerate(self._trained) if is_held(one) and one.grad is not None}
        lengths = torch.zeros(len(self._trained), dtype=torch.float64, device="cpu")
        if own:
            norms = [torch.linalg.vector_norm(one, dtype=_wide(one)).double() for one in map(_numbers, own.values())]
            lengths[[*own]] = torch.stack(norms).cpu()
        total = self._link.sum(lengths)
        kinds = {(one.device, one.dtype) for one in self._trained}
        moved = {kind: total.to(*kind) for kind in kinds}
        for place, one in enumerate(self._trained):
            if not is_held(one) and one.requires_grad:
                one.grad = RemoteGradient.of(one, moved[one.device, one.dtype][place])

    def _before_step(self, stepped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Remove the gradients, also those of the closure's backward pass, up to the end of all hooks of the step."""
        self._set_aside()
        if stepped in self._ends:
            self._ends[stepped].remove()
        self._ends[stepped] = stepped.register_step_post_hook(self._after_step)
        (optimizer, *rest), options = args, dict(kwargs)
        if rest and rest[0] is not None:
            rest[0] = self._then_aside(rest[0])
        elif options.get("closure") is not None:
            options["closure"] = self._then_aside(options["closure"])
        return (optimizer, *rest), options

    def _then_aside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            found = closure()
            self._set_aside()
            return found

        return call

    def _set_aside(self) -> None:
        self._aside = [(one, one.grad) for one in self._trained if not is_held(one)]
        for one, _ in self._aside:
            one.grad = None

    def _after_step(self, *_: Any) -> None:
        """Put the gradients back: a parameter has its gradient until the script removes it."""
        for one, grad in self._aside:
            one.grad = grad


def _numbers(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient; of a sparse one those of its rows."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _is_large(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.dim() > 0


def _is_of_two(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return True for the 2-norm or the square of a whole tensor."""
    given = [*args[1:], *(options[key] for key in ("p", "ord", "exponent") if key in options)]
    return given in ([2], ["fro"]) or (not given and name not in ("pow", "__pow__"))


def _lengths(arguments: Any) -> Any:
    """Return arguments with norms in place of gradients."""
    if isinstance(arguments, RemoteGradient):
        return arguments.length
    return [_lengths(one) for one in arguments] if isinstance(arguments, list | tuple) else arguments


def _other_use(name: str) -> str:
    return explain(
        "the gradient of a parameter is at another stage of the pipeline, and only its 2-norm is known here",
        got=f"{name} of a gradient, or another norm than the 2-norm",
        expected="clip_grad_norm_ with the 2-norm, over all parameters or some; clip_grad_value_; GradScaler",
        to_type='clip_grad_norm_(model.parameters(), most), or --layout "whole()"',
    )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _at_end(act: Any) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(act)
