"""Extracts the README's picture: the first one of a comparison's report.

`make demo`, then `python -m benchmarks.picture runs/DATE-compare-digits` writes docs/demo.svg.
"""

from __future__ import annotations

import sys
from pathlib import Path

PICTURE = Path(__file__).parent.parent / "docs" / "demo.svg"
NAMESPACES = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
PAPER = '<rect width="100%" height="100%" fill="white"/>'


def first_picture(page: str) -> str:
    """Return the first inline SVG of a page, as a standalone file."""
    begin = page.index("<svg ")
    svg = page[begin : page.index("</svg>", begin) + len("</svg>")]
    head, _, body = svg.partition(">")
    return f"{head.replace('<svg ', NAMESPACES, 1)}>{PAPER}{body}\n"


def main() -> None:
    """Write docs/demo.svg from the comparison named on the command line."""
    PICTURE.write_text(first_picture((Path(sys.argv[1]) / "report.html").read_text()))
    print(PICTURE)


if __name__ == "__main__":
    main()
