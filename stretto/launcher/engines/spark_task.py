"""Task of Spark that runs one agent, `stretto join`, and returns its exit code and last lines.

The agent has a pipe from the task's process as its standard input: it lets its workers leave and exits when that
process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LOST = -9
"""Exit code of an agent whose task was lost."""
TAIL_BYTES = 1 << 14
ROOT = Path(__file__).resolve().parents[3]


def run_agent(words: Sequence[str], key: bytes, _element: int = 0) -> tuple[int, bytes]:
    """Run an agent until its exit: the words after `stretto`, and a line for its standard input.

    Another attempt of Spark at the same task runs none: the launcher has submitted another job by then.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None and context.attemptNumber() > 0:
        return LOST, b"stretto: its task was lost\n"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "stretto.cli", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    ) as agent:
        assert agent.stdin is not None
        assert agent.stderr is not None
        with contextlib.suppress(OSError):  # it has exited: the reason is in what it printed
            os.write(agent.stdin.fileno(), key)
        printed = b""
        while data := os.read(agent.stderr.fileno(), TAIL_BYTES):
            printed = (printed + data)[-TAIL_BYTES:]
        return agent.wait(), printed
