"""torch, imported when something of it is first used: what is typed is also read by programs that do not train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Later:
        """Stands for a module until an attribute of it is asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            import importlib

            return getattr(importlib.import_module(self._name), name)

    torch = _Later("torch")

__all__ = ["torch"]
