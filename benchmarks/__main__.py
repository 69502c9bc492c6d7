"""`python -m benchmarks [NAME ...]`: the quick benchmarks, or those that are named."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from benchmarks import against, averaging, ddp, figures, lab, line, overlap, server, unequal, updates
from benchmarks.race import WAYS

QUICK = {"line": line.run, "ddp": ddp.run, "averaging": averaging.run}
LONG = {
    "server": server.run,
    "updates": updates.run,
    "peers": against.run,
    "overlap": overlap.run,
    "unequal": unequal.run,
}

STARTS = "of the processes, for each side, or seeds of unequal; fewer are quicker and noisier, and kept as a trial"


def main() -> None:
    """Run what was asked for."""
    asked = _options().parse_args()
    for name in asked.names or QUICK:
        if name == "lab":
            ways = tuple(asked.way or WAYS)
            lab.run(lab.Terms(seeds=range(asked.seeds), ways=ways, target=asked.target, limit_s=asked.limit))
        elif name == "figures":
            figures.write()
        else:
            (QUICK | LONG)[name](asked.starts)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*QUICK, *LONG, "lab", "figures"]
    about = f"{', '.join(names)}; without a name {', '.join(QUICK)}; figures writes docs/figures.md"
    options.add_argument("names", nargs="*", metavar="NAME", type=_one_of(names), help=about)
    options.add_argument("--starts", type=_count, help=STARTS)
    only = options.add_argument_group("lab")
    only.add_argument("--seeds", type=_count, default=1, help="repeat with so many seeds (1)")
    only.add_argument("--way", action="append", choices=WAYS, help="only this way; may be given several times")
    only.add_argument("--target", type=float, default=0.975, help="test accuracy that ends a run (0.975)")
    only.add_argument("--limit", type=float, default=900.0, help="seconds after which a way is given up (900)")
    return options


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"there is no {text}; there are {', '.join(names)}")
        return text

    return name


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    main()
