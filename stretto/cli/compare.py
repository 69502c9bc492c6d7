"""The command `stretto compare`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from stretto.cli.options import configured, json_option
from stretto.cli.script_arguments import recipe_names
from stretto.compare.progress import Progress
from stretto.compare.runner import Comparison
from stretto.compare.trials import Question, ask, trials
from stretto.launcher.local import Stopped
from stretto.report.run_record import STANDARD_OUTPUT, check_target, write_json
from stretto.report.tables import sheets, show
from stretto.report.verdict import verdict
from stretto.run_config import OUTPUT, WORKERS, RunConfig
from stretto.run_dir import make_folder

DEFAULT_WORKERS = "4"
FAILED = 1


@configured(
    "module",
    "threads",
    "stragglers",
    "global_batch",
    "shares",
    "max_batch",
    "uneven",
    "lr_scale",
    "servers",
    "timeout_s",
    file=False,
)
def compare(
    context: typer.Context,  # noqa: ARG001
    config: RunConfig,
    *,
    workers: Annotated[
        str,
        typer.Option(
            "-n",
            "--workers",
            metavar="N[,N]...",
            help="Number of workers, or several numbers to try.",
            rich_help_panel=WORKERS,
        ),
    ] = DEFAULT_WORKERS,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=recipe_names,
            metavar="RECIPE",
            show_default="none",
            help="A recipe to try; may be repeated.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYOUT",
            show_default="whole()",
            help="A layout to try with each recipe; may be repeated. -n then counts the processes of all workers.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Number of repetitions, each with another seed.", rich_help_panel=WORKERS)
    ] = 1,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            show_default="none",
            help='Metric that counts as done: "test_accuracy>=0.95".',
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(show_default="runs/DATE-compare-NAME", help="Folder of the comparison.", rich_help_panel=OUTPUT),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only the result.", rich_help_panel=OUTPUT)] = False,
    json_to: Annotated[
        Path | None,
        json_option("the records of the runs and the verdict"),
    ] = None,
) -> None:
    """Run SCRIPT in a single process and under each recipe and layout, and compare model, metrics, speed and traffic.

    Options stand before SCRIPT; everything after SCRIPT is passed to it unchanged.
    """
    check_target(json_to, "compare.json")
    question = ask(config, workers=workers, recipes=recipe or (), seeds=seeds, target=target, layouts=layout or ())
    folder = make_folder(f"compare-{config.name}", out, datetime.now())
    comparison = _run(question, folder, quiet)
    _conclude(comparison, json_to)
    if comparison.failed():
        raise typer.Exit(FAILED)


def _run(question: Question, folder: Path, quiet: bool) -> Comparison:
    progress = Progress(trials(question), Console(stderr=True), quiet)
    comparison = Comparison(question, folder, progress)
    try:
        comparison.run()
    except (Stopped, KeyboardInterrupt):
        completed = f"{len(comparison.records)} of {len(comparison.trials)} runs are done"
        progress.say(f"{completed}; write their page with: stretto report {folder}")
        raise
    return comparison


def _conclude(comparison: Comparison, json_to: Path | None) -> None:
    """Write the page and the JSON, and print the tables and the verdict."""
    from stretto.report import html_report, stages_section

    records, target = list(comparison.records.values()), comparison.question.target
    written = html_report.write(comparison.folder)
    console = Console(stderr=str(json_to) == STANDARD_OUTPUT)
    show(console, [*sheets(records, target), *stages_section.of_recipes(records)])
    console.print(Text(str(verdict(records, target)), style="bold"))
    for failed in comparison.failed():
        first_line = str(failed["failed"]).partition("\n")[0]
        console.print(Text(f"failed: {failed['folder']}: {first_line}"), soft_wrap=True)
    console.print(Text(f"page: {written}"), soft_wrap=True)
    if json_to is not None:
        runs = [{**record, "folder": str(comparison.folder / record["folder"])} for record in records]
        write_json(json_to, comparison.described() | {"runs": runs})
