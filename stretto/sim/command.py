"""The command `stretto simulate`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.errors import mistyped
from stretto.launch import crowd
from stretto.launch.order import Batch, OnNan, Order, Output
from stretto.launch.signals import heeded
from stretto.launch.stopclock import seconds as stopclock
from stretto.launch.stopclock import sparing
from stretto.launch.supervise import Stopped
from stretto.launch.watch import Watch
from stretto.quantities import seconds as typed_seconds
from stretto.report.record import STANDARD_OUTPUT, check_target
from stretto.sim.sweep import SweepOrder
from stretto.sim.sweep import run as run_sweep
from stretto.sim.sweep.grid import points
from stretto.sim.sweep.results import NAME as SWEEP
from stretto.sim.sweep.results import read as read_sweep
from stretto.sim.tariff import AUTO, Tariff
from stretto.sim.tariff import parse as tariff_of

if TYPE_CHECKING:
    from stretto.sim.simulation import Simulation


def command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The Python file to train with.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    workers: Annotated[str, typer.Option("-n", "--workers", metavar="N", help="How many.")] = "8",
    recipe: Annotated[
        str | None, typer.Option(envvar="STRETTO_RECIPE", help="Wins over the recipe in the script.")
    ] = None,
    network: Annotated[
        str, typer.Option(metavar="TEXT", help='"100Mbit/s 20ms", "hosts of 8 on 10Gbit/s, 1Gbit/s 1ms between", ...')
    ] = "instant",
    speeds: Annotated[
        str, typer.Option(metavar="TEXT", help='equal, "lognormal(0.5)", exponential, "1,1,4", "slow(0.1, 5)", ...')
    ] = "equal",
    step_time: Annotated[
        str, typer.Option(metavar="TIME", help='A step without its exchange: "5ms"; auto measures it, and the wires.')
    ] = AUTO,
    faults: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help='"kill worker 2 at 30s, back after 5s; slow link of worker 1 by 10 for 20s at 5s"'
        ),
    ] = "",
    processors: Annotated[
        float | None, typer.Option(metavar="N", help="Shared by all workers; else each has its own.")
    ] = None,
    batched: Annotated[
        bool, typer.Option("--batched", help="Compute many workers' steps in one call: quicker, equal to rounding.")
    ] = False,
    until: Annotated[str | None, typer.Option(metavar="TEXT", help='End early: "samples=1e6" or "time=1h".')] = None,
    servers: Annotated[str | None, typer.Option(metavar="N", help="Put the recipe over a server of N shards.")] = None,
    on_nan: Annotated[OnNan, typer.Option(help="What a server does with an update that is not finite.")] = "stop",
    plain: Annotated[bool, typer.Option("--plain", help="Count bytes without encryption.")] = False,
    patience: Annotated[
        str, typer.Option(metavar="TIME", help="Who is not heard of so long is taken for dead.")
    ] = "10s",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of a wait in which nothing comes.")] = 600.0,
    min_workers: Annotated[str, typer.Option(metavar="N", help="With fewer the run ends instead of going on.")] = "1",
    max_workers: Annotated[
        str | None, typer.Option(metavar="N", help="No more are let in; else as many as come.")
    ] = None,
    keep_batch: Annotated[
        Batch, typer.Option(help="When workers go or come: that of each worker, or the joined one of all.")
    ] = "local",
    seed: Annotated[str, typer.Option(metavar="N", help="Of all that is drawn, and shifts the script's seeds.")] = "0",
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUES", help='A grid: "workers=1,2,4,...,1024"; may be given again.'),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="TEXT", help='What counts as done in a sweep: "test_accuracy>=0.95".')
    ] = None,
    jobs: Annotated[int | None, typer.Option(metavar="N", help="Simulations of a sweep at once.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; else runs/DATE-NAME.")] = None,
    output: Annotated[Output, typer.Option(help="Whose output is shown.")] = "lead",
    quiet: Annotated[bool, typer.Option("--quiet", help="Only what the script says.")] = False,
    json_to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record of the run; - for here.")
    ] = None,
) -> None:
    """Run SCRIPT as N workers in this process, on a virtual clock and network: real gradients, modelled time.

    The same seed gives the same run to the bit. Options that are not ours go to the script, as does everything after
    --.
    """
    check_target(json_to, "run.json")
    options = {
        "workers": workers,
        "recipe": recipe,
        "network": network,
        "speeds": speeds,
        "step_time": step_time,
        "faults": faults,
        "processors": None if processors is None else f"{processors:g}",
        "until": until,
        "batched": "yes" if batched else None,
        "servers": servers,
        "seed": seed,
    }
    if not sweep and (target is not None or jobs is not None):
        raise mistyped("--target and --jobs are for a sweep", "no --sweep", "--sweep too", '--sweep "workers=1,2,4"')
    from stretto.sim.asked import simulation, whole

    order = Order(
        script=script,
        args=tuple(args or ()),
        output=output,
        on_nan=on_nan,
        plain=plain,
        patience_s=_time(patience, "the patience", "--patience 10s"),
        timeout_s=timeout,
        min_workers=whole("min_workers", min_workers),
        max_workers=None if max_workers is None else whole("max_workers", max_workers),
        batch=keep_batch,
    )
    given = {name: value for name, value in options.items() if value is not None}
    if not sweep:
        _run(simulation(order, given), step_time, out, quiet, json_to)
        return
    grid = SweepOrder(order, tuple(sweep), given, target, jobs, out, json_to, quiet)
    say = functools.partial(print, file=sys.stderr if _here(json_to) else sys.stdout)
    if step_time.startswith(AUTO):
        grid = replace(grid, step_times=_asked_before(out) or _measured_each(grid, step_time, say))
    run_sweep(grid, say)


def _measured_each(grid: SweepOrder, step_time: str, say: Callable[[str], None]) -> dict[str, str]:
    """The times of a step for the points of a sweep that measure them, by `Point.alike`.

    Points differ in what their recipes and their wires take. What the script takes is theirs in common, or of as many
    as make it as crowded here, so that they are compared by what is theirs.
    """
    from stretto.sim.asked import simulation

    steps: dict[int | None, Tariff] = {}
    found: dict[str, str] = {}
    for point in points(grid):
        if point.alike not in found and "step_time" not in point.values:
            one = simulation(replace(grid.order, args=point.args), point.options)
            tariff = _measured(one, step_time)
            first = steps.setdefault(one.crowd, tariff)
            found[point.alike] = str(replace(tariff, step_s=first.step_s, pass_s=first.pass_s))
            say(f'measured for {point.alike}: --step-time "{found[point.alike]}"')
    return found


def _asked_before(out: Path | None) -> dict[str, str] | None:
    """The times of a step that a sweep was begun with which this one goes on."""
    if out is None or not (out / SWEEP).exists():
        return None
    found: dict[str, str] | None = read_sweep(out)["asked"].get("step_times")
    return found


def _run(simulation: Simulation, step_time: str, out: Path | None, quiet: bool, json_to: Path | None) -> None:
    from stretto.report.summary import conclude
    from stretto.sim.run import begin, simulate
    from stretto.sim.script import Heard

    watch = Watch(quiet=quiet, out=2 if _here(json_to) else 1)
    with heeded(_stop):
        tariff = _measured(simulation, step_time)
        if step_time.startswith(AUTO):
            watch.note(f'measured: --step-time "{tariff}"')
        simulation = replace(simulation, tariff=tariff)
        folder = begin(simulation, out)
        watch.begin(folder, simulation.order)
        try:
            simulate(simulation, folder, Heard(watch.say), sparing(watch.poll))
        except Stopped:
            watch.end()
            watch.note(f"what there is until then: stretto report {folder}")
            raise
        finally:
            watch.end()
    conclude(folder, json_to, silent=quiet)


def _stop(number: int) -> None:
    """End what is done here, wherever it is."""
    raise Stopped(number)


def _measured(simulation: Simulation, step_time: str) -> Tariff:
    """What was typed, or else what is measured, as its text has it: so the text gives the same run again."""
    found = tariff_of(step_time, lambda: replace(_work(simulation), **_wires(simulation)))
    return tariff_of(str(found))


def _work(simulation: Simulation) -> Tariff:
    """What the script's work takes here; where workers share processors, while others are at the same work."""
    from stretto.sim.measure import measure

    if simulation.crowd is None:
        return measure(simulation, stopclock, lambda: None)

    def act() -> Tariff:
        return measure(simulation, crowd.seconds, lambda: None)

    with crowd.beside(simulation.crowd, act):
        return act()


def _wires(simulation: Simulation) -> dict[str, float]:
    """What the wires take of a processor here."""
    from stretto.launch.wires import here

    return asdict(here(simulation.order.plain)) if simulation.has_wires else {}


def _time(text: str, what: str, to_type: str) -> float:
    if (found := typed_seconds(text)) is None:
        raise mistyped(f"{what} cannot be {text}", text, "a time such as 500ms, 10s, 2m", to_type)
    return found


def _here(json_to: Path | None) -> bool:
    return str(json_to) == STANDARD_OUTPUT
