"""A second device without a GPU: the tensors of device `far:0` hold memory of the CPU, and refuse to meet CPU tensors.

Importing this module registers the device in this process, for which torch has one free name, so only child processes
of the tests import it. Its tensors are plain tensors of torch: a DLPack capsule carries memory from one device to the
other. Each operation of the device runs on the CPU's view of the same memory, so its bits are those of the CPU. As
with a GPU, backward passes run in a thread of the device, and random numbers come from a generator of the device.

Storage of its own can't be allocated without C++, so `torch.load` needs `map_location="cpu"`.

`HOST_READS` counts the reads of the host, for which a program waits until a GPU has computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "far"
CPU_KIND, FAR_KIND = 1, 12
"""Numbers of the devices in DLPack: kDLCPU and kDLExtDev."""
COPIES = {"aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize"}
"""Operations that may take tensors of both devices."""
VIEWS = {"aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::set_"}
"""Operations that change the shape of a tensor alone, whose kernels for the CPU suit any device."""
HALVED = ("aten::linear", "aten::addmm", "aten::mm", "aten::matmul")
"""Operations that autocast runs in the lower precision."""
HOST_READS: Counter[str] = Counter()
"""Number of reads by the host, by operation."""

GARBAGE = -12345.0
"""Value of numbers on their way to the host without a wait, until an event after the copy was waited for."""

_late: list[tuple[Tensor, Tensor]] = []
"""Copies to the host that have not ended: targets and values."""
_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_capsule.restype, _capsule.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_below = DispatchKeySet(DispatchKey.CPU)


class FarStream:
    """The only stream of the device, also as an event in it."""

    def wait_stream(self, other: FarStream) -> None:
        """Do nothing: there is one stream."""

    def record_event(self) -> FarStream:
        """Return an event after all copies so far."""
        return self

    def synchronize(self) -> None:
        """Wait for all copies so far."""
        while _late:
            target, values = _late.pop(0)
            target.copy_(values)


class FarModule(_DummyBackendModule):
    """The module `torch.far`, with the random state of the device."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self._stream = FarStream()
        self.used: list[str] = []
        """Devices that were made the current one."""

    def set_device(self, device: Any) -> None:
        """Make a device the current one."""
        self.used.append(str(device))

    def current_stream(self, device: Any = NAME) -> FarStream:
        """Return the stream of the device."""
        return self._stream

    device = contextlib.nullcontext
    """Context in which a device is the current one."""

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the device."""
        self.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        """Return the random state of the device."""
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        """Set the random state of the device."""
        self.generator.set_state(state)

    def get_rng_state_all(self) -> list[Tensor]:
        """Return the random states of all devices."""
        return [self.get_rng_state()]

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        """Set the random states of all devices."""
        self.set_rng_state(states[0])

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of autocast."""
        return [torch.bfloat16, torch.float16]


def as_device(tensor: Tensor, kind: int) -> Tensor:
    """Return the same memory as a tensor of the other device."""
    capsule = torch._C._to_dlpack(tensor)
    device = ctypes.c_int32.from_address(_capsule(capsule, b"dltensor") + 8)
    device.value = kind
    return torch._C._from_dlpack(capsule)


def is_far(value: Any) -> bool:
    """Return True for a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == NAME


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of the device on the memory of the CPU."""
    name = func._schema.name
    if name in VIEWS:
        return func.redispatch(_below, *args, **kwargs)
    args = _with_tensors(func, args)
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if name in COPIES:
        return _copy(name, *args)
    if name == "aten::resize_":
        return _resize(*args)
    _refuse_crossing(func, tensors, _written(func, args, kwargs))
    _count(name)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if any(argument.name == "generator" for argument in func._schema.arguments):
        kwargs["generator"] = kwargs.get("generator") or torch.far.generator  # type: ignore[attr-defined]
    own = {id(one): one for one in tensors}
    near = {key: _near(one) for key, one in own.items()}
    back = {id(one): own[key] for key, one in near.items()}
    near_args, near_kwargs = tree_map(lambda one: near[id(one)] if isinstance(one, Tensor) else one, (args, kwargs))
    out = func(*near_args, **near_kwargs)
    for key, one in near.items():
        if one.shape != own[key].shape:
            _replace(own[key], one)
    return tree_map(lambda one: _back(one, back) if isinstance(one, Tensor) else one, out)


def _with_tensors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments, with tensors in place of numbers that the dispatcher has unpacked from tensors."""
    like = next((one for one in args if isinstance(one, Tensor)), None)
    if like is None:
        return args
    kinds = [str(argument.type) for argument in func._schema.arguments]
    return tuple(
        torch.scalar_tensor(one, dtype=torch.result_type(like, one))
        if kind == "Tensor" and isinstance(one, int | float)
        else one
        for one, kind in zip(args, kinds, strict=False)
    )


def _back(one: Tensor, back: dict[int, Tensor]) -> Tensor:
    return back[id(one)] if id(one) in back else as_device(one, FAR_KIND)


def _near(one: Tensor) -> Tensor:
    """Return the memory as a tensor of the CPU; for an empty one a tensor that an operation can resize."""
    if not is_far(one):
        return one
    return as_device(one, CPU_KIND) if one.numel() else torch.empty(one.shape, dtype=one.dtype)


def _replace(tensor: Tensor, near: Tensor) -> None:
    """Let a tensor of the device have the memory of a CPU tensor."""
    torch.ops.aten.set_.source_Tensor.redispatch(_below, tensor, as_device(near, FAR_KIND))


def _resize(tensor: Tensor, size: Any, **_: Any) -> Tensor:
    near = torch.empty(size, dtype=tensor.dtype)
    kept = min(near.numel(), tensor.numel())
    near.view(-1)[:kept] = _near(tensor).reshape(-1)[:kept]
    _replace(tensor, near)
    return tensor


def _copy(name: str, one: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
    source, target = (other, one) if name == "aten::copy_" else (one, other)
    if is_far(source) and not is_far(target):
        if non_blocking:
            _late.append((target, _near(source).clone()))
            return target.fill_(GARBAGE) if target.is_floating_point() else target.fill_(0)
        HOST_READS["copy"] += 1
    _near(target).copy_(_near(source))
    return target


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = [*zip(func._schema.arguments, args, strict=False)]
    found += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
    written = [value for one, value in found if one.alias_info is not None and one.alias_info.is_write]
    return [one for one in tree_leaves(written) if isinstance(one, Tensor)]


def _refuse_crossing(func: Any, tensors: list[Tensor], written: list[Tensor]) -> None:
    """Raise RuntimeError if a CPU tensor, other than a number that is read, meets one of the device."""
    near = [one for one in tensors if not is_far(one) and (one.dim() or any(one is each for each in written))]
    if near and any(map(is_far, tensors)):
        shape = tuple(near[0].shape)
        raise RuntimeError(f"{func}: expected all tensors on {NAME}:0, but found a CPU tensor of shape {shape}")


def _count(name: str) -> None:
    if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::unique"):
        HOST_READS[name.removeprefix("aten::")] += 1


def _lower_precision(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation in the precision of autocast."""
    kind = torch.get_autocast_dtype(NAME)
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastPrivateUse1)):
        lower = tree_map(lambda one: one.to(kind) if is_far(one) and one.is_floating_point() else one, (args, kwargs))
        return func(*lower[0], **lower[1])


def _runner(name: str) -> Any:
    """Return the kernel of an operation for the device."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return functools.partial(_run, func)


def _convolution(*args: Any) -> Any:
    return _run(torch.ops.aten.convolution.default, *args)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
    *rest, mask = args
    is_transposed, groups = rest[3], rest[5]
    sizes = [weight.shape[1] * groups if is_transposed else weight.shape[0]]
    return _run(torch.ops.aten.convolution_backward.default, grad, x, weight, sizes, *rest, mask)


def _pinned(tensor: Tensor, device: Any = None) -> Tensor:
    return tensor.clone()


def _not_pinned(tensor: Tensor, device: Any = None) -> bool:
    return False


def _kernels_of_cpu() -> list[str]:
    """Return the operations that have a kernel of their own for CPU tensors."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    return [name for name in names if name.startswith("aten::") and name.partition(".")[0] not in VIEWS]


def _register() -> list[torch.library.Library]:
    _setup_privateuseone_for_python_backend(NAME, backend_module=FarModule())
    every, named = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _kernels_of_cpu():
        named.impl(name.removeprefix("aten::"), _runner(name), "PrivateUse1")
    named.impl("convolution_overrideable", _convolution, "PrivateUse1")
    named.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    for name in HALVED:
        op = getattr(torch.ops.aten, name.removeprefix("aten::")).default
        named.impl(op, lambda *args, op=op, **kwargs: _lower_precision(op, *args, **kwargs), "AutocastPrivateUse1")
    named.impl("_pin_memory", _pinned, "CPU")
    named.impl("is_pinned", _not_pinned, "CPU")
    return [every, named]


_libraries = _register()
