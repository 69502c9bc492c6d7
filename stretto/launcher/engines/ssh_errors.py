"""Explanations of how an agent that ssh carried has ended: the host, the cause, and what to type."""

from __future__ import annotations

import re

from stretto.errors import explain
from stretto.run_dir import version

OF_SSH = 255
"""Exit code of ssh itself, also after a signal has ended the command. No agent exits with it."""
NOT_FOUND = (126, 127)
"""Exit codes of a shell that has no such command, or cannot run it."""
OURS = "stretto: "
LAST_LINES = 12
_CAUSES = (
    ("Host key verification failed", "the key of host {host} is not known, or has changed", "a host that ssh knows"),
    ("Permission denied", "host {host} refuses the keys of this user", "a login without a password"),
    ("Too many authentication failures", "host {host} refuses the keys of this user", "a login without a password"),
    ("Could not resolve hostname", "host {host} is not found", "a name or an address that ssh knows"),
    ("(Connection|Operation) timed out|No route|refused|unreachable", "host {host} cannot be reached", "an ssh server"),
)
_TO_TYPE = {
    "Host key verification failed": "ssh {host} true, and compare the key with that of the host",
    "Permission denied": "ssh-copy-id {host}",
    "Could not resolve hostname": "ssh {host} true, with a name of ~/.ssh/config or of the network",
}


def explained(host: str, code: int, printed: str, remote_stretto: str) -> str:
    """Return the text of an error for an exit code that is not 0 and what ssh and the agent have printed last."""
    lines = [line for line in printed.replace("\r", "").splitlines() if line.strip()]
    starts = _starts(lines)
    if code == OF_SSH:
        return _of_ssh(host, [line for line in lines if not line.startswith(OURS)])
    if code in NOT_FOUND and not starts:
        return _not_found(host, lines, remote_stretto)
    if starts:
        return _last_error(f"host {host}", lines)
    problem, expected = f"the command on host {host} ended with exit code {code}", f"Stretto {version()}"
    got = "\n    ".join(lines[-LAST_LINES:]) or "no output"
    return explain(problem, got=got, expected=expected, to_type=f"ssh {host} '{remote_stretto} --version'")


def printed_error(name: str, code: int, printed: str) -> str:
    """Return the text of an error for an exit code that is not 0 and what an agent has printed last, without ssh."""
    lines = [line for line in printed.splitlines() if line.strip()]
    if _starts(lines):
        return _last_error(name, lines)
    problem, expected = f"the agent of {name} ended with exit code {code}", f"Stretto {version()} on each node"
    got = "\n    ".join(lines[-LAST_LINES:]) or "no output"
    return explain(problem, got=got, expected=expected, to_type="pip install stretto on each node, or in its image")


def _starts(lines: list[str]) -> list[int]:
    return [number for number, line in enumerate(lines) if line.startswith(OURS)]


def _last_error(name: str, lines: list[str]) -> str:
    """Return the last error of Stretto's own in these lines."""
    start = _starts(lines)[-1]
    return f"{name}: " + "\n".join([lines[start].removeprefix(OURS), *lines[start + 1 :]])


def _of_ssh(host: str, lines: list[str]) -> str:
    printed = "\n".join(lines)
    for sign, problem, expected in _CAUSES:
        if re.search(sign, printed):
            to_type = _TO_TYPE.get(sign, "ssh {host} true")
            got = _line_with(sign, lines)
            return explain(problem.format(host=host), got=got, expected=expected, to_type=to_type.format(host=host))
    problem, got = f"the connection to host {host} has ended", lines[-1] if lines else "no reason"
    return explain(problem, got=got, expected="a connection until the end of the run", to_type=f"ssh {host} true")


def _line_with(sign: str, lines: list[str]) -> str:
    return next(line for line in lines if re.search(sign, line))


def _not_found(host: str, lines: list[str], remote_stretto: str) -> str:
    problem = f"host {host} has no command {remote_stretto}"
    expected = f"Stretto {version()}, at a path that a command over ssh finds"
    got = lines[-1] if lines else "no output"
    return explain(problem, got=got, expected=expected, to_type='--remote-stretto "~/venv/bin/stretto"')
