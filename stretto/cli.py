"""The command `stretto`: the only room that knows all the others, so each is imported where it is used."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from stretto.bits.command import bits
from stretto.compare.command import compare
from stretto.errors import StrettoError, explain
from stretto.folder import version
from stretto.launch.anew import begin_anew
from stretto.launch.arguments import ScriptCommand
from stretto.launch.export import command as export
from stretto.launch.local import Guests, Order, Stopped
from stretto.launch.local import join as join_run
from stretto.launch.local import run as run_order
from stretto.launch.order import Batch, OnNan, Output
from stretto.launch.watch import Watch
from stretto.quantities import seconds
from stretto.report.record import STANDARD_OUTPUT, check_target, write_json
from stretto.report.summary import conclude
from stretto.sim.command import command as simulate

app = typer.Typer(
    name="stretto",
    help="Train one plain PyTorch loop on many machines, and see honestly what it changes.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
USAGE, FAILED = 2, 1


def main() -> None:
    """Run the command line and exit: 1 for an error, 2 for a line that cannot be read, 128 + a signal."""
    if sys.argv[1:2] == ["simulate"]:
        begin_anew()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by some parents, which would hide how workers end
    try:
        sys.exit(command(sys.argv[1:]))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(FAILED)


def command(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; errors are said on the standard error."""
    try:
        given = list(arguments) or ["--help"]
        return int(typer.main.get_command(app).main(given, prog_name="stretto", standalone_mode=False) or 0)
    except StrettoError as error:
        return _complain(str(error), FAILED)
    except TyperException as error:
        return _complain(error.format_message(), USAGE)
    except Stopped as stop:
        return _complain(str(stop), stop.exit_code)
    except KeyboardInterrupt:
        return _complain("stopped", 128 + signal.SIGINT)


def _complain(text: str, code: int) -> int:
    print(f"stretto: {text}", file=sys.stderr, flush=True)
    return code


def whole_number(text: str | int) -> int:
    """A number as typed, or what is wrong with it."""
    try:
        return int(text)
    except ValueError:
        expected = "a whole number"
        raise typer.BadParameter(explain(f"{text} is no number", got=text, expected=expected, to_type="4")) from None


def duration(text: str | float) -> float:
    """The seconds of a time as typed, or what is wrong with it."""
    found = text if isinstance(text, float) else seconds(text)
    if found is None:
        expected = "a time such as 500ms, 10s, 2m"
        raise typer.BadParameter(explain(f"{text} is no time", got=text, expected=expected, to_type="10s"))
    return found


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"stretto {version()}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Options of the whole program."""


@app.command(cls=ScriptCommand)
def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The Python file to train with.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    workers: Annotated[int, typer.Option("-n", "--workers", parser=whole_number, metavar="N", help="How many.")] = 1,
    recipe: Annotated[
        str | None, typer.Option(envvar="STRETTO_RECIPE", help="Wins over the recipe in the script.")
    ] = None,
    seed: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Shifts all seeds.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The run folder; else runs/DATE-NAME.")] = None,
    threads: Annotated[int | None, typer.Option(parser=whole_number, metavar="N", help="Per worker.")] = None,
    port: Annotated[int | None, typer.Option(parser=whole_number, metavar="N", help="Where workers meet.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of a wait in which nothing comes.")] = 600.0,
    output: Annotated[Output, typer.Option(help="Whose output is shown.")] = "lead",
    servers: Annotated[
        int | None, typer.Option(parser=whole_number, metavar="N", help="Put the recipe over a server of N shards.")
    ] = None,
    replicas: Annotated[
        bool, typer.Option("--replicas", help="Every server has a replica, which goes on in its place.")
    ] = False,
    slow: Annotated[
        str | None, typer.Option(metavar="WORKER:FACTOR,...", help='Slow workers down on purpose: "1:2.0,3:5.0".')
    ] = None,
    on_nan: Annotated[OnNan, typer.Option(help="What a server does with an update that is not finite.")] = "stop",
    plain: Annotated[bool, typer.Option("--plain", help="Do not encrypt traffic with the parameter server.")] = False,
    patience: Annotated[
        float,
        typer.Option(
            parser=duration, metavar="TIME", show_default="10s", help="Who is not heard of so long is taken for dead."
        ),
    ] = 10.0,
    min_workers: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="With fewer the run ends instead of going on.")
    ] = 1,
    max_workers: Annotated[
        int | None, typer.Option(parser=whole_number, metavar="N", help="No more are let in; else as many as come.")
    ] = None,
    restarts: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="How often a process that dies is started again.")
    ] = 3,
    keep_batch: Annotated[
        Batch, typer.Option(help="When workers go or come: that of each worker, or the joined one of all.")
    ] = "local",
    checkpoint_every: Annotated[
        str | None, typer.Option(metavar="TIME|ROUNDS", help='Write a checkpoint so often: 5m, "20 rounds".')
    ] = None,
    keep: Annotated[
        int | None, typer.Option(parser=whole_number, metavar="N", help="So many checkpoints are kept; else 3.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on from the newest whole checkpoint of this run.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Let `stretto join` of other machines in, at this address of ours."),
    ] = None,
    chaos: Annotated[
        str | None,
        typer.Option(metavar="FAULTS", help='Done to processes on purpose: "kill worker every 20s".'),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only what the script says.")] = False,
    json_to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record of the run; - for here.")
    ] = None,
) -> None:
    """Run SCRIPT on workers of this machine.

    Options that are not ours go to the script, as does everything after --.
    """
    order = Order(
        script=script,
        args=tuple(args or ()),
        workers=workers,
        recipe=recipe,
        seed=seed,
        out=out,
        threads=threads,
        port=port,
        timeout_s=timeout,
        output=output,
        servers=servers,
        replicas=replicas,
        slow=slow,
        on_nan=on_nan,
        plain=plain,
        patience_s=patience,
        min_workers=min_workers,
        max_workers=max_workers,
        restarts=restarts,
        batch=keep_batch,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        host=host,
        chaos=chaos,
    )
    check_target(json_to, "run.json")
    here = str(json_to) == STANDARD_OUTPUT
    folder = run_order(order, Watch(quiet=quiet, out=2 if here else 1))
    conclude(folder, json_to, silent=quiet)


@app.command()
def join(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of the run, on a disk that both machines see.")
    ],
    *,
    workers: Annotated[int, typer.Option("-n", "--workers", parser=whole_number, metavar="N", help="How many.")] = 1,
    threads: Annotated[int | None, typer.Option(parser=whole_number, metavar="N", help="Per worker.")] = None,
    output: Annotated[Output, typer.Option(help="Whose output is shown.")] = "none",
    restarts: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="How often a process that dies is started again.")
    ] = 3,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only what the script says.")] = False,
) -> None:
    """Join a run that was started with --host: add workers of this machine to it."""
    join_run(Guests(run, workers, threads, output, restarts), Watch(quiet=quiet))


app.command("compare", cls=ScriptCommand)(compare)
app.command("simulate", cls=ScriptCommand)(simulate)
app.command("bits")(bits)
app.command("export")(export)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, comparisons, sweeps or `bits`.")
    ],
) -> None:
    """Make the page of a run or a comparison again, from its log alone."""
    from stretto.bits import page as bits_page
    from stretto.bits.results import NAME as BITS
    from stretto.report import page
    from stretto.sim.sweep import page as sweep_page
    from stretto.sim.sweep.results import NAME as SWEEP

    pages = {BITS: bits_page, SWEEP: sweep_page}
    for folder in runs:
        kind = next((one for name, one in pages.items() if (folder / name).exists()), page)
        print(kind.write(folder))


@app.command()
def recipes(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As a table in Markdown.")] = False,
) -> None:
    """List the recipes: their five words, and the papers they are from."""
    from stretto.recipes import catalogue, markdown_table

    entries = catalogue()
    if markdown:
        print(markdown_table(entries))
        return
    if as_json:
        write_json(Path(STANDARD_OUTPUT), [asdict(entry) for entry in entries])
        return
    for entry in entries:
        words = [f"    {word:<5} {answer}" for word, answer in entry.words.items()]
        papers = [f"    {paper}" for paper in entry.papers]
        print("\n".join([entry.signature, f"    {entry.sentence}", *words, *papers, ""]))


if __name__ == "__main__":
    main()
