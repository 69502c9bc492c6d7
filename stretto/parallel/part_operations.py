"""Operations of a script on parts of tensors that have other results than on whole tensors, and no error."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

_ATEN = torch.ops.aten
_RANDOM = (
    *(getattr(_ATEN, name).default for name in ("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_")),
    *(getattr(_ATEN, name).default for name in ("geometric_", "random_", "rand_like", "randn_like", "randint_like")),
    *(_ATEN.bernoulli_.float, _ATEN.random_.to, getattr(_ATEN.random_, "from"), _ATEN.randint_like.low_dtype),
)
"""Operations whose results are random numbers and nothing else."""
_FROM_VALUES = (_ATEN.bernoulli.default, _ATEN.normal.Tensor_float, _ATEN.eye.m_out)
"""Operations whose results depend on the place of each number in the whole tensor."""
_DIMS = {
    _ATEN.select.int: 1,
    _ATEN.slice.Tensor: 1,
    _ATEN.split.Tensor: 2,
    _ATEN.split_with_sizes.default: 2,
    _ATEN.unbind.int: 1,
    _ATEN.diagonal.default: None,
}
"""Views by the place of the dimension among their arguments (0 if it is left out); torch copies divided dimensions."""


def act_as_whole() -> None:
    """Let operations on parts have the results of whole tensors.

    - A number that a script reads, as by `parameter.norm().item()`, is that of all parts.
    - Random numbers, as of `layer.reset_parameters()`, are those of the whole tensor: torch would draw the same ones
      for the part of each rank.
    - A row (`weight[3].zero_()`), rows (`weight[1:3].zero_()`) or a diagonal are changed in place; torch would change
      a copy.
    - A whole tensor that is copied to a parameter (`weight.copy_(table)`) is divided.
    """
    handlers: Any = (
        DTensor._op_dispatcher._custom_op_handlers
    )  # as torch.distributed.tensor.parallel.loss_parallel does
    handlers[_ATEN._local_scalar_dense.default] = _read
    handlers[_ATEN.copy_.default] = _copy
    handlers[_ATEN.fill_.Tensor] = _fill
    handlers.update(dict.fromkeys(_RANDOM, _draw))
    handlers.update(dict.fromkeys(_FROM_VALUES, _from_values))
    handlers.update(dict.fromkeys(_DIMS, _view))


@torch.no_grad()
def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all ranks if they have parts."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _read(op_call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return op_call(whole_tensor(args[0]), **kwargs)


def _draw(op_call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    tensor, *rest = args
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    drawn = op_call(like, *rest, **kwargs)
    found = _part(drawn, tensor)
    if not op_call._schema.is_mutable:
        return found
    tensor.to_local().copy_(found.to_local())
    return tensor


class _WholeView(DTensor):
    """A view of a whole tensor, which is gathered before each operation, and changed in the parts after it."""

    _source: DTensor
    _whole: Tensor

    @classmethod
    def of(cls, source: DTensor, whole: Tensor, view: Tensor) -> _WholeView:
        """Return a view of the whole copy of a tensor in parts."""
        found = DTensor.from_local(view, source.device_mesh, [Replicate()], run_check=False)
        made = cls(found.to_local(), found._spec, requires_grad=False)
        made._source, made._whole = source, whole
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        views = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        for view in views:
            view._whole.copy_(whole_tensor(view._source))
        found = super().__torch_dispatch__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func._schema.is_mutable:
            for view in tree_leaves((args[0], (kwargs or {}).get("out"))):
                if isinstance(view, cls):
                    view._change_parts()
        return tree_map(partial(_viewed, views), found)

    def _change_parts(self) -> None:
        """Copy this view's numbers, and no others, to the parts that hold them."""
        view, own = self._local_tensor, self._source.to_local()
        is_seen = torch.zeros_like(self._whole, dtype=torch.bool)
        is_seen.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        seen = _part(is_seen, self._source).to_local()
        own.copy_(torch.where(seen, _part(self._whole, self._source).to_local(), own))


def _viewed(views: list[_WholeView], found: Any) -> Any:
    """Return a result as the view that it is, or as a view of the same tensor if it shares its memory."""
    if not isinstance(found, DTensor):
        return found
    local = found.to_local()
    for view in views:
        if local is view._local_tensor:
            return view
        if local.untyped_storage().data_ptr() == view._whole.untyped_storage().data_ptr():
            return _WholeView.of(view._source, view._whole, local)
    return found


def _view(op_call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    tensor, *rest = args
    place, (placement,) = _DIMS[op_call], tensor.placements
    if isinstance(placement, Shard):
        dim = (args[place] if place is not None and len(args) > place else 0) % tensor.dim()
        if place is None or dim == placement.dim:
            if op_call is _ATEN.select.int:
                return _row(tensor, dim, args[2])
            whole = whole_tensor(tensor)
            return tree_map(partial(_WholeView.of, tensor, whole), op_call(whole, *rest, **kwargs))
        if op_call in (_ATEN.select.int, _ATEN.unbind.int) and placement.dim > dim:
            placement = Shard(placement.dim - 1)
    return tree_map(
        lambda part, whole: DTensor.from_local(
            part, tensor.device_mesh, [placement], shape=whole.shape, stride=whole.stride()
        ),
        op_call(tensor.to_local(), *rest, **kwargs),
        op_call(torch.empty(tensor.shape, device="meta"), *rest, **kwargs),
    )


def _row(tensor: DTensor, dim: int, index: int) -> DTensor:
    """Return a row of a divided dimension: a view at the rank that holds it, and copies at the others."""
    mesh, own, size = tensor.device_mesh, tensor.to_local(), tensor.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")
    holder, place = divmod(index % size, -(-size // mesh.size()))
    is_held = holder == mesh.get_local_rank()
    found = own.select(dim, place) if is_held else own.new_empty(own.shape[:dim] + own.shape[dim + 1 :])
    dist.broadcast(found.contiguous() if is_held else found, group=mesh.get_group(), group_src=holder)
    return DTensor.from_local(found, mesh, [Replicate()], run_check=False)


def _fill(_op_call: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
    args[0].to_local().fill_(whole_tensor(args[1]))
    return args[0]


def _from_values(op_call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    out = kwargs.get("out")
    if out is None:
        (tensor, *rest) = args
        return _part(op_call(whole_tensor(tensor), *rest, **kwargs), tensor)
    whole = op_call(*args, **{**kwargs, "out": torch.empty(out.shape, dtype=out.dtype, device=out.device)})
    out.to_local().copy_(_part(whole, out).to_local())
    return out


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
