"""Random states of the accelerators of this process, beside those of Python, NumPy and torch's CPU generator.

Only a device that the process has used has a state: asking an unused GPU for one would take memory on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from stretto.transport.device_memory import accelerator


def device_states() -> list[Tensor]:
    """Return the random states of all devices that this process has used, as tensors of the CPU."""
    module = _module()
    if module is None:
        return []
    states = module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
    return [state.cpu() for state in states]


def set_device_states(states: Sequence[Tensor]) -> None:
    """Set the random states of the devices; those of devices that this process has not are dropped."""
    module = _module()
    if module is None or not states:
        return
    if not hasattr(module, "get_rng_state_all"):
        module.set_rng_state(states[0])
        return
    for device, state in zip(range(module.device_count()), states, strict=False):
        module.set_rng_state(state, device)


def seed_of(text: bytes) -> int:
    """Return the seed of a generator that belongs to a text, the same in every process.

    >>> seed_of(b"worker 1") == seed_of(b"worker 1") != seed_of(b"worker 2")
    True
    """
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_devices(seed: int) -> None:
    """Seed the generators of all devices, used or not."""
    module = _module(used=False)
    if module is not None:
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


def seed_for(device: torch.device, seed: int) -> None:
    """Seed the generator of the CPU, and those of this kind of device; torch.manual_seed looks for all kinds."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        seed_devices(seed)


def kept_random_states(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which the random states of the CPU and of a device are as before."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _module(used: bool = True) -> Any:
    """Return torch's module of the accelerator; None without an accelerator, or if it has to be `used` and is not."""
    module = accelerator()
    return module if not used or getattr(module, "is_initialized", lambda: True)() else None
