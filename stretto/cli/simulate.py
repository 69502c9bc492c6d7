"""The command `stretto simulate`."""

from __future__ import annotations

import functools
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from stretto.checkpoint.model_file import left_in
from stretto.cli.options import JsonTo, Quiet, configured
from stretto.errors import LaunchError, RunFailedError, mistyped
from stretto.launcher.config import server_notice
from stretto.launcher.entry import typed
from stretto.launcher.private_files import PrivateFiles, private_files
from stretto.launcher.progress_display import ProgressDisplay
from stretto.launcher.signals import Stopped, handled
from stretto.masking import masked
from stretto.report.run_record import STANDARD_OUTPUT, check_target
from stretto.run_config import WORKERS, RunConfig
from stretto.simulator.compute import contention
from stretto.simulator.compute.cost_model import AUTO, CostModel
from stretto.simulator.compute.cost_model import parse as parse_cost_model
from stretto.simulator.compute.wall_clock import seconds as wall_clock
from stretto.simulator.compute.wall_clock import throttled
from stretto.simulator.sweep.grid import SweepConfig, points
from stretto.simulator.sweep.results import NAME as SWEEP
from stretto.simulator.sweep.results import read as read_sweep
from stretto.simulator.sweep.runner import run as run_sweep

if TYPE_CHECKING:
    from stretto.simulator.compute.step_time import Measured
    from stretto.simulator.config import Simulation

CLUSTER, GRID = "Simulated cluster", "Sweep"
"""Headings of the help texts."""


@configured(
    "module",
    "workers",
    "recipe",
    "layout",
    "seed",
    "global_batch",
    "shares",
    "max_batch",
    "uneven",
    "lr_scale",
    "servers",
    "on_nan",
    "plain",
    "failure_timeout_s",
    "timeout_s",
    "min_workers",
    "max_workers",
    "on_resize",
    "out",
    "output",
    workers=8,
)
def command(
    context: typer.Context,  # noqa: ARG001
    config: RunConfig,
    *,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            show_default="the script's end",
            help='End early: "samples=1e6" or "time=1h".',
            rich_help_panel=WORKERS,
        ),
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help='Links: "100Mbit/s 20ms", "hosts of 8 on 10Gbit/s, 1Gbit/s 1ms between".',
            rich_help_panel=CLUSTER,
        ),
    ] = "instant",
    speeds: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help='Speeds of workers: "lognormal(0.5)", exponential, "1,1,4", "slow(0.1, 5)".',
            rich_help_panel=CLUSTER,
        ),
    ] = "equal",
    step_time: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help='Time of a step without its exchange: "5ms"; auto measures it here.',
            rich_help_panel=CLUSTER,
        ),
    ] = AUTO,
    processors: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            show_default="one per worker",
            help="Number of processors that all workers share.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    faults: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            show_default="none",
            help='Faults to inject: "kill worker 2 at 30s, back after 5s".',
            rich_help_panel=CLUSTER,
        ),
    ] = "",
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            show_default="none",
            help='Axis of a grid: "workers=1,2,4,...,1024"; may be repeated.',
            rich_help_panel=GRID,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            show_default="none",
            help='Metric that counts as done: "test_accuracy>=0.95".',
            rich_help_panel=GRID,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            show_default="one per core",
            help="Number of simulations that run at the same time.",
            rich_help_panel=GRID,
        ),
    ] = None,
    quiet: Quiet = False,
    json_to: JsonTo = None,
) -> None:
    """Run SCRIPT as N workers in this process, on a virtual clock and network: real gradients, modelled time.

    The same seed gives the same run to the bit. Options stand before SCRIPT; everything after SCRIPT goes to it
    untouched.
    """
    check_target(json_to, "run.json")
    options = {
        "workers": str(config.workers),
        "recipe": config.recipe,
        "network": network,
        "speeds": speeds,
        "step_time": step_time,
        "faults": faults,
        "processors": None if processors is None else f"{processors:g}",
        "until": until,
        "servers": None if config.servers is None else str(config.servers),
        "seed": str(config.seed),
    }
    if not sweep and (target is not None or jobs is not None):
        raise mistyped("--target and --jobs are for a sweep", "no --sweep", "--sweep too", '--sweep "workers=1,2,4"')
    if sweep and config.layout is not None:
        problem, layout = "a sweep has workers of one process each", f"--layout '{config.layout}'"
        raise mistyped(problem, f"--sweep {layout}", "one of the two", f"stretto simulate -n {config.workers} {layout}")
    display = ProgressDisplay(quiet=quiet, out=2 if _to_stdout(json_to) else 1)
    if not sweep:
        program = shlex.join(masked(typed(config.script, config.module, config.args)))
        recipe = f"recipe {config.recipe}" if config.recipe else "its own recipe"
        divided = f" processes in workers of {config.layout}," if config.layout else " workers"
        display.note(f"simulating {config.workers}{divided} of {program}, {recipe}")
    from stretto.simulator.options import simulation  # and with it torch

    given_options = {name: value for name, value in options.items() if value is not None}
    if not sweep:
        simulated_config = simulation(config, given_options)
        servers = simulated_config.config.servers if config.servers else None
        notice = server_notice(structs.replace(config, servers=servers))
        _run(simulated_config, step_time, config.out, display, notice, quiet, json_to)
        return
    grid = SweepConfig(config, tuple(sweep), given_options, target, jobs, config.out, json_to, quiet)
    say = functools.partial(print, file=sys.stderr if _to_stdout(json_to) else sys.stdout)
    if step_time.startswith(AUTO):
        grid = replace(grid, step_times=_previous_step_times(config.out) or _measure_points(grid, step_time, say))
    run_sweep(grid, say)


def _measure_points(grid: SweepConfig, step_time: str, say: Callable[[str], None]) -> dict[str, str]:
    """Measure the step times of the points of a sweep that need them, by `Point.cost_group`.

    Points differ in the costs of their recipes and transports. The script's own time is measured once for all points
    with the same contention, so that only those costs differ.
    """
    from stretto.simulator.options import simulation

    steps: dict[int | None, CostModel] = {}
    step_times: dict[str, str] = {}
    for point in points(grid):
        if point.cost_group not in step_times and "step_time" not in point.values:
            simulated = simulation(structs.replace(grid.config, args=point.args), point.options)
            cost_model = _measure(simulated, step_time)
            first = steps.setdefault(simulated.contending_processes, cost_model)
            step_times[point.cost_group] = str(
                replace(cost_model, step_s=first.step_s, sample_s=first.sample_s, epoch_s=first.epoch_s)
            )
            say(f'measured for {point.cost_group}: --step-time "{step_times[point.cost_group]}"')
    return step_times


def _previous_step_times(out: Path | None) -> dict[str, str] | None:
    """Return the step times of an unfinished sweep that this one continues."""
    if out is None or not (out / SWEEP).exists():
        return None
    step_times: dict[str, str] | None = read_sweep(out)["asked"].get("step_times")
    return step_times


def _run(
    simulation: Simulation,
    step_time: str,
    out: Path | None,
    display: ProgressDisplay,
    notice: str | None,
    quiet: bool,
    json_to: Path | None,
) -> None:
    from stretto.recipe.layout import as_option
    from stretto.report.summary import conclude
    from stretto.simulator.isolation.script import ForwardedOutput
    from stretto.simulator.runner import create_run, simulate

    if notice is not None:
        display.note(notice)
    with handled(_stop):
        simulation = _measured(simulation, step_time, display.note)
        if step_time.startswith(AUTO):
            layout = f"{as_option(simulation.config.layout)} " if simulation.config.layout else ""
            display.note(f'measured: {layout}--step-time "{simulation.cost_model}"')
        folder = create_run(simulation, out)
        absolute = folder.absolute()  # the script works in another folder
        display.begin(absolute, simulation.config)
        try:
            output, errors = ForwardedOutput(display.say), ForwardedOutput(display.say_error, lambda: 2)
            with private_files(folder / ".files", folder / "files", display.note) as files:
                simulate(_placed(simulation, files), absolute, output, throttled(display.poll), err=errors)
        except Stopped as stop:
            display.end()
            display.note(f"report of the run so far: stretto report {folder}")
            stop.add(left_in(folder, str(stop)))
            raise
        except LaunchError as error:
            model = left_in(folder, str(error).partition("\n")[0])
            raise RunFailedError("\n".join(filter(None, [str(error), model])), folder) from error
        finally:
            display.end()
    conclude(folder, json_to, silent=quiet)


def _stop(number: int) -> None:
    """Stop the simulation on a signal."""
    raise Stopped(number)


def _measure(simulation: Simulation, step_time: str) -> CostModel:
    """Return the costs that were given or are measured."""
    return _measured(simulation, step_time, lambda _: None).cost_model


def _measured(simulation: Simulation, step_time: str, notice: Callable[[str], None]) -> Simulation:
    """Return the simulation with the costs that were given or are measured, and the layout that was measured.

    Costs are rounded as their text, so that the text reproduces the run.
    """
    layout = simulation.config.layout

    def measured() -> CostModel:
        nonlocal layout
        found = _measure_script(simulation, notice)
        costs: dict[str, Any] = _measure_transports(simulation)
        layout = found.layout
        return replace(found.cost_model, **costs)

    cost_model = parse_cost_model(str(parse_cost_model(step_time, measured)))
    return replace(simulation, cost_model=cost_model, config=structs.replace(simulation.config, layout=layout))


def _measure_script(simulation: Simulation, notice: Callable[[str], None]) -> Measured:
    """Measure the script's step time; where workers share processors, with as much contention."""
    from stretto.simulator.compute.step_time import measure

    with (
        tempfile.TemporaryDirectory(prefix="stretto-") as folder,
        private_files(Path(folder, ".files"), Path(folder, "files"), lambda _: None) as files,
    ):
        placed = _placed(simulation, files)
        if placed.contending_processes is None:
            return measure(placed, wall_clock, lambda: None, notice)

        def act() -> Measured:
            return measure(placed, contention.seconds, lambda: None, notice)

        with contention.beside(placed.contending_processes, act):
            return act()


def _placed(simulation: Simulation, files: PrivateFiles) -> Simulation:
    """Return the simulation of the script as it lies in private files."""
    config = simulation.config
    script = config.script if config.module else files.place(config.script)
    args = tuple(files.arguments(config.args))
    return replace(simulation, config=structs.replace(config, script=script, args=args))


def _measure_transports(simulation: Simulation) -> dict[str, float]:
    """Measure the processor time of the transports."""
    from stretto.simulator.compute.transport_costs import measure_transports

    return asdict(measure_transports(simulation.config.plain)) if simulation.has_network else {}


def _to_stdout(json_to: Path | None) -> bool:
    return str(json_to) == STANDARD_OUTPUT
