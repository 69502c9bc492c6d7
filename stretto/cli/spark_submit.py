"""Program for spark-submit: `spark-submit ... "$(python -m stretto.cli.spark_submit)" -n 4 train.py`.

It is `stretto run --on spark -n 4 train.py` with the settings and resources that spark-submit gives to its driver.
Without arguments it prints its own path.
"""

from __future__ import annotations

import sys

from stretto.cli.main import command


def main() -> int:
    """Run the command line, or print the path of this file, and return the exit code."""
    if sys.argv[1:]:
        return command(["run", "--on", "spark", *sys.argv[1:]])
    print(__file__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
