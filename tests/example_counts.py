"""Number of examples of property tests under the profile of hypothesis: `short`, or `long` by `make test-long`."""

from __future__ import annotations

from hypothesis import settings

WRITTEN = 100
"""`max_examples` of a profile in which tests draw the number of examples that they name."""


def examples(count: int) -> int:
    """Return the number of examples to draw for a test that names this number."""
    return max(3, count * settings.default.max_examples // WRITTEN)
