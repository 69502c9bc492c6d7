"""Options that several commands share, each declared once with its help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli.script_arguments import FAILURES, OUTPUT, SERVER, WORKERS
from stretto.errors import explain
from stretto.launcher import config
from stretto.units import seconds


def whole_number(text: str | int) -> int:
    """Return the number that was typed. Raises BadParameter."""
    try:
        return int(text)
    except ValueError:
        expected = "a whole number"
        problem = f"{text} is not a whole number"
        raise typer.BadParameter(explain(problem, got=text, expected=expected, to_type="4")) from None


def duration(text: str | float) -> float:
    """Return the seconds of a time that was typed. Raises BadParameter."""
    found = text if isinstance(text, float) else seconds(text)
    if found is None:
        expected = "a time such as 500ms, 10s, 2m"
        raise typer.BadParameter(explain(f"{text} is not a time", got=text, expected=expected, to_type="10s"))
    return found


def workers_option(**more: Any) -> Any:
    """Return the option -n, of a number or a text."""
    text = "Number of workers."
    return typer.Option("-n", "--workers", metavar="N", help=text, rich_help_panel=WORKERS, **more)


def servers_option(**more: Any) -> Any:
    """Return the option --servers, of a number or a text."""
    text = "Run the recipe over a parameter server of N shards."
    return typer.Option(metavar="N", show_default="the recipe's", help=text, rich_help_panel=SERVER, **more)


def min_workers_option(**more: Any) -> Any:
    """Return the option --min-workers, of a number or a text."""
    text = "End the run when fewer workers are left."
    return typer.Option(metavar="N", help=text, rich_help_panel=FAILURES, **more)


def max_workers_option(**more: Any) -> Any:
    """Return the option --max-workers, of a number or a text."""
    text = "Admit no more workers than this."
    return typer.Option(metavar="N", show_default="no limit", help=text, rich_help_panel=FAILURES, **more)


OnNan = Annotated[
    config.OnNan,
    typer.Option(help="End the run at an update that is not finite, or skip the update.", rich_help_panel=SERVER),
]
FailureTimeout = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Declare a process failed after this long without a heartbeat.",
        rich_help_panel=FAILURES,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Longest wait for a message of another process.", rich_help_panel=FAILURES),
]
OnResize = Annotated[
    config.Batch,
    typer.Option(
        help="Batch size kept when the number of workers changes: each worker's own, or the global batch.",
        rich_help_panel=FAILURES,
    ),
]
Out = Annotated[Path | None, typer.Option(show_default="runs/DATE-NAME", help="Run folder.", rich_help_panel=OUTPUT)]
Output = Annotated[
    config.Output,
    typer.Option(help="Output that is shown: of worker 0, of all workers, or none.", rich_help_panel=OUTPUT),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show only the script's output.", rich_help_panel=OUTPUT)]
JsonTo = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        show_default="none",
        help="File for the run record; - for the standard output.",
        rich_help_panel=OUTPUT,
    ),
]
