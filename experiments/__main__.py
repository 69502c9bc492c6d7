"""Run the experiments, or the named ones, and write docs/experiments.md: `python -m experiments [NAME ...]`.

`python -m experiments convex DATA` runs the convex study.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from experiments import page
from experiments.catalogue import EXPERIMENTS


def main() -> None:
    """Run the experiments given on the command line. The results of --quick are printed and not saved."""
    if sys.argv[1:2] == ["convex"]:
        from experiments.convex import command

        sys.exit(command.main(sys.argv[2:]))
    asked = _options().parse_args()
    names = asked.names or list(EXPERIMENTS)
    if asked.quick:
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                _try(name, Path(folder))
        return
    for name in names:
        if name != "page":
            EXPERIMENTS[name].run()
    page.write()
    print(f"written to {page.PAGE}")


def _try(name: str, folder: Path) -> None:
    experiment = EXPERIMENTS[name]
    experiment.run(quick=True, folder=folder)
    found = experiment.kept(folder)
    assert found is not None
    print("\n".join(experiment.table(found)))
    print(experiment.verdict(found))


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    names = [*EXPERIMENTS, "page"]
    about = f"{', '.join(names)}; all without a name; page only writes docs/experiments.md"
    options.add_argument("names", nargs="*", metavar="NAME", choices=[*names, []], help=about)
    options.add_argument("--quick", action="store_true", help="few and short simulations, printed and not saved")
    return options


if __name__ == "__main__":
    main()
