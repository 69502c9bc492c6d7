"""The experiments are no part of the package: they are imported from the folder of the project."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
