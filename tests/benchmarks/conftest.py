"""Makes the benchmarks importable: they are not part of the package, but a folder of the project."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
