"""Tensors that another rank holds: shape and dtype without values, on which a model's own code runs all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only

from stretto.errors import ModelError, explain

READS = ("_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero", "masked_select", "unique")
"""Operations whose result depends on values, or whose result's shape does."""


class Operations(Protocol):
    """Record of the operations on remote tensors."""

    def note(self, sources: Sequence[RemoteTensor]) -> int:
        """Note an operation on these tensors, and return the label of its results."""
        ...


class RemoteTensor(Tensor):
    """Tensor without values. An operation on it returns another one; reading its values raises ModelError.

    `label` is a number that a record of `operations` has given it; 0 without one. `value` is the tensor itself once
    this rank has received it; functions use it from then on.
    """

    meta: Tensor
    place: torch.device
    value: Tensor | None
    label: int
    operations: Operations | None

    @staticmethod
    def __new__(
        cls, meta: Tensor, device: torch.device, label: int = 0, operations: Operations | None = None
    ) -> RemoteTensor:
        make: Callable[..., RemoteTensor] = Tensor._make_wrapper_subclass
        return make(cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device, requires_grad=False)

    def __init__(
        self, meta: Tensor, device: torch.device, label: int = 0, operations: Operations | None = None
    ) -> None:
        self.meta, self.place, self.label, self.operations = meta, device, label, operations
        self.value = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function with the values of the tensors that are here."""
        with torch._C.DisableTorchFunctionSubclass():
            given, options = tree_map_only(RemoteTensor, received, (args, kwargs or {}))
            return function(*given, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation on shapes."""
        name = operation.__name__.partition(".")[0]
        if name in READS:
            raise ModelError(_reads(name))
        if name.endswith("_") and not isinstance(args[0], RemoteTensor) and args[0].requires_grad:
            raise ModelError(_changes(name))
        sources: list[RemoteTensor] = []

        def shape_of(tensor: Tensor) -> Tensor:
            if isinstance(tensor, RemoteTensor):
                sources.append(tensor)
                return tensor.meta
            return tensor.to("meta")

        options = dict(kwargs or {})
        device: torch.device | None = options.get("device")
        if "device" in options:
            options["device"] = torch.device("meta")
        args, options = tree_map_only(Tensor, shape_of, (args, options))
        found = operation(*args, **options)
        record = next((one.operations for one in sources if one.operations is not None), None)
        label = record.note(sources) if record is not None else 0
        place = device or next(one.device for one in sources)
        return tree_map_only(Tensor, lambda tensor: RemoteTensor(tensor, place, label, record), found)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RemoteTensor({tuple(self.shape)}, {self.dtype})"


def received(tensor: RemoteTensor) -> Tensor:
    """Return the tensor itself if it is here."""
    return tensor if tensor.value is None else tensor.value


def remote(tensor: Tensor, label: int = 0, operations: Operations | None = None) -> RemoteTensor:
    """Return a remote tensor of the shape and dtype of a tensor."""
    if isinstance(tensor, RemoteTensor):
        return RemoteTensor(tensor.meta, tensor.place, label, operations)
    return RemoteTensor(torch.empty_like(tensor, device="meta").detach(), tensor.device, label, operations)


def repeated(found: Any) -> Any:
    """Return new remote tensors in place of those in what a module has returned before for such shapes."""
    return remote(found) if isinstance(found, RemoteTensor) else tree_map_only(RemoteTensor, remote, found)


def seen(found: Any) -> Any:
    """Return what a module has returned, whose tensors are seen from now on, also in dataclasses.

    Raises ModelError for tensors in objects of other classes.
    """
    for one in tree_leaves(found):
        if is_dataclass(one) and not isinstance(one, type):
            _see_into(type(one))
            seen(one)
        elif not isinstance(one, Tensor) and any(
            isinstance(held, Tensor) for held in getattr(one, "__dict__", {}).values()
        ):
            raise ModelError(_unseen(type(one).__name__))
    return found


def _see_into(kind: type) -> None:
    names = [one.name for one in fields(kind)]

    def flatten(one: Any) -> tuple[list[Any], None]:
        return [getattr(one, name) for name in names], None

    def unflatten(values: Iterable[Any], _: None) -> Any:
        one: Any = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(one, name, value)
        return one

    register_pytree_node(kind, flatten, unflatten)


def _unseen(name: str) -> str:
    return explain(
        "a module returns tensors that cannot be seen, so they are not sent to another stage",
        got=f"an object of the class {name} that holds tensors",
        expected="tensors, or tuples, lists, dicts, named tuples and dataclasses of them",
        to_type=f"@dataclass before the class {name}",
    )


def kind_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and the dtype of a tensor."""
    known = tensor.meta if isinstance(tensor, RemoteTensor) else tensor  # reading those of a subclass is slow
    return known.shape, known.dtype


def leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call, and what they contain."""
    if not kwargs and all(isinstance(one, Tensor) for one in args):  # the usual call, without a walk over containers
        return list(args)
    return tree_leaves((args, kwargs))


def mapped(kind: type[Tensor], change: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
    """Return the arguments of a call with each tensor of this kind changed."""
    if not kwargs and all(isinstance(one, Tensor) for one in args):
        return tuple(change(one) if isinstance(one, kind) else one for one in args), kwargs
    return tree_map_only(kind, change, (args, kwargs))


def _changes(operation: str) -> str:
    return explain(
        "the model's forward pass changes a tensor in place between its modules, by the result of another stage",
        got=f"the operation {operation}, as of `h += block(h)`",
        expected="operations that return a new tensor",
        to_type="h = h + block(h)",
    )


def _reads(operation: str) -> str:
    return explain(
        "the model's forward pass reads the values of activations, which only one stage of a pipeline has",
        got=f"the operation {operation}, as of `if h.sum() > 0`, `float(h)` or `h[h > 0]`",
        expected="operations whose shapes do not depend on values, such as torch.where",
        to_type='--layout "whole()", or torch.where(condition, a, b)',
    )
