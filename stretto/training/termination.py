"""SIGTERM at a worker, as a spot machine gets it before it is taken away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def heed_termination(hear: Callable[[], object]) -> None:
    """Call `hear` when SIGTERM comes, unless the program has a handler of its own.

    A child that the program forks ends at SIGTERM, as without this handler. The signal is blocked during the fork:
    a child that was sent one before its handler is the default again would lose it, and who waits for it (as
    `multiprocessing.Pool.terminate` does) would wait for ever.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    masks: list[set[int]] = []

    def block() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]))

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def reset() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    signal.signal(signal.SIGTERM, lambda _number, _frame: hear())
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)
