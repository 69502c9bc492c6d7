"""The command `stretto bits`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from stretto.bits.outcome import GD, Outcome
from stretto.bits.progress import Progress
from stretto.launcher.local import Stopped
from stretto.report.run_record import STANDARD_OUTPUT, check_target, write_json
from stretto.run_dir import describe, make_folder

if TYPE_CHECKING:
    from stretto.bits.methods import Method
    from stretto.bits.optimum import Optimum
    from stretto.bits.problem import Problem
    from stretto.bits.results import Results
    from stretto.bits.work import Terms

DEFAULTS = (
    "gd",
    "gd_sec(beta=0.01, xi=100)",
    "quantised_gd_sec(beta=0.01, xi=100)",
    "ef21(top_k(0.05))",
    "censoring(xi=1)",
    "Recipe(how=quantise(8))",
    "Recipe(how=error_feedback(top_k(0.1)))",
)


def bits(
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="A LIBSVM text file, or MNIST's idx files: their folder, or the images."),
    ],
    *,
    problem: Annotated[Literal["logistic", "linear", "lasso"], typer.Option(help="What is fitted.")] = "logistic",
    workers: Annotated[int, typer.Option("-n", "--workers", metavar="N", help="Equal consecutive shards.")] = 10,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RECIPE",
            help='gd, or a recipe that exchanges gradients, xi in units of L: "gd_sec(beta=0.01, xi=100)"; '
            "may be given again. Without it, a choice of them.",
        ),
    ] = None,
    l2: Annotated[float | None, typer.Option(help="l2/2 |theta|^2 is added; else 0.01, in the lasso 0.")] = None,
    l1: Annotated[float, typer.Option(help="l1 |theta|_1 is added in the lasso.")] = 0.01,
    rows: Annotated[int | None, typer.Option(metavar="N", help="Only the first rows of the file.")] = None,
    labels: Annotated[Literal["even"] | None, typer.Option(help="even: +1 for even labels, -1 for odd ones.")] = None,
    target: Annotated[float, typer.Option(help="The objective error F - F* that ends a run.")] = 1e-8,
    rounds: Annotated[
        int | None,
        typer.Option(metavar="N", help="The most rounds of a method; else five times gd's, at least 1000."),
    ] = None,
    float64: Annotated[
        bool, typer.Option("--float64", help="Compute in double precision; numbers are sent as float32 all the same.")
    ] = False,
    live: Annotated[bool, typer.Option("--live", help="On worker processes instead of in memory.")] = False,
    json_to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write a record of each method; - for here.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; else runs/DATE-bits-NAME.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the result.")] = False,
) -> None:
    """Count the rounds and bits that each METHOD needs to solve a convex problem on DATA.

    Gradient descent with steps of 1/L over N workers: worker m sends what the method makes of its share of the
    gradient. Uplink bits are those of the real encoded messages, heads included; gd sends 32 bits a number.
    """
    from stretto.bits import data as files
    from stretto.bits import problem as problems
    from stretto.bits.live import check as check_live
    from stretto.bits.methods import method as read_method
    from stretto.bits.work import Terms

    check_target(json_to, "bits.json")
    asked = problems.build(problem, files.read(data, rows), labels=labels, l2=l2, l1=l1)
    terms = Terms(workers, target, rounds, float64, live)
    terms.check(asked)
    if live:
        check_live(terms)
    methods = [read_method(name, asked.smoothness) for name in dict.fromkeys(method or DEFAULTS)]
    progress = Progress(Console(stderr=True), len(methods), quiet)
    results = _made(_Question(data, asked, terms, methods), out, progress)
    _conclude(results, json_to)


@dataclass(frozen=True)
class _Question:
    path: Path
    problem: Problem
    terms: Terms
    methods: Sequence[Method]

    def describe(self, best: Optimum) -> dict[str, Any]:
        """What bits.json says was asked."""
        problem, terms = self.problem, self.terms
        return {
            "data": str(self.path),
            "problem": problem.kind,
            "rows": problem.rows,
            "features": problem.wide,
            "workers": terms.workers,
            "l2": problem.l2,
            "l1": problem.l1,
            "target": terms.target,
            "rounds": terms.most,
            "float64": terms.double,
            "live": terms.live,
            "smoothness": problem.smoothness,
            "optimum": best.value,
            "optimum_slack": None if math.isnan(best.slack) else best.slack,
            "warnings": [one.warning for one in self.methods if one.warning],
        }


def _made(question: _Question, out: Path | None, progress: Progress) -> Results:
    from stretto.bits.optimum import optimum
    from stretto.bits.results import Results

    for warning in (one.warning for one in question.methods if one.warning):
        progress.say(f"warning: {warning}")
    progress.begin("looking for the optimum")
    try:
        best = optimum(question.problem, question.terms.target)
    finally:
        progress.close()
    now = datetime.now()
    folder = make_folder(f"bits-{question.path.stem}", out, now)
    results = Results(folder, describe(question.describe(best), now))
    try:
        _fill(results, question, best, progress)
    except (KeyboardInterrupt, Stopped):
        progress.close()
        done = f"{len(results.outcomes)} of {len(question.methods)} methods are done"
        progress.say(f"{done}; the page of those: stretto report {folder}")
        raise
    finally:
        progress.close()
    return results


def _fill(results: Results, question: _Question, best: Optimum, progress: Progress) -> None:
    """Run the methods one after another; first gradient descent, by which they are measured, asked for or not."""
    from stretto.bits.methods import method as read_method
    from stretto.bits.work import descend

    problem, terms = question.problem, question.terms
    progress.begin(f"{GD}, to measure by")
    gd = results.gd = descend(problem, best, read_method(GD, problem.smoothness), terms, progress.seen)
    terms = terms.after(gd)
    for place, method in enumerate(question.methods, start=1):
        progress.method(method.name)
        if terms.live:
            outcome = _alive(question, best, method, terms, results.folder / f"live-{place}", progress)
        else:
            outcome = gd if method.name == GD else descend(problem, best, method, terms, progress.seen)
        results.add(outcome)
        progress.end(outcome, timed=outcome is not gd)


def _alive(
    question: _Question, best: Optimum, method: Method, terms: Terms, folder: Path, progress: Progress
) -> Outcome:
    from stretto.bits import live

    progress.close()
    return live.descend(question.problem, best, method, terms, folder, progress.watch())


def _conclude(results: Results, json_to: Path | None) -> None:
    """The table, the page and the JSON."""
    from stretto.bits import page
    from stretto.bits.results import read

    console = Console(stderr=str(json_to) == STANDARD_OUTPUT)
    page.show(console, read(results.folder))
    console.print(Text(f"page: {page.write(results.folder)}"), soft_wrap=True)
    if json_to is not None:
        write_json(json_to, results.records())
