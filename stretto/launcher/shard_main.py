"""One server process: holds a shard of the parameters until the launcher ends it.

Started as `python -P -m stretto.launcher.shard_main`, with its place in the environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, cast

from stretto.launcher.process_specs import server_of
from stretto.launcher.worker_main import fail, speak_in_lines


def main() -> None:
    """Serve until SIGTERM. An error goes to the event log, and the process ends at once."""
    signal.signal(signal.SIGTERM, leave)
    speak_in_lines()
    try:
        _serve()
    except BaseException as error:
        fail(error, server_of(int(os.environ["STRETTO_SHARD"])))
    leave()


def _serve() -> None:
    from stretto.parameter_server.rpc_server import ShardConfig, serve  # and with it torch: a SIGTERM before is heeded

    given = os.environ
    place = ShardConfig(
        shard=int(given["STRETTO_SHARD"]),
        shards=int(given["STRETTO_SHARDS"]),
        workers=int(given["STRETTO_WORLD_SIZE"]),
        listen_fd=int(given["STRETTO_LISTEN_FD"]),
        coordinator_fd=int(given["STRETTO_COORDINATOR_FD"]) if "STRETTO_COORDINATOR_FD" in given else None,
        keys=keys_in(given.pop("STRETTO_SERVER_KEYS", None)),
        on_nan=cast(Literal["stop", "skip"], given["STRETTO_ON_NAN"]),
        timeout_s=float(given["STRETTO_TIMEOUT"]),
        cuts=Path(given["STRETTO_CUTS"]) if "STRETTO_CUTS" in given else None,
        cut_every_s=float(given["STRETTO_CUT_EVERY"]) if "STRETTO_CUT_EVERY" in given else None,
    )
    serve(place)


def keys_in(text: str | None) -> tuple[str, str, str] | None:
    """The server's secret and public keys and the workers' public one; None when nothing is encrypted."""
    if text is None:
        return None
    secret, public, workers = text.split(",")
    return secret, public, workers


def leave(_number: int = 0, _frame: FrameType | None = None) -> NoReturn:
    """End in peace, at once: neither a thread nor an exit handler may hold it up."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
