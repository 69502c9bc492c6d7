"""The command `stretto compare`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from stretto.compare.plan import Question, ask, trials
from stretto.compare.progress import Progress
from stretto.compare.runs import Comparison
from stretto.folder import make_folder
from stretto.launch.local import Stopped
from stretto.report.record import STANDARD_OUTPUT, check_target, write_json
from stretto.report.table import show
from stretto.report.verdict import verdict

DEFAULT_WORKERS = "4"
FAILED = 1


def compare(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The Python file to train with.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    workers: Annotated[
        str, typer.Option("-n", "--workers", metavar="N[,N]...", help="How many, or several numbers to try.")
    ] = DEFAULT_WORKERS,
    recipe: Annotated[list[str] | None, typer.Option(help="A recipe to try; may be given again.")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="TEXT", help='What counts as done: "test_accuracy>=0.95".')
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="How often, each time with another seed.")] = 1,
    json_to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the records of the runs; - for here.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; else runs/DATE-compare-NAME.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Per worker.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of a wait in which nothing comes.")] = 600.0,
    servers: Annotated[
        int | None, typer.Option(metavar="N", help="Shards of the server, for recipes that have one.")
    ] = None,
    slow: Annotated[
        str | None, typer.Option(metavar="WORKER:FACTOR,...", help='Slow workers down on purpose: "1:2.0,3:5.0".')
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the result.")] = False,
) -> None:
    """Run SCRIPT alone and under each recipe: same state? how fast? at what cost? worth it?

    Options that are not ours go to the script, as does everything after --.
    """
    check_target(json_to, "compare.json")
    question = ask(
        script,
        args or (),
        workers=workers,
        recipes=recipe or (),
        seeds=seeds,
        target=target,
        threads=threads,
        timeout_s=timeout,
        servers=servers,
        slow=slow,
    )
    folder = make_folder(f"compare-{script.stem}", out, datetime.now())
    comparison = _made(question, folder, quiet)
    _conclude(comparison, json_to)
    if comparison.failed():
        raise typer.Exit(FAILED)


def _made(question: Question, folder: Path, quiet: bool) -> Comparison:
    progress = Progress(trials(question), Console(stderr=True), quiet)
    comparison = Comparison(question, folder, progress)
    try:
        comparison.make()
    except (Stopped, KeyboardInterrupt):
        done = f"{len(comparison.records)} of {len(comparison.trials)} runs are done"
        progress.say(f"{done}; the page of those: stretto report {folder}")
        raise
    return comparison


def _conclude(comparison: Comparison, json_to: Path | None) -> None:
    """The page, the tables, the sentence and the JSON."""
    from stretto.report import page

    records, target = list(comparison.records.values()), comparison.question.target
    written = page.write(comparison.folder)
    console = Console(stderr=str(json_to) == STANDARD_OUTPUT)
    show(console, records, target)
    console.print(Text(str(verdict(records, target)), style="bold"))
    for failed in comparison.failed():
        first = str(failed["failed"]).partition("\n")[0]
        console.print(Text(f"failed: {failed['folder']}: {first}"), soft_wrap=True)
    console.print(Text(f"page: {written}"), soft_wrap=True)
    if json_to is not None:
        write_json(json_to, [{**one, "folder": str(comparison.folder / one["folder"])} for one in records])
