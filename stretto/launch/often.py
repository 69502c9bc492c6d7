"""How often something is done: `5m` of time, or `20 rounds`."""

from __future__ import annotations

import re

from stretto.errors import LaunchError, explain
from stretto.quantities import seconds, spelled

ROUNDS = re.compile(r"([1-9][0-9]{0,8})\s*(?:r|rounds?)", re.ASCII | re.IGNORECASE)


def often(text: str) -> str:
    """The same in seconds or rounds, as workers are told it. Raises LaunchError for what is neither.

    >>> often("5m"), often("500ms"), often("20 rounds"), often("1 round")
    ('300s', '0.5s', '20r', '1r')
    """
    found = text.strip()
    rounds, time = ROUNDS.fullmatch(found), seconds(found)
    if rounds is not None:
        return f"{rounds[1]}r"
    if time:
        return f"{spelled(time)}s"
    expected = "a time such as 30s, 5m, 1h, or a number of rounds such as 20 rounds"
    problem = f"a checkpoint cannot be written every {text!r}"
    raise LaunchError(explain(problem, got=text, expected=expected, to_type="--checkpoint-every 5m"))
