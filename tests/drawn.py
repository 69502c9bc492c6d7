"""How long laws of whoever dies look for a counterexample: `STRETTO_DRAWN=40` draws forty times as many examples."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("STRETTO_DRAWN", "1"))
