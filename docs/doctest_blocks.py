"""An extension of griffe for the site: doctests in docstrings become code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?:^|(?<=\n))(?P<indent> *)>>> .*(?:\n(?! *$).*)*")


class DoctestBlocks(griffe.Extension):  # type: ignore[misc]
    """Fences each doctest, from its first prompt to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return a docstring whose doctests are fenced.

    >>> print(fenced("Add.\\n\\n>>> 1 + 1\\n2\\n\\nEnd."))
    Add.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    End.
    """
    return _DOCTEST.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text)
