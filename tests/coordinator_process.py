"""The coordinator of a run as a process of its own, without a launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from stretto.process_config import CoordinatorConfig
from stretto.run_config import RunConfig
from stretto.security import RunKeys

LIMIT_S = 120.0
START_S = 60.0
"""Seconds within which a process imports torch on a busy machine."""


class CoordinatorProcess:
    """A coordinator in a process of its own, that can be killed and started again at the same socket."""

    def __init__(
        self,
        folder: Path,
        expected: int,
        keys: RunKeys,
        failure_timeout_s: float = START_S,
        has_dispatcher: bool = False,
    ) -> None:
        self.folder = folder
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.dispatcher = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self.listener.getsockname())
        config = CoordinatorConfig(
            run=str(folder),
            listen_fd=self.listener.fileno(),
            dispatcher_fd=self.dispatcher.fileno() if has_dispatcher else None,
            options=RunConfig(Path("train.py"), workers=expected, failure_timeout_s=failure_timeout_s),
            zero=time.perf_counter(),
            keys=(keys.secret,),
        )
        self.environment = {**os.environ, **config.environment()}
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "stretto.launcher.coordinator_main"]
        sockets = [self.listener.fileno(), self.dispatcher.fileno()]
        self.process = subprocess.Popen(command, env=self.environment, pass_fds=sockets)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(LIMIT_S) in (0, -signal.SIGKILL)
        self.listener.close()
        self.dispatcher.close()
