"""torch, imported on first use of an attribute: programs that only parse recipes start without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Later:
        """Proxy that imports a module when an attribute is read."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            import importlib

            return getattr(importlib.import_module(self._name), name)

    torch = _Later("torch")

__all__ = ["torch"]
