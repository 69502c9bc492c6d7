"""The optimizer's state and the model's buffers, flattened to be exchanged."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from stretto.codecs import exact
from stretto.strategies.collective_runner import CollectiveRunner
from stretto.strategies.optimizers import device_of_state, parameters_of
from stretto.strategies.parameter_view import is_held, local
from stretto.strategies.traffic_counters import Account
from stretto.transport import Transport
from stretto.transport.tensor_bytes import octets

Layout = list[tuple[int, str, list[int], str, float | None]]
"""Entries of an optimizer's state: parameter, name, shape, dtype, and the value of a counter."""


class FlatTensors:
    """Tensors of any shapes, averaged over the workers as one flat tensor for each dtype and device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((tensor.dtype, tensor.device), []).append(local(tensor.detach()))
        self._groups = list(groups.values())

    def flat(self) -> list[Tensor]:
        """Return a copy of all tensors, one flat tensor for each dtype and device."""
        return [torch.cat([tensor.reshape(-1) for tensor in group]) for group in self._groups]

    def ask_mean(self, transport: Transport, share: float, account: Account | None = None) -> list[CollectiveRunner]:
        """Start the exact weighted mean of all tensors; `account` counts its bytes."""
        flats = [flat.mul_(share) for flat in self.flat()]
        if account is not None:
            account.count_raw(sum(flat.nbytes for flat in flats))
        return [CollectiveRunner(transport, exact().average(flat, None), account) for flat in flats]

    @torch.no_grad()
    def take(self, means: Sequence[Tensor]) -> None:
        """Write flat tensors, such as the means, back into the tensors."""
        for group, mean in zip(self._groups, means, strict=True):
            at = 0
            for tensor in group:
                tensor.copy_(mean[at : at + tensor.numel()].view(tensor.shape))
                at += tensor.numel()


class OptimizerState:
    """The state of an optimizer that is averaged: its floating tensors; 0-dimensional ones are counters and stay."""

    def __init__(self, optimizer: Optimizer, transport: Transport) -> None:
        self._optimizer, self._transport = optimizer, transport

    @property
    def _parameters(self) -> list[Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def layout(self) -> Layout:
        """Return the layout of the state's tensors, in a fixed order."""
        entries = [
            (index, str(name), value)
            for index, parameter in enumerate(self._parameters)
            for name, value in sorted(self._optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor)
        ]
        counters = iter(numbers([value for _, _, value in entries if not value.dim()]))
        return [
            (index, name, list(local(value).shape), str(value.dtype), None if value.dim() else next(counters))
            for index, name, value in entries
        ]

    def to_average(self) -> FlatTensors:
        """Return the tensors to average, after agreeing with all workers on the layout.

        Sparse ones, such as the momentum of sparse gradients, become dense before. A worker that has not stepped yet
        gets zeros for entries of the others, as optimizers start with.
        """
        for parameter in self._parameters:
            state = self._optimizer.state.get(parameter, {})
            state.update({name: value.to_dense() for name, value in state.items() if _is_sparse(value)})
        own = self.layout()
        shape_only = msgspec.msgpack.encode([entry[:4] for entry in own])
        if len(set(self._transport.all_gather_bytes(_digest(shape_only)))) > 1:
            self._adopt(self._transport.all_gather_bytes(msgspec.msgpack.encode(own)))
        return FlatTensors([value for _, value in self._tensors() if value.dim() and value.is_floating_point()])

    def reset(self) -> None:
        """Set all state to zero, as at the beginning."""
        for _, value in self._tensors():
            value.zero_()

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [
            (str(name), value)
            for parameter in self._parameters
            for name, value in sorted(self._optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor)
        ]

    def _adopt(self, layouts: Sequence[bytes]) -> None:
        groups = [group for group in self._optimizer.param_groups for _ in group["params"]]
        for layout in layouts:
            for index, name, shape, dtype, counter in msgspec.msgpack.decode(layout, type=Layout):
                parameter = self._parameters[index]
                state: dict[str, Any] = self._optimizer.state[parameter]
                if isinstance(state.get(name), Tensor):
                    continue
                kind = getattr(torch, dtype.removeprefix("torch."))
                if counter is None and shape == list(local(parameter.detach()).shape):
                    state[name] = torch.zeros_like(parameter, dtype=kind)
                    continue
                device = device_of_state(groups[index], parameter, len(shape))
                state[name] = torch.full(shape, counter or 0.0, dtype=kind, device=device)


def _is_sparse(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_sparse


def numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return the numbers in 0-dimensional tensors, with one read of each device."""
    devices = dict.fromkeys(one.device for one in tensors)
    read = {
        device: iter(torch.stack([one.double() for one in tensors if one.device == device]).tolist())
        for device in devices
    }
    return [next(read[one.device]) for one in tensors]


def _digest(message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=16).digest()


class MovingBuffers:
    """The floating-point buffers that training changes, such as the statistics of batch-norm.

    So are parameters that no optimizer holds, such as those of a teacher. The workers agree on this set: a buffer that
    no worker's training has changed is not sent, and does not drift by rounding. Integer and bool buffers are never
    averaged.
    """

    def __init__(self, model: nn.Module, transport: Transport, optimizers: Iterable[Optimizer]) -> None:
        self._model, self._transport, self._optimizers = model, transport, optimizers
        self._first = {name: crc(buffer) for name, buffer in self._named()}
        self._moving: set[str] = set()
        self._asked = False

    def state(self) -> tuple[list[str], bool]:
        """Return the names of the buffers that change, and True if the workers have agreed on them."""
        return sorted(self._moving), self._asked

    def restore(self, state: tuple[list[str], bool]) -> None:
        """Load a state that `state` returned."""
        self._moving, self._asked = set(state[0]), state[1]

    def agree(self, again: bool = True) -> None:
        """Agree on the buffers that change; not `again` if done before. A model without buffers sends nothing.

        Over a server each worker names all it knows: a joined worker has no state of another one.
        """
        if not self._first or (self._asked and not again):
            return
        self._asked = True
        still = [(name, buffer) for name, buffer in self._named() if name not in self._moving]
        changed = [name for name, buffer in still if crc(buffer) != self._first.get(name)]
        if self._transport.server is not None:
            changed += sorted(self._moving)
        for names in self._transport.all_gather_bytes(msgspec.msgpack.encode(changed)):
            self._moving.update(msgspec.msgpack.decode(names, type=list[str]))

    def floating(self, optimizers: Sequence[Optimizer] = ()) -> list[Tensor]:
        """Return the buffers that are averaged, in a fixed order: all, or those of modules that `optimizers` train.

        A buffer between the forward and the backward pass of another optimizer's module must not be written. Where
        several optimizers train the module of a buffer, or none does, it belongs to each of them.
        """
        moving = [(name, buffer) for name, buffer in self._moving_named() if buffer.is_floating_point()]
        if optimizers and len(optimizers) < len([*self._optimizers]):
            held, held_by_any = held_by(optimizers), held_by(self._optimizers)
            moving = [(name, buffer) for name, buffer in moving if self._is_trained(name, held, held_by_any)]
        return [buffer for _, buffer in moving]

    def _is_trained(self, name: str, held: set[int], held_by_any: set[int]) -> bool:
        """Return True if the innermost module around a buffer that any optimizer trains has parameters of `held`."""
        while name:
            name = name.rpartition(".")[0]
            found = {id(one) for one in self._model.get_submodule(name).parameters()}
            if found & held_by_any:
                return bool(found & held)
        return True

    def all(self) -> list[Tensor]:
        """Return all buffers that change, integers too."""
        return [buffer for _, buffer in self._moving_named()]

    def _moving_named(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self._named() if name in self._moving]

    def follow_teachers(self) -> None:
        """Copy parameters that no optimizer holds, and that change, from worker 0."""
        if others := unheld(self._model, self._optimizers):
            self.agree()
            if moving := [one for name, one in others if name in self._moving]:
                follow(self._transport, moving)

    def _named(self) -> list[tuple[str, Tensor]]:
        """Return the buffers, and the parameters that no optimizer holds, by name."""
        others = ((name, one.detach()) for name, one in unheld(self._model, self._optimizers))
        return [*self._model.named_buffers(), *others]

    def follow_lead(self) -> None:
        """Copy all changing buffers from worker 0."""
        if moving := self.all():
            follow(self._transport, moving)


def unheld(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[tuple[str, Parameter]]:
    """Return the parameters that none of these optimizers holds, by name."""
    held = held_by(optimizers)
    return [(name, one) for name, one in model.named_parameters() if id(one) not in held and is_held(one)]


def held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the parameters that these optimizers hold."""
    return {id(one) for each in optimizers for one in parameters_of(each)}


def crc(tensor: Tensor) -> int:
    """Return a checksum of the bits of the tensor that this process holds."""
    return zlib.crc32(octets(local(tensor.detach())).data)


@torch.no_grad()
def follow(transport: Transport, tensors: Sequence[Tensor]) -> None:
    """Copy the values of these tensors from the first worker, bit for bit."""
    tensors, is_first = [local(tensor.detach()) for tensor in tensors], list[bool]()

    def values() -> bytes:
        is_first.append(True)
        return b"".join(octets(tensor).tobytes() for tensor in tensors)

    message = transport.broadcast_bytes(values)
    if is_first:  # another worker if the first one failed
        return
    at = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            read = torch.frombuffer(bytearray(message[at : at + size]), dtype=tensor.dtype)
            tensor.copy_(read.view(tensor.shape))
        at += size
