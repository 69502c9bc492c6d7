"""Arguments of a script that look like secrets: they are left out of files and pages."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "(masked)"
_SECRET = r"secret|password|passwd|passphrase|credentials?|(?:api|access|auth|private|secret)[-_]?(?:key|token)"
_NAME = re.compile(rf"-{{1,2}}(?:[a-z0-9]+[-_])*(?:{_SECRET})", re.IGNORECASE)
"""Options whose values are secrets. A plain `--token` or `--key` names words and columns as well."""
_VALUE = re.compile(
    r"(?:hf_|gh[pousr]_|github_pat_|sk-|xox[abp]-|AKIA|AIza)[A-Za-z0-9_\-]{12,}|eyJ[\w\-]+\.eyJ[\w\-.]+"
)
"""Values that known services give out as keys."""
_ADDRESS = re.compile(r"(://[^/@\s:]*:)[^/@\s]+@")
"""A password in an address."""


def masked(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with a mask in the place of what looks like a secret.

    >>> masked(["--epochs", "3", "--api-key", "a1b2", "--db-password=x", "postgres://me:x@host/db"])
    ['--epochs', '3', '--api-key', '(masked)', '--db-password=(masked)', 'postgres://me:(masked)@host/db']
    """
    shown: list[str] = []
    follows = False
    for word in words:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-") and len(word) > 1
        if follows and not is_option:
            shown.append(MASK)
        elif equals and value and _NAME.fullmatch(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(_ADDRESS.sub(rf"\1{MASK}@", _VALUE.sub(MASK, word)))
        follows = not equals and _NAME.fullmatch(word) is not None
    return shown
