"""Measured costs of a model's calls, and of the way between two ranks: medians of several times."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from stretto.parallel.calls import Calls, Forward, opened, replaced
from stretto.parallel.gradient_sums import only_hooks, summed_gradients
from stretto.parallel.link import OUTPUT, Link
from stretto.parallel.meta_start import with_memory
from stretto.parallel.remote import mapped, remote, repeated
from stretto.parallel.schedule import Hop
from stretto.parallel.split import Costs
from stretto.runtime.device_random import kept_random_states
from stretto.runtime.event_writer import boot_id
from stretto.runtime.kept_modules import kept_modules
from stretto.strategies.model_sync import plain_name
from stretto.transport.device_memory import free_memory, wait_for

TIMES = 5
"""Number of measurements of each time."""
PASSES, TOGETHER = 3, 4
"""Measurements of a module, and the most micro-batches whose activations are in memory together in each."""
PROBE_BYTES = 1 << 20
COPIES = 4
"""Copies of a trained parameter in memory: itself, its gradient, and the state of Adam."""


def measured_costs(
    model: nn.Module,
    calls: Calls,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    byte_s: float,
    device: torch.device,
    micro_batches: int = 1,
) -> Costs:
    """Return the costs of a forward pass with these arguments on a device; sending a byte takes `byte_s`.

    The arguments are those of one of several micro-batches. Random states and buffers are as before afterwards.
    """
    seconds, kept = [0.0] * len(calls.names), [0] * len(calls.names)
    sending_s = {call: 2 * nbytes * byte_s for call, nbytes in calls.sizes.items()}
    wait = functools.partial(wait_for, device)
    at = [-1, 0]  # the last call, and the number of closed modules around the present place

    def make(name: str, forward: Forward) -> Forward:
        is_open = modules[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if at[1]:
                return forward(*args, **kwargs)
            at[0] += 1
            now = at[0]
            if is_open:
                return forward(*args, **kwargs)
            at[1] += 1
            try:
                with with_memory(module := model.get_submodule(name)):
                    trained = [one for one in module.parameters() if one.requires_grad]
                    given = [(args, kwargs)] * min(micro_batches, TOGETHER)
                    seconds[now] = median(_time(forward, given, trained, wait) for _ in range(PASSES)) / len(given)
                    kept[now] = _kept(module, forward, args, kwargs)
                    return forward(*args, **kwargs)
            finally:
                at[1] -= 1

        return call

    modules = opened(model)
    timed = replaced({name: model.get_submodule(name) for name in modules}, make)
    parameters = [*model.parameters()]
    no_hooks = only_hooks(parameters, [None] * len(parameters))
    with kept_modules(model), kept_random_states(device), no_hooks, torch.no_grad():
        with timed:
            model.forward(*args, **kwargs)
        between_s = _between(model, args, kwargs)
    return Costs(seconds, sending_s, held_bytes(model, calls), kept=kept, between_s=between_s)


def _between(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """Return the seconds of a forward pass whose modules are those of other ranks: of all code between them."""
    shapes: list[Any] = []
    at = [0, 0]  # the number of calls, and of closed modules around the present place

    def make(name: str, forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            if modules[name] or at[1]:
                return forward(*args, **kwargs)
            at[0] += 1
            if len(shapes) < at[0]:
                at[1] = 1
                given, options = mapped(Tensor, remote, args, kwargs)
                shapes.append(tree_map_only(Tensor, remote, forward(*given, **options)))
                at[1] = 0
            return repeated(shapes[at[0] - 1])

        return call

    def passed() -> float:
        at[0], began = 0, time.perf_counter()
        model.forward(*args, **kwargs)
        return time.perf_counter() - began

    modules = opened(model)
    with replaced({name: model.get_submodule(name) for name in modules}, make), torch.no_grad():
        passed()
        return median(passed() for _ in range(TIMES))


def _time(forward: Forward, given: Sequence[Any], trained: Sequence[nn.Parameter], wait: Callable[[], object]) -> float:
    """Return the seconds of the forward passes with these arguments, and then of their backward passes."""
    copies = [_copied(one) for one in given]
    with torch.enable_grad(), summed_gradients(trained, len(copies)):
        wait()
        began = time.perf_counter()
        outputs = [forward(*args, **kwargs) for args, kwargs in copies]
        wait()
        forward_s = time.perf_counter() - began
        heads = [
            [one for one in tree_leaves(each) if isinstance(one, Tensor) and one.requires_grad] for each in outputs
        ]
        passes = [(each, _leaves(each), [torch.ones_like(one) for one in each]) for each in reversed(heads)]
        began = time.perf_counter()
        for each, leaves, gradients in passes:
            if leaves:  # there are none if the module returns its input, as nn.Identity does
                torch.autograd.grad(each, leaves, gradients, allow_unused=True)
        wait()
        return forward_s + time.perf_counter() - began


def _copied(given: Any) -> Any:
    """Return arguments with tensors of their own, for which gradients are computed."""
    return tree_map_only(Tensor, lambda one: one.detach().clone().requires_grad_(one.is_floating_point()), given)


def _kept(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, besides the module's own tensors."""
    own = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers())}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    given = _copied((args, kwargs))
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(*given[0], **given[1])
    return sum(found.values())


def _leaves(heads: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors without history that these were computed from."""
    found: dict[int, Tensor] = {}
    pending, seen = [one.grad_fn for one in heads], set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found[id(leaf)] = leaf
        pending += [before for before, _ in node.next_functions]
    return list(found.values())


def held_bytes(model: nn.Module, calls: Calls) -> list[int]:
    """Return the bytes of the trained parameters that each call is the first to use, and of what belongs to them."""
    held = [0] * len(calls.names)
    for name, one in model.named_parameters():
        if one.requires_grad:
            held[calls.used.get(plain_name(name), [0])[0]] += COPIES * one.numel() * one.element_size()
    return held


def stage_memory(link: Link) -> list[int]:
    """Return the free bytes of each rank, of whose memory those of one host or GPU have equal parts; all ranks call it.

    Other workers of the same host are not known here.
    """
    own = msgspec.msgpack.encode((boot_id(), str(link.device), free_memory(link.device)))
    found = [msgspec.msgpack.decode(one, type=tuple[bytes, str, int]) for one in link.gather(own)]
    places = [one[:2] for one in found]
    return [free // places.count(place) for place, (*_, free) in zip(places, found, strict=True)]


def measured_hop(link: Link) -> Hop:
    """Return the way between ranks 0 and 1, at rank 0; all ranks call it."""
    if link.rank > 1:
        return Hop()
    latency_s, probe_s = _way_s(link, 1), _way_s(link, PROBE_BYTES)
    return Hop(max(0.0, probe_s - latency_s) / PROBE_BYTES, latency_s)


def _way_s(link: Link, nbytes: int) -> float:
    """Return the seconds in which a tensor arrives, half of its time there and back."""
    probe, times = torch.zeros(nbytes, dtype=torch.uint8, device=link.device), []
    for _ in range(TIMES):
        began = time.perf_counter()
        for sender in (0, 1):
            if link.rank == sender:
                link.send(probe, 1 - sender, OUTPUT)
                link.flush()
            else:
                link.receive(sender, OUTPUT).wait(probe.shape, probe.dtype)
        wait_for(link.device)
        times.append((time.perf_counter() - began) / 2)
    return median(times)
