"""Command line `stretto`. It depends on all packages, so commands import what they need where they need it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs
from typer.exceptions import TyperException

from stretto.cli.compare import compare
from stretto.cli.export import command as export
from stretto.cli.factorise import command as factorise
from stretto.cli.options import JsonTo, Quiet, configured, json_option, with_options
from stretto.cli.script_arguments import RETYPED, ScriptCommand, examples, nearest
from stretto.cli.simulate import command as simulate
from stretto.errors import StrettoError, WorkersLostError, explain
from stretto.launcher.local import JoinRequest, Stopped
from stretto.launcher.local import join as join_run
from stretto.launcher.local import run as run_locally
from stretto.launcher.progress_display import ProgressDisplay
from stretto.launcher.reexec import reexecute
from stretto.notices import printable
from stretto.report.run_record import STANDARD_OUTPUT, check_target, write_json
from stretto.run_config import Output, RunConfig
from stretto.run_config import options as run_options
from stretto.run_dir import version

app = typer.Typer(
    name="stretto",
    help="Train one plain PyTorch loop on many machines, and see honestly what it changes.",
    epilog=examples("stretto run -n 4 train.py", "stretto compare -n 4 --recipe allreduce train.py"),
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
USAGE, FAILED, WORKERS_LOST = 2, 1, 3
OF_ONE_MACHINE = ("workers", "layout", "hosts", "hostfile", "remote_stretto", "on", "resources", "port")
"""Options that say on which machines a run has workers."""


def main() -> None:
    """Run the command line and exit: 1 for an error, 2 for a usage error, 128 + the number of a signal.

    The code is 3 if all workers that joined a run are lost, without an error of the script.
    """
    if sys.argv[1:2] == ["simulate"]:
        reexecute()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some parents ignore it, which would hide the exit codes of workers
    try:
        sys.exit(command(sys.argv[1:]))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(FAILED)


def command(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; errors are printed to the standard error."""
    words = list(arguments) or ["--help"]
    try:
        return int(typer.main.get_command(app).main(words, prog_name="stretto", standalone_mode=False) or 0)
    except WorkersLostError as error:
        return _print_error(str(error), WORKERS_LOST)
    except StrettoError as error:
        return _print_error(str(error), FAILED)
    except TyperException as error:
        return _print_error(_full_message(error, words), USAGE)
    except Stopped as stop:
        return _print_error(str(stop), stop.exit_code)
    except KeyboardInterrupt:
        return _print_error("stopped", 128 + signal.SIGINT)


def _full_message(error: TyperException, words: Sequence[str]) -> str:
    """Return the text of an error, with the three nearest names for an unknown command or option."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    commands = getattr(typer.main.get_command(app), "commands", {})
    if option is None and words[0] not in commands and not words[0].startswith("-"):
        near = nearest(words[0], commands)
        expected = f"one of {', '.join(commands)}"
        problem = f"there is no command {words[0]}; the nearest are {', '.join(near)}"
        return explain(problem, got=words[0], expected=expected, to_type=f"stretto {near[0]}")
    names = [name for param in context.command.params for name in param.opts] if context is not None else []
    if context is None or option is None or option in names:
        return error.format_message().replace(": Value error, ", ": ")
    near = nearest(option, [*(name for name in names if name.startswith("--")), "--help"])
    expected = f"an option of {context.command_path} (the nearest are {', '.join(near)})"
    return explain(f"there is no option {option}", got=option, expected=expected, to_type=near[0])


def _print_error(text: str, code: int) -> int:
    print(f"stretto: {printable(text)}", file=sys.stderr, flush=True)
    return code


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"stretto {version()}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the whole program."""


@app.command(
    cls=ScriptCommand,
    epilog=examples(
        'stretto run -n 4 --recipe "local_sgd(every=16)" train.py --lr 0.1',
        "stretto run -n 2 --hosts a:2,user@b:4 --listen 10.0.0.1 train.py",
    ),
)
@configured(*run_options())
def run(context: typer.Context, config: RunConfig, *, quiet: Quiet = False, json_to: JsonTo = None) -> None:
    """Run SCRIPT on workers of this machine and, with --hosts, of others.

    Options stand before SCRIPT; everything after SCRIPT is passed to it unchanged.
    """
    config = structs.replace(config, retyped=context.meta[RETYPED])
    check_target(json_to, "run.json")
    to_standard_output = str(json_to) == STANDARD_OUTPUT
    folder = run_locally(config, ProgressDisplay(quiet=quiet, out=2 if to_standard_output else 1))
    from stretto.report.summary import conclude  # only here: matplotlib is slow to import

    conclude(folder, json_to, silent=quiet)


@app.command(
    cls=ScriptCommand,
    epilog=examples(
        'srun -N 2 -n 4 stretto slurm --recipe "local_sgd(every=16)" train.py',
        "srun -n 4 --kill-on-bad-exit=0 --no-kill --signal=TERM@60 stretto slurm train.py",
    ),
)
@configured(*(name for name in run_options() if name not in OF_ONE_MACHINE))
def slurm(context: typer.Context, config: RunConfig, *, json_to: JsonTo = None) -> None:
    """Run SCRIPT on the tasks of a Slurm job step, one worker each: to be started by srun.

    Task 0 launches the run and shows it. With --kill-on-bad-exit=0 and --no-kill of srun, the others survive one.
    """
    from stretto.launcher.slurm import SlurmTask, run_task

    task = SlurmTask.of(os.environ)
    check_target(json_to, "run.json")
    display = ProgressDisplay(quiet=task.number > 0)
    config = structs.replace(config, retyped=context.meta[RETYPED])
    folder = run_task(config, task, lambda run: run_locally(run, display), lambda request: join_run(request, display))
    if folder is not None:
        from stretto.report.summary import conclude  # only here: matplotlib is slow to import

        conclude(folder, json_to, silent=False)


@app.command(
    cls=ScriptCommand,
    epilog=examples(
        "stretto kubernetes -n 4 --image registry/me/train:1 /app/train.py | kubectl apply -f -",
        "stretto kubernetes -n 8 --image I --gpus 1 --copy-to s3://bucket/run /app/train.py > run.yaml",
    ),
)
@configured("workers", *(name for name in run_options() if name not in OF_ONE_MACHINE), file=False)
def kubernetes(
    context: typer.Context,  # noqa: ARG001
    config: RunConfig,
    *,
    image: Annotated[str, typer.Option(help="Image with Stretto, the script and what it needs.")],
    name: Annotated[str, typer.Option(help="Name of the run's objects.")] = "stretto",
    gpus: Annotated[int, typer.Option(help="GPUs of each worker.")] = 0,
    processors: Annotated[str, typer.Option("--cpus", help="Processors of each worker.")] = "1",
    memory: Annotated[str, typer.Option(help="Memory of each worker.")] = "4Gi",
) -> None:
    """Print the manifests of a run of SCRIPT, a file in the image, on Kubernetes: for kubectl apply.

    They hold a new secret of the run. The run's folder is in the head's pod and ends with it: see --copy-to.
    """
    from stretto.launcher.kubernetes import PodOptions, manifests

    print(manifests(config, PodOptions(image, name, gpus, processors, memory)))


@app.command(
    epilog=examples("stretto join 10.0.0.1:7878 --key join.key -n 2", "stretto join /shared/run -n 4 --threads 2")
)
@with_options
def join(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|HOST:PORT", help="The folder of the run, on a disk that both machines see; else its address."
        ),
    ],
    *,
    workers: int = 1,
    key: Annotated[
        Path | None, typer.Option(help="A copy of the run's join.key (mode 600), or - for standard input.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="The script on this machine.  [default: the run's, which is received]")
    ] = None,
    threads: int | None = None,
    output: Output = "none",
    restarts: int = 3,
    out: Path | None = None,
    workdir: Annotated[
        Path | None,
        typer.Option(
            help="Working folder of the script on this machine.  [default: as the launcher's, in the received code]"
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Join a run that was started with --listen: add workers of this machine to it."""
    joining = JoinRequest(run, workers, key, script, threads, output, restarts, out=out, workdir=workdir)
    join_run(joining, ProgressDisplay(quiet=quiet))


@app.command(hidden=True)
def serve() -> None:
    """Serve shards of a parameter server for a run on another machine: to be started by stretto run --servers 2@HOST.

    Requests arrive at the standard input, and replies are written to the standard output.
    """
    from stretto.launcher.shard_agent import main as serve_shards

    serve_shards()


@app.command(cls=ScriptCommand, epilog=examples("stretto check train.py", "stretto check -m package.train --lr 0.1"))
@configured("module", "recipe", "layout", "global_batch", file=False)
def check(
    context: typer.Context,  # noqa: ARG001
    config: RunConfig,
    *,
    json_to: Annotated[
        Path | None,
        json_option("the traps"),
    ] = None,
) -> None:
    """Name the traps of SCRIPT before hours are spent: its source, and two epochs of two workers, at most 60 s.

    Your files are read and not written. The exit code is 1 if there is a trap.
    """
    check_target(json_to, "traps.json")
    from stretto.launcher.script_check import check as traps_of

    traps = traps_of(config)
    for trap in traps:
        typer.echo(str(trap), err=str(json_to) == STANDARD_OUTPUT)
    if not traps:
        typer.echo(f"{config.script}: no trap was found", err=str(json_to) == STANDARD_OUTPUT)
    if json_to is not None:
        write_json(json_to, [asdict(trap) for trap in traps])
    if traps:
        raise typer.Exit(FAILED)


app.command(
    "compare",
    cls=ScriptCommand,
    epilog=examples(
        "stretto compare -n 4 --recipe allreduce --recipe diloco train.py",
        'stretto compare -n 2,4 --recipe async_sgd --target "accuracy>=0.9" train.py',
    ),
)(compare)
app.command(
    "simulate",
    cls=ScriptCommand,
    epilog=examples(
        'stretto simulate -n 64 --network "100Mbit/s 5ms" --step-time 5ms train.py',
        'stretto simulate --recipe local_sgd --sweep "every=1,4,16" train.py',
    ),
)(simulate)
app.command(
    "export",
    epilog=examples("stretto export runs/RUN model.safetensors", "stretto export runs/RUN model.safetensors --force"),
)(export)
app.command(
    "factorise",
    epilog=examples(
        "stretto factorise ratings.csv --rank 32 -n 4",
        "stretto factorise ratings.csv --columns userId,movieId,rating --out movies.npz",
    ),
)(factorise)


@app.command(epilog=examples("stretto report runs/RUN", "stretto report runs/*"))
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, comparisons or sweeps.")],
) -> None:
    """Write the page of a run, a comparison or a sweep again, from its log only."""
    from stretto.report import html_report
    from stretto.simulator.sweep import report as sweep_page
    from stretto.simulator.sweep.results import NAME as SWEEP

    for folder in runs:
        page = sweep_page if (folder / SWEEP).exists() else html_report
        print(page.write(folder))


@app.command(epilog=examples("stretto recipes", "stretto recipes --json"))
def recipes(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As a table in Markdown.")] = False,
) -> None:
    """List the recipes with their five words and their papers."""
    from stretto.recipe.named import catalogue, markdown_table

    entries = catalogue()
    if markdown:
        print(markdown_table(entries))
        return
    if as_json:
        write_json(Path(STANDARD_OUTPUT), [asdict(entry) for entry in entries])
        return
    for entry in entries:
        words = [f"    {word:<5} {answer}" for word, answer in entry.words.items()]
        _print_wrapped(entry.signature, f"    {entry.sentence}", *words, *(f"    {paper}" for paper in entry.papers))


@app.command(epilog=examples("stretto layouts", "stretto layouts --json"))
def layouts(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the layouts, which say what one worker is, with their options and their papers."""
    from stretto.recipe.layout import catalogue

    entries = catalogue()
    if as_json:
        write_json(Path(STANDARD_OUTPUT), entries)
        return
    for entry in entries:
        _print_wrapped(entry["signature"], *(f"    {line}" for line in (entry["sentence"], *entry["papers"])))


def _print_wrapped(*lines: str) -> None:
    """Print lines and an empty one; those wider than the terminal are broken between words, and the rest indented."""
    width = shutil.get_terminal_size().columns
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        broken = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        print("\n".join(broken))
    print()


if __name__ == "__main__":
    main()
