"""Entry point of a server process, which holds one shard of the parameters until the launcher ends it.

Started as `python -P -m stretto.launcher.shard_main`, with its configuration in the environment.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from types import FrameType
from typing import NoReturn

import msgspec

from stretto.launcher.process_specs import server_of
from stretto.launcher.worker_main import begin, fail, log_in
from stretto.process_config import VARIABLE, ConfigT, ShardConfig
from stretto.run_config import decode_path


def main() -> None:
    """Serve until SIGTERM. An error goes to the launcher and the event log, and the process exits immediately."""
    signal.signal(signal.SIGTERM, leave)
    config = own_config(ShardConfig)
    try:
        from stretto.parameter_server.rpc_server import serve  # imports torch: SIGTERM has its handler before that

        serve(config)
    except BaseException as error:
        fail(error, server_of(config.shard), log_in(config.run))
    leave()


def own_config(kind: type[ConfigT]) -> ConfigT:
    """Begin the process of a service; return its configuration, which its children do not find in their environment.

    The process may have as many connections as the system allows: those of strangers stay for a while.
    """
    _, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (largest, largest))
    return begin(msgspec.json.decode(os.environ.pop(VARIABLE), type=kind, dec_hook=decode_path))


def leave(_number: int = 0, _frame: FrameType | None = None) -> NoReturn:
    """Exit with code 0 immediately, without waiting for threads or exit handlers."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
