"""Entry point of the process at the port of `--listen`, which leads to the coordinator and relays between hosts.

Started as `python -P -m stretto.launcher.relay_main`, with its configuration in the environment.
"""

from __future__ import annotations

import signal
import socket

from stretto.events import RELAY
from stretto.launcher.shard_main import leave, own_config
from stretto.launcher.worker_main import fail, log_in
from stretto.process_config import RelayConfig


def main() -> None:
    """Serve until SIGTERM. An error goes to the launcher and the event log, and the process exits immediately."""
    signal.signal(signal.SIGTERM, leave)
    config = own_config(RelayConfig)
    try:
        from stretto.relay import serve  # imports zmq: SIGTERM has its handler before that

        secret = "".join(config.keys or ()).encode()
        serve(socket.socket(fileno=config.listen_fd), secret, config.coordinator, config.services, config.options.relay)
    except BaseException as error:
        fail(error, RELAY, log_in(config.run))
    leave()


if __name__ == "__main__":
    main()
