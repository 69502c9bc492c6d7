"""Number of examples of property tests with failures: `STRETTO_DRAWN=40` draws forty times as many."""

from __future__ import annotations

import os

EXAMPLES_FACTOR = int(os.environ.get("STRETTO_DRAWN", "1"))
