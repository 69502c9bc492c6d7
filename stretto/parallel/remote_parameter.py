"""Parameters of other stages: they have a shape and no values, and a script that reads them gets an error.

A script that changes values in place (`layer.reset_parameters()`, `weight.clamp_(-1, 1)`) changes them at their stage.
The model's own forward pass may use them (`within_pass`): what it computes of them goes to a module of their stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import ModelError, explain
from stretto.parallel.remote import RemoteTensor
from stretto.strategies.parameter_view import hold_elsewhere, hold_here, without_memory

_is_within: ContextVar[bool] = ContextVar("is_within", default=False)
SHAPES = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "storage_offset",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_same_size",
    "is_inference",
    "get_device",
    "__len__",
    "data_ptr",
    "untyped_storage",
    "requires_grad_",
    "retain_grad",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "_has_compatible_shallow_copy_type",
    "grad",
    "backward",
    *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")),
    *(f"new_{kind}" for kind in ("empty", "zeros", "ones", "full", "tensor")),
}
"""Functions that read no values."""
ALIASES = {
    *("detach", "to", "cpu", "cuda", "half", "bfloat16", "float", "double"),
    *("__getitem__", "select", "narrow", "t", "transpose", "permute", "view", "view_as", "squeeze", "unsqueeze"),
}
"""Functions that return the values, or some, in another type, place or shape."""
RANDOM = {
    *("uniform_", "normal_", "kaiming_uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_"),
    *("geometric_", "random_"),
}
"""Functions that set random values."""
OPERATORS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
"""Operators that change values in place."""
_GRAD = vars(torch._C.TensorBase)["grad"]


class RemoteValues(Tensor):
    """Tensor of values that another stage holds."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call functions that read no values; raise ModelError for others."""
        if any(issubclass(one, RemoteTensor) for one in types):
            return NotImplemented
        name = function.__name__
        is_property = type(function).__name__ == "method-wrapper"
        if name == "copy_" and isinstance(args[0], _KINDS):
            return args[0]  # of a whole state, each stage loads its own part
        kwargs = dict(kwargs or {})
        target = args[0] if args and "out" not in kwargs else kwargs.get("out", kwargs.get("tensor"))
        if isinstance(target, _KINDS) and ("out" in kwargs or _is_in_place(name)) and not _is_within.get():
            return _drawn(function, target, args, kwargs) if name in RANDOM else target
        if name == "__repr__":
            return f"{tuple(args[0].shape)}, values of another stage"
        reads = not (is_property or name in SHAPES or name in ALIASES or _is_within.get())
        if reads:
            raise ModelError(_read(function, next(one for one in _all(args, kwargs) if isinstance(one, _KINDS))))
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **kwargs)
        is_view = is_property and isinstance(found, Tensor) and function.__self__ is not _GRAD
        is_alias = name in ALIASES or is_view
        return found.as_subclass(RemoteValues) if is_alias and not _is_within.get() else found


class RemoteParameter(nn.Parameter):
    """Parameter that another stage holds."""

    __torch_function__ = RemoteValues.__torch_function__


_KINDS = (RemoteValues, RemoteParameter)


def let_go(parameter: nn.Parameter) -> None:
    """Give up the memory of a parameter, whose values another stage holds."""
    parameter.data = without_memory(parameter, parameter.device)
    hold_elsewhere(parameter)
    if type(parameter) is nn.Parameter:
        parameter.__class__ = RemoteParameter


def take(parameter: nn.Parameter) -> None:
    """Note that this stage holds the values of a parameter."""
    hold_here(parameter)
    if type(parameter) is RemoteParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


@contextmanager
def within_pass() -> Iterator[None]:
    """Let the model's forward pass use parameters of other stages within."""
    token = _is_within.set(True)
    try:
        yield
    finally:
        _is_within.reset(token)


def _is_in_place(name: str) -> bool:
    """Return True for functions that change the values of their first argument."""
    return name in OPERATORS or (name[-1] == "_" != name[-2] and name not in SHAPES)


def _drawn(function: Any, target: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the random numbers that the stage of a tensor sets: all stages draw them from the script's generator."""
    drawn = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    with torch._C.DisableTorchFunctionSubclass():
        return function(drawn, *args[1:], **kwargs) if args else function(**{**kwargs, "tensor": drawn})


def _all(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Iterator[Any]:
    """Yield all tensors among arguments, and those in their lists."""
    for one in (*args, *(kwargs or {}).values()):
        yield from _all(one, None) if isinstance(one, list | tuple) else (one,)


def _read(function: Any, tensor: Tensor) -> str:
    return explain(
        "the values of a parameter are at another stage of the pipeline, and the script reads them here",
        got=f"{function.__name__} of a parameter of shape {tuple(tensor.shape)}, as in an average of the model, a copy "
        "of it, or a penalty in the loss",
        expected="whole values from model.state_dict(), at all processes of a worker; weight_decay= for penalties",
        to_type='model.state_dict() between two epochs, or --layout "whole()"',
    )
