"""The command `stretto factorise`: factors of the users and items of a file with ratings."""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from stretto.cli.options import JsonTo
from stretto.errors import LaunchError, LogError, explain
from stretto.launcher.local import run as run_locally
from stretto.launcher.progress_display import ProgressDisplay
from stretto.report.run_record import STANDARD_OUTPUT, check_target, record, write_json
from stretto.run_config import CHECKPOINTS, OUTPUT, WORKERS, RunConfig
from stretto.whole_files import is_stream, written_whole

TRAINING = "Training"
"""Heading of the help text."""


@dataclass(frozen=True)
class Factorised:
    """Result of a factorisation."""

    ratings: int
    rows: int
    columns: int
    held_out: int
    rank: int
    processes: int
    epochs: int
    rmse: float | None
    """Root of the mean squared error of the ratings that were held out; None without any."""
    seconds: float | None
    """Time of the training, without evaluations."""
    ratings_per_second: float | None
    out: str
    run: str

    def __str__(self) -> str:
        rmse = f"rmse {self.rmse:.4f} of {self.held_out} held-out ratings, " if self.rmse is not None else ""
        speed = f"{self.ratings_per_second / 1e6:.1f} M ratings/s, " if self.ratings_per_second else ""
        return f"{self.out}: rank {self.rank}, {self.rows} rows, {self.columns} columns, {rmse}{speed}run {self.run}"


def command(
    ratings: Annotated[Path, typer.Argument(metavar="RATINGS", help="Text file: row, column and value on each line.")],
    *,
    processes: Annotated[
        int, typer.Option("-n", "--processes", metavar="N", help="Number of processes.", rich_help_panel=WORKERS)
    ] = 1,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="ROW,COLUMN,VALUE",
            show_default="by heading, or the first three",
            help="Names of the columns of the file that have the rows, the columns and the values.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    rank: Annotated[
        int, typer.Option(metavar="N", help="Factors of each row and column.", rich_help_panel=TRAINING)
    ] = 32,
    epochs: Annotated[int, typer.Option(metavar="N", help="Number of epochs.", rich_help_panel=TRAINING)] = 20,
    lr: Annotated[float, typer.Option(metavar="RATE", help="Learning rate.", rich_help_panel=TRAINING)] = 0.01,
    l2: Annotated[float, typer.Option(metavar="WEIGHT", help="Weight of squares.", rich_help_panel=TRAINING)] = 0.05,
    held_out: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Share of the ratings that are not trained.", rich_help_panel=TRAINING),
    ] = 0.1,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all that is drawn.", rich_help_panel=TRAINING)] = 0,
    evaluate_every: Annotated[
        int,
        typer.Option(
            metavar="EPOCHS",
            help="Epochs between two evaluations, for which each process receives the factors of all.",
            rich_help_panel=TRAINING,
        ),
    ] = 1,
    checkpoint_every: Annotated[
        int,
        typer.Option(metavar="EPOCHS", help="Epochs between two checkpoints.", rich_help_panel=CHECKPOINTS),
    ] = 10,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            show_default="a new run",
            help="Continue from the newest checkpoint of this run, with the same ratings, processes, rank and seed.",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="File for the factors, for numpy.load.", rich_help_panel=OUTPUT)
    ] = Path("factors.npz"),
    run: Annotated[
        Path | None, typer.Option(show_default="runs/DATE-NAME", help="Run folder.", rich_help_panel=OUTPUT)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only the result.", rich_help_panel=OUTPUT)] = False,
    json_to: JsonTo = None,
) -> None:
    """Factorise the matrix of RATINGS: stochastic gradient descent with biases, in blocks of rows and columns.

    Each process trains rows of its own; blocks of columns rotate among them.
    """
    check_target(json_to, "factors.json")
    _check_whole({"-n": processes, "--rank": rank, "--epochs": epochs})
    _check_whole({"--evaluate-every": evaluate_every, "--checkpoint-every": checkpoint_every})
    _check(lr, l2, held_out, seed, out)
    # only here: numpy is slow to import
    from stretto.factorise import ratings as files
    from stretto.factorise.tiles import Tiles, factors_of, rmse, write_factors

    to_standard_output = str(json_to) == STANDARD_OUTPUT
    known = files.read(ratings, columns)
    if not quiet:
        typer.echo(f"{ratings}: {known}", err=to_standard_output)
    _check_size(processes, len(known.row_names), len(known.column_names), str(ratings))
    tiles = Tiles(known, processes, held_out, seed)
    with tempfile.TemporaryDirectory(prefix="stretto-factorise-") as folder:
        tiles.write(Path(folder), rank, epochs, evaluate_every, lr, l2)
        config = _configuration(Path(folder), processes, evaluate_every, checkpoint_every, run, quiet)
        config = replace(config, resume=resume)
        done = run_locally(config, ProgressDisplay(quiet=True, out=2 if to_standard_output else 1))
    factors = factors_of(done / "final.safetensors", tiles, known, rank)
    try:
        with written_whole(out) as part:
            write_factors(part, factors)
    except OSError as error:
        raise LogError(f"{out} cannot be written: {error.strerror}; the factors are in {done}") from error
    seconds = record(done)["seconds"]
    trained = len(tiles.training) * epochs
    result = Factorised(
        len(known),
        len(known.row_names),
        len(known.column_names),
        len(tiles.held_out),
        rank,
        processes,
        epochs,
        rmse(factors, known, tiles.held_out) if len(tiles.held_out) else None,
        seconds,
        trained / seconds if seconds else None,
        str(out),
        str(done),
    )
    typer.echo(str(result), err=to_standard_output or is_stream(out))
    if json_to is not None:
        write_json(json_to, asdict(result))


def _configuration(
    folder: Path, processes: int, evaluate_every: int, every: int, run: Path | None, quiet: bool
) -> RunConfig:
    from stretto.factorise.tiles import layout

    # the blocks rotate between the sub-epochs of as many epochs as pass until all processes hold all factors
    rounds = (processes * evaluate_every - 1) / evaluate_every if processes > 1 else 1
    return RunConfig(
        Path("stretto.factorise.train"),
        (str(folder),),
        module=True,
        subcommand="factorise",
        workers=processes,
        layout=layout(evaluate_every) if processes > 1 else None,
        threads=1,
        checkpoint_every=f"{max(1, round(every * rounds))} rounds",
        out=run,
        output="none" if quiet else "rank0",
    )


def _check_whole(numbers: dict[str, int]) -> None:
    """Raise LaunchError for options below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise _refused(f"{name} {number}", "a whole number, at least 1", f"{name} 4")


def _check(lr: float, l2: float, held_out: float, seed: int, out: Path) -> None:
    """Raise LaunchError for numbers that no factorisation can have."""
    if not (lr > 0 and math.isfinite(lr)):
        raise _refused(f"--lr {lr}", "a number above 0", "--lr 0.01")
    if not (l2 >= 0 and math.isfinite(l2)):
        raise _refused(f"--l2 {l2}", "a number, 0 or more", "--l2 0.05")
    if not 0 <= held_out < 1:
        raise _refused(f"--held-out {held_out}", "a share of the ratings, from 0 to below 1", "--held-out 0.1")
    if seed < 0:
        raise _refused(f"--seed {seed}", "a whole number, 0 or more", "--seed 1")
    if not out.absolute().parent.is_dir():
        raise _refused(f"--out {out}", "a file in a folder that exists", "--out factors.npz")


def _check_size(processes: int, rows: int, columns: int, path: str) -> None:
    """Raise LaunchError for a matrix with fewer rows or columns than processes."""
    most = min(rows, columns)
    if processes > most:
        raise _refused(
            f"-n {processes}, and {rows} rows and {columns} columns in {path}",
            "a row and a column for each process",
            f"-n {most}",
        )


def _refused(got: str, expected: str, to_type: str) -> LaunchError:
    return LaunchError(explain("the matrix cannot be factorised so", got=got, expected=expected, to_type=to_type))
