"""The actor of Ray that carries one agent. Nodes of the cluster import this module, and nothing else of the launcher.

    launcher                                    actor                          agent
      | -- start(command, key) ------------------> | -- starts it, key on its -----> |
      |                                            |    standard input               |
      | -- read() -------------------------------> | <- lines ---------------------- |
      | <- lines, at last the exit code ---------- | <- exit code ------------------ |
      | -- end() --------------------------------> | -- end of standard input -----> | ends its workers
      x  the actor fails, or the launcher          x -- SIGKILL by the kernel -----> x  its workers are killed

A call of `read` waits until there is something, so `end` and `leave` need a thread of their own: CONCURRENCY.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Literal

Kind = Literal["started", "lines", "exited"]
News = tuple[Kind, bytes | int]
"""Process of the agent, lines that it prints, or its exit code."""
CONCURRENCY = 2
CHUNK_BYTES = 1 << 16
LAST_S = 1.0
"""Limit of the wait for the last lines of an agent that has exited."""
PR_SET_PDEATHSIG = 1
WORKER = "stretto.launcher.worker_main"
"""Module that a worker process runs."""
NO_COMMAND = 127


class AgentActor:
    """Place of one agent on a node of the cluster."""

    def __init__(self) -> None:
        self._news: SimpleQueue[News] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, python: str, words: Sequence[str], key: bytes) -> None:
        """Start the agent with this Python, or with that of the node if the node has no such file."""
        command = [python if Path(python).exists() else sys.executable, "-P", "-m", "stretto.cli", *words]
        threading.Thread(target=self._run, args=(command, key), daemon=True).start()

    def read(self) -> list[News]:
        """Return what has come since the last call; wait for the first."""
        found = [self._news.get()]
        with contextlib.suppress(Empty):
            while True:
                found.append(self._news.get_nowait())
        return found

    def end(self) -> None:
        """End the standard input of the agent, which then ends its workers and exits."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def leave(self) -> None:
        """Ask the workers of the agent to leave gracefully, as a machine does that is taken away."""
        import psutil  # only on a node that is taken away

        if self._process is not None:
            for child in psutil.Process(self._process.pid).children():
                if WORKER in child.cmdline():
                    child.terminate()

    def _run(self, command: Sequence[str], key: bytes) -> None:
        """Run the agent. It is the child of this thread, with whose end the kernel would kill it.

        Its run folder, with the code that it receives, is removed at the end.
        """
        folder = tempfile.mkdtemp(prefix="stretto-")
        command = [*command, "--out", folder]
        die_with_parent = ctypes.CDLL(None).prctl
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=subprocess.DEVNULL,
                stderr=pipe,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        except OSError as error:
            self._news.put(("lines", f"{command[0]}: {error.strerror}\n".encode()))
            self._news.put(("exited", NO_COMMAND))
            return
        self._process = process
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has exited: the reason is in what it printed
            os.write(process.stdin.fileno(), key)
        self._news.put(("started", process.pid))
        reader = threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True)
        reader.start()
        code = process.wait()
        reader.join(LAST_S)
        shutil.rmtree(folder, ignore_errors=True)
        self._news.put(("exited", code))

    def _pass_on(self, pipe: IO[bytes]) -> None:
        while data := os.read(pipe.fileno(), CHUNK_BYTES):
            self._news.put(("lines", data))
