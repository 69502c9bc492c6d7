"""Communicators of devices through torch, and the variables with which torch survives a failure of NCCL.

torch ends a process whose NCCL operation fails, since most programs can't continue. Workers of Stretto can, so these
variables are set before the first communicator is created, unless the user has set them:

| variable | value | reason |
| --- | --- | --- |
| `TORCH_NCCL_ASYNC_ERROR_HANDLING` | 0 | torch's watchdog ends the process at a failed operation (1, 3), or aborts it on its own (2): a worker that asks for the result then gets half of it, and no error. With 0 only Stretto aborts |
| `TORCH_NCCL_ENABLE_MONITORING` | 0 | a second thread ends the process if the watchdog hangs, which it does while a GPU hangs |
| `TORCH_NCCL_DUMP_ON_TIMEOUT` | 0 | a failure is noted in the store, which outlasts a generation, and restarted workers would act on it |
| `TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC` | 0 | the watchdog sleeps four times as long after an error, and a group can't be dropped before |
| `TORCH_NCCL_NONBLOCKING_TIMEOUT` | seconds | limit of a call, half an hour by default; connecting may take as long as in Stretto |

`TORCH_NCCL_BLOCKING_WAIT` is left alone: an operation is waited for after the GPU has ended it.
"""  # noqa: E501

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from stretto.notices import say_once
from stretto.transport.device_groups import GROUPS
from stretto.transport.nccl_group import CONNECTING, NcclGroup, Operation

SAFE = (2, 26, 2)
"""First version of NCCL whose abort is known not to hang; torch 2.7 has it."""
OLD_NAMES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING"}
LONGER = 2
"""Time limit of torch's own watchdog, as a multiple of the transport's, which so comes first."""


class GroupCommunicator:
    """Communicator of a process group of torch, for devices without streams."""

    def __init__(self, store: Store, worker: int, workers: int, device: torch.device, timeout_s: float) -> None:
        self._store, self._worker, self._workers, self._device = store, worker, workers, device
        self._timeout = timedelta(seconds=LONGER * timeout_s)
        self._group: Any = None

    def connect(self) -> None:
        """Connect with all ranks, which a first sum shows."""
        self._group = self._form()
        self._group.allreduce([torch.zeros(1, device=self._device)]).wait()

    def _form(self) -> Any:
        return getattr(dist, GROUPS[self._device.type])(self._store, self._worker, self._workers, self._timeout)

    def mark(self) -> Any:
        """Return None: there are no streams."""
        return None

    def begin(self, verb: str, arguments: Sequence[Any], mark: Any) -> Operation:
        """Begin an operation."""
        operation: Operation = getattr(self._group, verb)(*arguments)
        return operation

    def shutdown(self) -> None:
        """Complete the operations, and disconnect."""
        if self._group is not None:
            self._group.shutdown()

    def abort(self) -> None:
        """End the operations, and disconnect."""
        if self._group is not None:
            self._group.abort()

    def release(self) -> None:
        """Drop the group, whose destructor waits for its threads."""
        self._group = None


class NcclCommunicator(GroupCommunicator):
    """Communicator of NCCL whose calls do not block, so that one in progress can be aborted."""

    _stream: Any = None

    def connect(self) -> None:
        """Connect with all ranks, which a first sum shows."""
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            super().connect()
            torch.cuda.current_stream(self._device).synchronize()

    def _form(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = self._timeout
        group = dist.ProcessGroupNCCL(self._store, self._worker, self._workers, options)
        group.eager_connect_single_device(self._device)
        return group

    def mark(self) -> Any:
        """Return an event at the present end of the caller's stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self, verb: str, arguments: Sequence[Any], mark: Any) -> Operation:
        """Begin an operation once the GPU has reached the event."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            return super().begin(verb, arguments, mark)


COMMUNICATORS: dict[str, type[GroupCommunicator]] = {"cuda": NcclCommunicator}
"""Communicators of kinds of devices that have streams."""


def abortable_group(
    store: Store, worker: int, workers: int, device: torch.device, timeout_s: float, failure_timeout_s: float
) -> NcclGroup:
    """Return a group of the workers' devices, which is connecting. Worker 0 prints what may make failures fatal."""
    if device.type == "cuda":
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        problems = weakness(version), set_variables(os.environ, CONNECTING * failure_timeout_s)
        for problem in filter(None, problems if worker == 0 else ()):
            say_once(problem)
    communicator = COMMUNICATORS.get(device.type, GroupCommunicator)(store, worker, workers, device, timeout_s)
    return NcclGroup(communicator, timeout_s, failure_timeout_s)


def weakness(version: tuple[int, ...]) -> str | None:
    """Return a sentence if this version of NCCL is too old to survive failures without restarts."""
    if version >= SAFE:
        return None
    old, safe = (".".join(map(str, one)) for one in (version, SAFE))
    return f"an abort may hang in NCCL {old}, and a worker then has to restart; NCCL {safe} of torch 2.7 avoids this"


def set_variables(environment: MutableMapping[str, str], connecting_s: float) -> str | None:
    """Set the variables that the user has not set. Return a sentence if those of the user make failures fatal."""
    wanted = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(round(connecting_s), 1)),
    }
    fatal = [f"{name}={environment[name]} {why}" for name, why in _fatal(environment)]
    for name, value in wanted.items():
        if OLD_NAMES.get(name, name) not in environment:
            environment.setdefault(name, value)
    if not fatal:
        return None
    return f"with {' and '.join(fatal)} at a failure of NCCL, which workers survive if it is not set"


def _fatal(environment: MutableMapping[str, str]) -> list[tuple[str, str]]:
    ends, halves = "torch ends the process", "torch may return half of a result"
    found = []
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if (value := environment.get(name, "0").strip()) != "0":
            found.append((name, halves if value == "2" else ends))
    for name in ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"):
        if environment.get(name, "0").strip().lower() in ("1", "y", "yes", "t", "true"):
            found.append((name, ends))
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        found.append(("TORCH_DISTRIBUTED_DEBUG", ends))
    return found
