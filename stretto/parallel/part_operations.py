"""Operations of a script on parts of tensors that have other results than on whole tensors, and no error."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

_ATEN = torch.ops.aten
_RANDOM = (
    *(getattr(_ATEN, name).default for name in ("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_")),
    *(getattr(_ATEN, name).default for name in ("geometric_", "random_", "rand_like", "randn_like", "randint_like")),
    *(_ATEN.bernoulli_.float, _ATEN.random_.to, getattr(_ATEN.random_, "from"), _ATEN.randint_like.low_dtype),
)
"""Operations whose results are random numbers and nothing else."""


def act_as_whole() -> None:
    """Let operations on parts have the results of whole tensors.

    - A number that a script reads, as by `parameter.norm().item()`, is that of all parts.
    - Random numbers, as of `layer.reset_parameters()`, are those of the whole tensor: torch would draw the same ones
      for the part of each rank.
    - A row (`weight[3].zero_()`) is changed in place; torch would change a copy.
    - A whole tensor that is copied to a parameter (`weight.copy_(table)`) is divided.
    """
    handlers: Any = (
        DTensor._op_dispatcher._custom_op_handlers
    )  # as torch.distributed.tensor.parallel.loss_parallel does
    handlers[_ATEN._local_scalar_dense.default] = _read
    handlers[_ATEN.select.int] = _select
    handlers[_ATEN.copy_.default] = _copy
    handlers.update(dict.fromkeys(_RANDOM, _draw))


@torch.no_grad()
def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all ranks if they have parts."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _read(op_call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return op_call(whole_tensor(args[0]), **kwargs)


def _draw(op_call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    tensor, *rest = args
    drawn = op_call(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *rest, **kwargs)
    found = _part(drawn, tensor)
    if not op_call._schema.is_mutable:
        return found
    tensor.to_local().copy_(found.to_local())
    return tensor


def _select(op_call: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
    tensor, index = args[0], args[2]
    dim = args[1] % tensor.dim()
    mesh, own, size = tensor.device_mesh, tensor.to_local(), tensor.shape[dim]
    (placement,) = tensor.placements
    if not isinstance(placement, Shard) or placement.dim != dim:
        shape = torch.empty(tensor.shape, device="meta").select(dim, index).shape
        stride = torch.empty(shape, device="meta").stride()
        if isinstance(placement, Shard) and placement.dim > dim:
            placement = Shard(placement.dim - 1)
        return DTensor.from_local(op_call(own, dim, index), mesh, [placement], shape=shape, stride=stride)
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")
    holder, place = divmod(index % size, -(-size // mesh.size()))
    is_held = holder == mesh.get_local_rank()
    found = op_call(own, dim, place) if is_held else own.new_empty(own.shape[:dim] + own.shape[dim + 1 :])
    dist.broadcast(found.contiguous() if is_held else found, group=mesh.get_group(), group_src=holder)
    return DTensor.from_local(found, mesh, [Replicate()], run_check=False)


def _copy(_op_call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    tensor, source = args[0], args[1]
    source = source if isinstance(source, DTensor) else source.expand(tensor.shape)
    tensor.to_local().copy_(_part(source, tensor).to_local(), **kwargs)
    return tensor


def _part(tensor: Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of a tensor, divided like another one."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(like.device_mesh, like.placements)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
