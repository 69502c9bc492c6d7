"""Learning-rate schedulers and gradient scalers of this process, in the order of their creation.

A script hands neither to `distribute`, and no optimizer refers to them. Workers match them by this order, which is the
same at all workers if they are recorded when they are made: this module is imported as soon as torch is.
"""

from __future__ import annotations

import gc
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

Created = TypeVar("Created")


class CreationOrder(Generic[Created]):
    """The objects of a class and its subclasses that exist, numbered when they are made.

    Objects from before are listed by the garbage collector alone, in an order that depends on when it ran; they are
    ordered by their class and their plain attributes.
    """

    def __init__(self, kind: type[Created]) -> None:
        numbers: WeakKeyDictionary[Created, int] = WeakKeyDictionary()
        next_number = count()

        def create(created_class: type[Created], *_: Any, **__: Any) -> Created:
            instance = object.__new__(created_class)
            numbers[instance] = next(next_number)
            return instance

        for instance in sorted((obj for obj in gc.get_objects() if issubclass(type(obj), kind)), key=_description):
            numbers[instance] = next(next_number)
        kind.__new__ = create  # type: ignore[method-assign, assignment]
        self._numbers = numbers

    def all(self) -> list[Created]:
        """Return the objects that exist now."""
        return sorted(self._numbers, key=self._numbers.__getitem__)


def _description(instance: object) -> tuple[str, str]:
    settings = {name: value for name, value in vars(instance).items() if isinstance(value, int | float | str)}
    return type(instance).__qualname__, str(settings)


SCHEDULERS = CreationOrder(LRScheduler)
SCALERS = CreationOrder(GradScaler)
