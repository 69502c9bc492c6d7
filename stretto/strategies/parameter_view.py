"""A parameter as exchanges see it: the local tensor whose elements are exchanged, and its place in a flat buffer.

The memory of a plain parameter is replaced, so that it is a view of the buffer. Parameters that another library owns,
such as the shards of a DTensor, keep their memory: their values are copied from and to their local tensor. They have a
method `to_local`, which returns that tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from stretto.errors import ModelError, explain

_elsewhere = WeakIdKeyDictionary()
"""Parameters and buffers whose values another rank of the replica holds."""


def hold_elsewhere(tensor: Tensor) -> None:
    """Note that another rank of the replica holds the values of a parameter or buffer."""
    _elsewhere[tensor] = True


def hold_here(tensor: Tensor) -> None:
    """Note that this rank holds the values of a parameter or buffer."""
    _elsewhere.pop(tensor, None)  # type: ignore[no-untyped-call]


def without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and dtype that has the memory of one number: NaN, or 0 for integers."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


def is_held(tensor: Tensor) -> bool:
    """Return False if another rank of the replica holds the values of a parameter or buffer."""
    return tensor not in _elsewhere


_own_shards = WeakIdKeyDictionary()
"""Parameters that a layout has divided among the ranks of the replica."""


def note_own_shard(parameter: Parameter) -> None:
    """Note that a layout has divided a parameter among the ranks of the replica."""
    _own_shards[parameter] = True


def refuse_foreign_shards(model: nn.Module) -> None:
    """Raise ModelError if the script itself has divided a parameter: workers cannot tell whose part they hold."""
    for name, one in model.named_parameters():
        if hasattr(one, "device_mesh") and one not in _own_shards:
            raise ModelError(
                explain(
                    "the parameters are sharded already",
                    got=f"{name}, a {type(one.data).__name__} over {one.device_mesh.size()} processes",
                    expected="the plain model, which the layout sharded() divides among the processes of a worker",
                    to_type='stretto.distribute(model, ...) before fully_shard, and --layout "sharded(over=2)"',
                )
            )


def local(tensor: Tensor) -> Tensor:
    """Return the tensor that this process holds of a tensor: its shard where another library owns it, else itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def like_parameter(parameter: Tensor, value: Tensor) -> Tensor:
    """Return an entry of an optimizer's state, given its local tensor, as the optimizer keeps it of this parameter."""
    if not hasattr(parameter, "to_local") or hasattr(value, "to_local"):
        return value
    if not value.dim() or value.shape != local(parameter.detach()).shape:
        return value
    entry = torch.zeros_like(parameter.detach(), dtype=value.dtype)
    local(entry).copy_(value)
    return entry


def parameter_view(parameter: Parameter) -> ParameterView:
    """Return the view of a parameter: by copy if another library owns its memory."""
    return CopiedParameter(parameter) if hasattr(parameter, "to_local") else ParameterView(parameter)


class ParameterView:
    """A parameter that becomes a view of a flat buffer, and whose gradient becomes a view of a bucket."""

    copies = False
    """True if values have to be copied from and to the buffer, where `place` has no effect."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter

    @property
    def local(self) -> Tensor:
        """Tensor of this process whose elements are exchanged, without its history of gradients."""
        return self.parameter.detach()

    def place(self, view: Tensor) -> None:
        """Make the parameter this view of a flat buffer."""
        self.parameter.data = view

    def is_at(self, view: Tensor) -> bool:
        """Return True if the parameter is still in place: a script may have moved its model."""
        return self.parameter.data_ptr() == view.data_ptr() and self.parameter.dtype == view.dtype

    @property
    def gradient(self) -> Tensor | None:
        """Gradient of the local tensor, without its history."""
        grad = self.parameter.grad
        return grad.detach() if grad is not None and grad.requires_grad else grad

    def place_gradient(self, view: Tensor) -> None:
        """Make the gradient this view of a bucket."""
        self.parameter.grad = view


class CopiedParameter(ParameterView):
    """A parameter whose memory belongs to another library: values are copied from and to its local tensor."""

    copies = True

    @property
    def local(self) -> Tensor:
        return local(self.parameter.detach())

    def place(self, view: Tensor) -> None:
        """Leave the parameter where it is."""

    def is_at(self, view: Tensor) -> bool:
        own = self.local
        return (own.shape, own.dtype, own.device) == (view.shape, view.dtype, view.device)

    @property
    def gradient(self) -> Tensor | None:
        grad = self.parameter.grad
        if grad is None:
            return None
        if getattr(grad, "placements", None) != getattr(self.parameter, "placements", None):
            raise ModelError(_placed_otherwise(self.parameter, grad))
        return local(grad.detach())

    @torch.no_grad()
    def place_gradient(self, view: Tensor) -> None:
        """Copy the values of this view of a bucket into the gradient."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        local(self.parameter.grad).copy_(view)


def _placed_otherwise(parameter: Parameter, grad: Tensor) -> str:
    return explain(
        "the gradient of a distributed parameter is not placed as the parameter is, so its elements are not its own",
        got=f"a gradient with placements {getattr(grad, 'placements', None)}",
        expected=f"placements {getattr(parameter, 'placements', None)}, as of the parameter",
        to_type="torch.distributed.fsdp.fully_shard(model), which reduces the gradients of its shards",
    )
