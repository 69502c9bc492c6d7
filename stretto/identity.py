"""Identity of a worker, and actions of one worker for all: rank, barrier, main_first, broadcast, print, save.

They work before and after `distribute`, live and simulated. In a single process (`python train.py`) they return 0, 1
and True, and never wait.
"""

from __future__ import annotations

import builtins
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from stretto.api import connected, is_resuming, skipped
from stretto.errors import ScriptError, explain
from stretto.membership.barrier_client import Barrier
from stretto.membership.barriers import EVERYBODY, Position
from stretto.training.trainer import Trainer
from stretto.training.worker_context import WorkerContext, find_context
from stretto.whole_files import written_whole

BROADCAST_BYTES = 1 << 20
"""Maximum size of a value of `broadcast`."""


def rank() -> int:
    """Return the number of this worker, from 0; it stays the same for the life of the worker, and for its restarts.

    After workers have failed or joined, the numbers of the running workers need not be 0 to `world_size()` - 1.

    >>> rank()
    0
    """
    trainer = connected()
    if trainer is not None:
        return trainer.transport.number
    context = find_context()
    return context.worker if context is not None else 0


def world_size() -> int:
    """Return the number of workers: of the started ones, and after `distribute` of the workers that train now.

    >>> world_size()
    1
    """
    trainer = connected()
    if trainer is not None:
        return trainer.transport.workers
    context = find_context()
    return max(context.workers, context.worker + 1) if context is not None else 1


def is_main() -> bool:
    """Return True at the main worker, which acts for all.

    That is worker 0; after `distribute` it is the first of the workers that train now, so another worker is main after
    worker 0 has failed, until worker 0 trains again, and, where workers do not wait for each other, after the loops of
    worker 0 have ended before those of others. Before `distribute` a restarted worker 0 counts as main.

    >>> is_main()
    True
    """
    return rank() == _main()


def barrier() -> None:
    """Wait until all workers have reached this call.

    Workers that failed are not waited for, nor restarted workers until they train again; a restarted worker passes the
    barriers that other workers have left. Raises TransportError after `--timeout`, with the number of the missing
    worker, and ScriptError inside `evaluate`, which one worker runs, and inside the loop over the loader where workers
    take unequal numbers of batches.

    >>> barrier()
    """
    _wait(_position("barrier"), EVERYBODY, "barrier")


@contextmanager
def main_first() -> Iterator[bool]:
    """Let the main worker run the block first, and the others when it has left the block, with an error or without.

    If main fails in the block before training begins, the others wait for its restart; later the next worker is first.
    The value of the block is True at the worker that runs it first.

    >>> with main_first():
    ...     pass
    """
    position = _position("main_first")
    if not _is_to_act(position, "main_first"):
        yield False
        return
    try:
        yield True
    finally:
        _announce(position)


def broadcast(value: Any = None) -> Any:
    """Return the main worker's value, at all workers: numbers, text, bytes, None, or lists and dicts of such values.

    All workers call it; only main's argument counts. Before `distribute` a restarted or joining worker gets the
    value that the others got; in training main sends it to the workers that train, and a restarted worker has its
    own until it trains with them. If main fails first, it is the value of the next worker. A tuple is returned as a
    list. A value has at most 1 MiB; before `distribute`, and where workers do not wait, the coordinator keeps them.

    Raises ScriptError for other values and where `barrier` does, and TransportError after `--timeout`.

    >>> broadcast({"seed": 7})
    {'seed': 7}
    """
    packed, found = _packed(value), connected()
    if found is not None:
        _require_all_workers(found, "broadcast")
        if found.agent.is_catching_up():
            return msgspec.msgpack.decode(packed)
    if found is not None and not found.is_over and not found.strategy.asynchronous:
        packed = found.transport.broadcast_bytes(packed, found.transport.members.index(_main()))
    elif (others := _barrier()) is not None:
        mend = found.agent.mend if found is not None else lambda: None
        packed = others[1].give(_position("broadcast"), _main(), packed, mend)
    elif not _is_first_rank():
        problem = "stretto.broadcast before stretto.distribute, in a process that has a part of a worker's model"
        to_type = "stretto.broadcast after distribute, or a layout of one process a worker"
        raise ScriptError(explain(problem, got="several processes a worker", expected="one", to_type=to_type))
    return msgspec.msgpack.decode(packed)


def _packed(value: Any) -> bytes:
    try:
        packed = msgspec.msgpack.encode(value)
        msgspec.msgpack.decode(packed)
    except (TypeError, OverflowError, msgspec.MsgspecError):
        problem, got = "stretto.broadcast can't send this value", f"a {type(value).__name__}: {value!r:.60}"
        expected, to_type = "numbers, text, bytes, None, lists, dicts", "stretto.broadcast(str(path))"
        raise ScriptError(explain(problem, got=got, expected=expected, to_type=to_type)) from None
    if len(packed) > BROADCAST_BYTES:
        problem, got = "stretto.broadcast is for small values", f"{len(packed):,} bytes"
        expected, to_type = f"at most {BROADCAST_BYTES:,} bytes", "stretto.save, and torch.load after it"
        raise ScriptError(explain(problem, got=got, expected=expected, to_type=to_type))
    return packed


def print(*values: object, **options: Any) -> None:
    """Print at the main worker only; takes what the built-in `print` takes. While epochs are passed it prints nothing.

    >>> print("loss", 0.5)
    loss 0.5
    """
    if is_main() and _is_first_rank() and not is_resuming():
        builtins.print(*values, **options)


def save(obj: object, path: str | os.PathLike[str]) -> None:
    """Save with `torch.save`, at the main worker only, whole or not at all; missing folders are made.

    The file is written beside `path`, brought to the disk, and renamed, so no reader ever sees a part of it. Call it at
    every worker, or inside `if stretto.is_main()`: both are right. At every worker, the others return when the main
    worker has saved, so that the next line may load the file. They do not wait for a call that main does not make:
    a main worker that has begun a further exchange is past this call. This is why `save` cannot be built on `barrier`:
    inside `if stretto.is_main()` no other worker would reach it. If main fails before the file is complete, the next
    worker in this call writes it; inside `if stretto.is_main()` there is none. Under an asynchronous recipe, call it
    between epochs: inside the loop no worker waits. While epochs that were trained before are passed (`is_resuming`),
    it does nothing.

    Raises OSError when the file cannot be written; the one before it is still there.

    >>> import tempfile
    >>> save({"accuracy": 0.9}, Path(tempfile.mkdtemp()) / "models/best.pt")
    """
    if is_resuming():
        return
    trainer, position = connected(), _position(f"save {os.fspath(path)}")
    does_not_wait = trainer is not None and _is_unequal(trainer) and not is_main()
    if does_not_wait or not _is_to_act(position, "save") or not _is_first_rank():
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with written_whole(Path(path), synced=True) as part:
            try:
                torch.save(obj, part)
            except RuntimeError:  # torch's own writer of files gives no cause, as that of a full disk; Python's does
                with part.open("wb") as file:
                    torch.save(obj, file)
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, os.fspath(path)) from None
    finally:
        _announce(position)


# --- positions in the script ------------------------------------------------------------------------------------------


@dataclass
class _Counted:
    """Barriers of this worker's script so far."""

    trainer: Trainer | None = None
    section: int = 0
    place: int = 0
    calls: Counter[str] = field(default_factory=Counter)


_counted: ContextVar[_Counted | None] = ContextVar("counted", default=None)


def _is_first_rank() -> bool:
    """Return False at the ranks of a worker that only have a part of its model, but rank 0."""
    context = find_context()
    return context is None or context.runtime.rank == 0


def _main() -> int:
    trainer = connected()
    return trainer.epochs.main if trainer is not None else 0


def _position(label: str) -> Position:
    """Return the position of this barrier call, which is equal at all workers that run the same script."""
    counted = _counted.get()
    if counted is None:
        _counted.set(counted := _Counted())
    trainer = connected()
    if trainer is not None and trainer is not counted.trainer:
        counted.trainer, counted.section, counted.place = trainer, trainer.section.number, -1
    place = trainer.agent.operations_begun() if trainer is not None else counted.place
    section, place = (skipped() if trainer is None else None) or (counted.section, place)
    if (section, place) != (counted.section, counted.place):
        counted.section, counted.place, counted.calls = section, place, Counter()
    counted.calls[label] += 1
    return Position(counted.section, place, label, counted.calls[label])


def _barrier() -> tuple[WorkerContext, Barrier] | None:
    """Return the barrier of this worker; None if there are no other workers."""
    trainer, context = connected(), find_context()
    if context is None or context.barrier is None or context.single_process:
        return None
    return None if trainer is None and _is_over() else (context, context.barrier)


def _is_over() -> bool:
    """Return True after the end of the last run, when the other workers have left too."""
    counted = _counted.get()
    return counted is not None and counted.trainer is not None


def _announce(position: Position) -> None:
    if (found := _barrier()) is not None:
        found[1].announce(position)


def _is_to_act(position: Position, called: str) -> bool:
    """Return True at main, or at the next worker if main has failed before it acted; else wait until one has acted."""
    return is_main() or _wait(position, _main(), called)


def _wait(position: Position, of: int, called: str) -> bool:
    trainer, found = connected(), _barrier()
    if found is None:
        return False
    if trainer is None:
        return found[1].wait(position, of, lambda: None)
    _require_all_workers(trainer, called)
    return not trainer.agent.is_catching_up() and found[1].wait(position, of, trainer.agent.mend)


def _require_all_workers(trainer: Trainer, called: str) -> None:
    if _is_unequal(trainer):
        problem = f"stretto.{called} inside the loop, but workers take unequal numbers of batches under this recipe"
        expected = "a call between epochs, or a recipe whose workers wait for each other"
        raise ScriptError(explain(problem, got=str(trainer.recipe), expected=expected, to_type="--recipe allreduce"))
    if trainer.timer.phase == "evaluating":
        problem = f"stretto.{called} inside evaluate, which one worker runs while the others wait for its numbers"
        expected = "a function that waits for no other worker"
        to_type = f"stretto.{called} after the loop, between two epochs"
        raise ScriptError(explain(problem, got=f"{called} at this worker only", expected=expected, to_type=to_type))


def _is_unequal(trainer: Trainer) -> bool:
    """Return True within an epoch in which workers lease batches one by one."""
    return trainer.strategy.asynchronous and trainer.epoch_batches is not None
