"""State that codecs and averaging rules keep between rounds: how it is saved, restored, and reset when members change.

A state is a tree of `None`, numbers, strings, bytes, tensors, `torch.Generator`s, lists, tuples, dicts, and objects
with `state_dict()` and `load_state_dict(saved)`; `reset(members)` is optional. `State` gives an object all three.
The functions below apply them to a whole tree, so that a state may be nested (a chain of codecs, a dict of tensors).
Any other object is refused with RecipeError: it would be lost when a round is repeated or a run is resumed.

    save(state)             the tree as plain values; its tensors are the state's own, not copies
    load(state, saved)      the state with the saved values
    reset(state, members)   the state among other workers
    pack(saved, name)       the saved values as numbers and named tensors, for a file or a message; `unpack` reverses it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from stretto.errors import RecipeError, explain
from stretto.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Members:
    """The workers that exchange from now on."""

    workers: int
    joined: bool = False
    """True if one of them has joined without the state of earlier rounds."""


class State:
    """Base of states with attributes. Attributes may be added and replaced at any time; `__slots__` are not saved."""

    transient: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that are neither saved nor restored: settings, clocks, numbers of workers."""
    replicated: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that are equal at all workers, which a joining worker must receive from another one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes that are saved."""
        return {name: save(value, f"{type(self).__name__}.{name}") for name, value in self._attributes().items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Set the attributes to the saved values; remove attributes that were added since."""
        for name in self._attributes().keys() - saved.keys():
            delattr(self, name)
        for name, value in saved.items():
            setattr(self, name, load(getattr(self, name, None), value))

    def reset(self, members: Members) -> None:
        """Adapt to other members. A subclass that overrides this calls `super().reset(members)` for nested states."""
        for value in self._attributes().values():
            reset(value, members)

    def replicated_dict(self) -> dict[str, Any]:
        """Return the attributes that are equal at all workers, nested ones included."""
        found: dict[str, Any] = {}
        for name, value in self._attributes().items():
            part = save(value) if name in self.replicated else replicated(value)
            if part is not NOTHING:
                found[name] = part
        return found

    def load_replicated_dict(self, saved: Mapping[str, Any]) -> None:
        """Set what `replicated_dict` has returned at another worker; leave the rest."""
        for name, value in saved.items():
            if name in self.replicated:
                setattr(self, name, load(getattr(self, name, None), value))
            else:
                load_replicated(getattr(self, name, None), value)

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self.transient}


class _Nothing:
    """The replicated part of a state that has none."""


NOTHING: Final = _Nothing()


class Saved(dict[str, Any]):
    """The `state_dict()` of an object, as opposed to a dict that is a state."""


def save(state: Any, name: str = "the state") -> Any:
    """Return a state as plain values. Raise RecipeError if a part of it can't be saved."""
    if isinstance(state, torch.Tensor) or _is_plain(state):
        return state
    if isinstance(state, torch.Generator):
        return state.get_state()
    if _has(state, "state_dict", "load_state_dict"):
        return Saved(state.state_dict())
    if isinstance(state, dict):
        return {key: save(value, f"{name}[{key!r}]") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return _rebuilt(state, [save(one, f"{name}[{index}]") for index, one in enumerate(state)])
    raise RecipeError(
        explain(
            f"{name} can't be saved: it is a {type(state).__name__}",
            got=f"{type(state).__module__}.{type(state).__name__}",
            expected="tensors, numbers, strings, lists, tuples, dicts, or objects with state_dict and load_state_dict",
            to_type=f"class {type(state).__name__}(stretto.how.State): ..., or its name in `transient`",
        )
    )


def load(state: Any, saved: Any) -> Any:
    """Return the state with the saved values: mutable objects are changed in place, all others are replaced.

    Tensors are replaced by copies, never written to: another worker, or the log of a transport, may hold the same.
    """
    if isinstance(state, torch.Generator):
        state.set_state(saved.cpu())
        return state
    if isinstance(saved, Saved):
        return _load_object(state, saved)
    if isinstance(saved, torch.Tensor):
        return saved.to(state.device, copy=True) if isinstance(state, torch.Tensor) else saved.clone()
    if isinstance(saved, dict):
        found = {key: load(_item(state, key), value) for key, value in saved.items()}
        return _refilled(state, dict, found)
    if isinstance(saved, list | tuple):
        items = [load(_item(state, index), value) for index, value in enumerate(saved)]
        return _refilled(state, list, items) if isinstance(saved, list) else _rebuilt(state, items)
    return saved


def load_into(state: Any, saved: Any) -> None:
    """Set a whole state to the saved values where it lies. Tensors outside of mutable objects are written to."""
    if isinstance(state, torch.Tensor):
        state.copy_(saved)
    elif isinstance(state, tuple):
        for one, value in zip(state, saved, strict=True):
            load_into(one, value)
    else:
        load(state, saved)


def reset(state: Any, members: Members) -> None:
    """Have every object in a state adapt to other members."""
    if hasattr(state, "reset"):
        state.reset(members)
    elif isinstance(state, list | tuple | dict):
        for one in state.values() if isinstance(state, dict) else state:
            reset(one, members)


def replicated(state: Any) -> Any:
    """Return the part of a state that is equal at all workers and can't be computed again; NOTHING if it has none."""
    if hasattr(state, "replicated_dict"):
        found = state.replicated_dict()
    elif isinstance(state, list | tuple | dict):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        found = {key: part for key, value in items if (part := replicated(value)) is not NOTHING}
    else:
        return NOTHING
    return found or NOTHING


def load_replicated(state: Any, saved: Any) -> None:
    """Set the part of a state that `replicated` has returned at another worker; leave the rest."""
    if saved is NOTHING:
        return
    if hasattr(state, "load_replicated_dict"):
        state.load_replicated_dict(saved)
    else:
        for key, value in saved.items():
            load_replicated(state[key], value)


def copied(saved: Any, spare: Any = None) -> Any:
    """Return a copy of saved values. Tensors of `spare` that fit are written to, so that nothing is allocated."""
    if isinstance(saved, torch.Tensor):
        fits = isinstance(spare, torch.Tensor) and _layout(spare) == _layout(saved)
        return spare.copy_(saved) if fits else saved.detach().clone()
    if isinstance(saved, dict):
        return type(saved)({key: copied(value, _item(spare, key)) for key, value in saved.items()})
    if isinstance(saved, list | tuple):
        return _rebuilt(saved, [copied(one, _item(spare, index)) for index, one in enumerate(saved)])
    return saved


def pack(saved: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return saved values as plain values in lists, and put their tensors under names that begin with `name`.

    >>> pack({"round": 3, "counts": (1, 2)}, "codec", {})
    ['dict', [['round', 3], ['counts', ['tuple', [1, 2]]]]]
    """
    if isinstance(saved, torch.Tensor):
        tensors[name] = saved
        return ["tensor", name]
    if isinstance(saved, dict):
        kind = "object" if isinstance(saved, Saved) else "dict"
        items = enumerate(saved.items())
        return [kind, [[key, pack(value, f"{name}/{index}", tensors)] for index, (key, value) in items]]
    if isinstance(saved, list | tuple):
        kind = "tuple" if isinstance(saved, tuple) else "list"
        return [kind, [pack(one, f"{name}/{index}", tensors) for index, one in enumerate(saved)]]
    return ["nothing", None] if saved is NOTHING else saved


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the saved values that `pack` was given.

    >>> unpack(pack({"round": 3, "counts": (1, 2)}, "codec", {}), {})
    {'round': 3, 'counts': (1, 2)}
    """
    if not isinstance(packed, list | tuple):
        return packed
    kind, content = packed
    of_kind: dict[str, Callable[[], Any]] = {
        "tensor": lambda: tensors[content],
        "object": lambda: Saved((key, unpack(value, tensors)) for key, value in content),
        "dict": lambda: {key: unpack(value, tensors) for key, value in content},
        "list": lambda: [unpack(one, tensors) for one in content],
        "tuple": lambda: tuple(unpack(one, tensors) for one in content),
        "nothing": lambda: NOTHING,
    }
    return of_kind[kind]()


def _is_plain(state: Any) -> bool:
    return state is None or isinstance(state, int | float | str | bytes)


def _has(state: Any, *names: str) -> bool:
    return not isinstance(state, type) and all(callable(getattr(state, name, None)) for name in names)


def _item(state: Any, key: Any) -> Any:
    if isinstance(state, dict):
        return state.get(key)
    return state[key] if isinstance(state, list | tuple) and key < len(state) else None


def _refilled(state: Any, kind: type[list[Any] | dict[Any, Any]], content: Any) -> Any:
    """Return a list or dict with this content: the existing one, refilled, if there is one."""
    if not isinstance(state, kind):
        return content
    state.clear()
    if isinstance(state, dict):
        state.update(content)
    else:
        state.extend(content)
    return state


def _rebuilt(like: Any, items: list[Any]) -> Any:
    """Return items in a list or a tuple of the class of another."""
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*items)
    return items if isinstance(like, list) else tuple(items)


def _load_object(state: Any, saved: Saved) -> Any:
    if not _has(state, "load_state_dict"):
        raise RecipeError(
            explain(
                "a codec's state holds an object now that it did not hold when it was saved, or the other way round",
                got=f"{type(state).__name__}, and the saved attributes {', '.join(saved)}",
                expected="objects that are created with the state and stay",
                to_type="all objects of a state in the codec's init_state",
            )
        )
    state.load_state_dict(saved)
    return state


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
