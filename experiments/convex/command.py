"""Command line of the convex study: `python -m experiments convex DATA`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer.exceptions import TyperException

from experiments.convex import data as files
from experiments.convex import problem as problems
from experiments.convex import records
from experiments.convex.descent import Outcome, Settings, descend
from experiments.convex.methods import GD, Method, method
from experiments.convex.optimum import Optimum, optimum
from experiments.convex.problem import Problem
from stretto.errors import StrettoError
from stretto.report import formatting
from stretto.report.run_record import STANDARD_OUTPUT, check_target, write_json

DEFAULTS = (
    "gd",
    "gd_sec(beta=0.01, xi=100)",
    "quantised_gd_sec(beta=0.01, xi=100)",
    "ef21(top_k(0.05))",
    "censoring(xi=1)",
    "Recipe(how=quantise(8))",
    "Recipe(how=error_feedback(top_k(0.1)))",
)
PROGRAM = "python -m experiments convex"
app = typer.Typer(name="convex", add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=f'Example: {PROGRAM} a9a --rows 5000 --method gd --method "gd_sec(xi=100)"')
def convex(
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="A LIBSVM text file, or MNIST's idx files: their folder, or the images."),
    ],
    *,
    problem: Annotated[Literal["logistic", "linear", "lasso"], typer.Option(help="Objective.")] = "logistic",
    workers: Annotated[int, typer.Option("-n", "--workers", metavar="N", help="Number of workers.")] = 10,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="RECIPE",
            help='gd, or a recipe that exchanges gradients, with xi in units of L: "gd_sec(beta=0.01, xi=100)"; '
            "repeatable. Default: seven methods.",
        ),
    ] = None,
    l2: Annotated[float | None, typer.Option(help="Weight of l2/2 |theta|^2. Default: 0.01, in the lasso 0.")] = None,
    l1: Annotated[float, typer.Option(help="Weight of l1 |theta|_1 in the lasso.")] = 0.01,
    rows: Annotated[int | None, typer.Option(metavar="N", help="Use only the first N rows.")] = None,
    labels: Annotated[Literal["even"] | None, typer.Option(help="even: +1 for even labels, -1 for odd ones.")] = None,
    target: Annotated[float, typer.Option(help="Objective error F - F* that ends a run.")] = 1e-8,
    rounds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Limit of rounds. Default: five times those of gd, at least 1000."),
    ] = None,
    float64: Annotated[
        bool, typer.Option("--float64", help="Compute in double precision; messages stay float32.")
    ] = False,
    json_to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write one record for each method; - for stdout.")
    ] = None,
) -> None:
    """Count the rounds and bits that each METHOD needs to solve a convex problem on DATA.

    Gradient descent with steps of 1/L over N workers; worker m sends its share of the gradient as the method encodes
    it. Uplink bits are those of the real encoded messages, headers included; gd sends 32 bits a number.
    """
    check_target(json_to, "convex.json")
    built = problems.build(problem, files.read(data, rows), labels=labels, l2=l2, l1=l1)
    settings = Settings(workers, target, rounds, float64)
    settings.check(built)
    chosen = [method(text, built.smoothness) for text in dict.fromkeys(methods or DEFAULTS)]
    console = Console(stderr=True)
    for each in chosen:
        if each.warning:
            console.print(Text(f"warning: {each.warning}"), soft_wrap=True)
    gd, outcomes = None, []
    with console.status("optimum and gradient descent"):
        best = optimum(built, target)
        gd = descend(built, best, method(GD, built.smoothness), settings)
    for outcome in _run(built, best, chosen, settings.after(gd), gd, console):
        outcomes.append(records.record(outcome, gd))
    _print(outcomes, built, settings, json_to)


def _run(
    problem: Problem, best: Optimum, methods: Sequence[Method], settings: Settings, gd: Outcome, console: Console
) -> Iterator[Outcome]:
    """Run the methods one after another and print a line for each; gradient descent has run already."""
    for place, each in enumerate(methods, start=1):
        with console.status(each.name):
            outcome = gd if each.name == GD else descend(problem, best, each, settings)
        state = "reached" if outcome.reached else "not reached"
        rounds = formatting.plural(outcome.rounds, "round")
        line = f"[{place} of {len(methods)}] {each.name}: {state} in {rounds}, {outcome.uplink_bits:,} bits"
        console.print(Text(line), soft_wrap=True)
        yield outcome


def _print(found: Sequence[records.Record], problem: Problem, settings: Settings, json_to: Path | None) -> None:
    console = Console(stderr=str(json_to) == STANDARD_OUTPUT)
    size = f"{problem.rows:,} rows of {problem.features:,} features, {settings.workers} workers"
    terms = f"l2 {problem.l2:g}" + (f", l1 {problem.l1:g}" if problem.l1 else "")
    note = f"{problem.kind} on {problem.name}: {size}, {terms}, L {problem.smoothness:.6g}, until F - F* <= "
    console.print(Text(f"{note}{settings.target:g}", style="dim"), soft_wrap=True)
    console.print(records.table(found))
    console.print()
    console.print(Text(records.verdict(found, settings.target), style="bold"))
    if json_to is not None:
        write_json(json_to, found)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    try:
        command = typer.main.get_command(app)
        return int(command.main(list(arguments) or ["--help"], prog_name=PROGRAM, standalone_mode=False) or 0)
    except (StrettoError, TyperException) as error:
        text = error.format_message() if isinstance(error, TyperException) else str(error)
        print(f"convex: {text}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, StrettoError) else 2
    except KeyboardInterrupt:
        print("convex: stopped", file=sys.stderr, flush=True)
        return 130
