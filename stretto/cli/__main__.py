"""Entry point of the command line, as `stretto` and as `python -m stretto.cli`.

Ctrl-C while the command line is imported ends the process with code 130, without a traceback.
"""

import os
import signal
import sys


def main() -> None:
    """Import and run the command line."""
    try:
        from stretto.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("stretto: stopped", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
