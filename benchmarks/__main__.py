"""`python -m benchmarks [NAME ...]`: run the quick benchmarks, or the named ones."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import (
    against,
    averaging,
    convex,
    ddp,
    encryption,
    factorise,
    fewer,
    figures,
    floods,
    hosts,
    hunt,
    hybrid,
    kernels,
    lab,
    last_model,
    line,
    machines,
    on_ray,
    overlap,
    pipeline,
    recovery,
    relay,
    rows,
    server,
    shared_memory,
    simulated,
    simulator,
    soak,
    spark,
    survival,
    unequal,
    updates,
    upkeep,
)
from benchmarks.ways import CONTESTS

QUICK: dict[str, Callable[[int | None], Any]] = {"line": line.run, "ddp": ddp.run, "averaging": averaging.run}
LONG: dict[str, Callable[[int | None], Any]] = {
    "convex": convex.run,
    "kernels": kernels.run,
    "shared_memory": shared_memory.run,
    "hosts": hosts.run,
    "encryption": encryption.run,
    "relay": relay.run,
    "machines": machines.run,
    "floods": floods.run,
    "server": server.run,
    "updates": updates.run,
    "rows": rows.run,
    "peers": against.run,
    "overlap": overlap.run,
    "pipeline": pipeline.run,
    "hybrid": hybrid.run,
    "factorise": factorise.run,
    "unequal": unequal.run,
    "simulator": simulator.run,
    "simulated": simulated.run,
    "survival": survival.run,
    "recovery": recovery.run,
    "spark": spark.run,
    "ray": on_ray.run,
    "upkeep": upkeep.run,
    "last_model": last_model.run,
}
LABORATORY = {"lab": lab.run, "fewer": fewer.run, "shakespeare": fewer.run}

STARTS = "starts of the processes for each side (unequal: seeds); other numbers are recorded as a trial"
SEEDS = f"seeds of hunt and {', '.join(LABORATORY)}: the first N (1), or A to B"
MINUTES = f"duration of soak ({soak.MINUTES:g}); a shorter one is recorded as a trial"


def main() -> None:
    """Run the benchmarks named on the command line."""
    options = _options().parse_args()
    for name in options.names or QUICK:
        if name in LABORATORY:
            LABORATORY[name](_terms(name, options))
        elif name == "soak":
            soak.run(options.minutes)
        elif name == "hunt":
            hunt.run(options.seeds)
        elif name == "figures":
            figures.write()
        else:
            (QUICK | LONG)[name](options.starts)


def _terms(contest: str, options: argparse.Namespace) -> lab.Terms:
    ways = tuple(options.way or CONTESTS[contest])
    target = None if contest == "shakespeare" else options.target
    return lab.Terms(target=target, seeds=options.seeds, ways=ways, limit_s=options.limit, contest=contest)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*QUICK, *LONG, "soak", "hunt", *LABORATORY, "figures"]
    about = f"{', '.join(names)}; without a name {', '.join(QUICK)}; figures writes docs/figures.md"
    parser.add_argument("names", nargs="*", metavar="NAME", type=_one_of(names), help=about)
    parser.add_argument("--starts", type=_count, help=STARTS)
    parser.add_argument("--minutes", type=float, help=MINUTES)
    ways = sorted({way for contest in CONTESTS.values() for way in contest})
    parser.add_argument("--seeds", type=_seeds, metavar="N|A..B", default=range(1), help=SEEDS)
    only = parser.add_argument_group(", ".join(LABORATORY))
    only.add_argument(
        "--way",
        action="append",
        choices=ways,
        metavar="WAY",
        help=f"only this way; may be given several times: {', '.join(ways)}",
    )
    only.add_argument("--target", type=float, default=lab.Terms.target, help="test accuracy that ends a run (0.975)")
    only.add_argument("--limit", type=float, default=900.0, help="seconds after which a run is stopped (900)")
    return parser


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"there is no {text}; there are {', '.join(names)}")
        return text

    return name


def _seeds(text: str) -> range:
    """Return the seeds A to B of `A..B`, and the first N of `N`."""
    first, dots, last = text.partition("..")
    seeds = range(int(first), int(last) + 1) if dots else range(_count(text))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} has no seed")
    return seeds


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    main()
