"""The command `stretto simulate`."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto import chaos
from stretto.errors import LaunchError, explain
from stretto.launch import crowd
from stretto.launch.order import Batch, OnNan, Order, Output
from stretto.launch.stopclock import seconds as stopclock
from stretto.launch.stopclock import sparing
from stretto.launch.watch import Watch
from stretto.quantities import seconds as typed_seconds
from stretto.quantities import spelled
from stretto.report.record import STANDARD_OUTPUT, check_target
from stretto.sim import network as network_
from stretto.sim import speeds as speeds_
from stretto.sim.sweep import SweepOrder
from stretto.sim.sweep import run as run_sweep
from stretto.sim.sweep.results import NAME as SWEEP
from stretto.sim.sweep.results import read as read_sweep
from stretto.sim.tariff import AUTO, Tariff
from stretto.sim.tariff import parse as tariff_of

if TYPE_CHECKING:
    from stretto.sim.run import Simulation


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
    until: Annotated[str | None, typer.Option(metavar="TEXT", help='End early: "samples=1e6" or "time=1h".')] = None,
    servers: Annotated[str | None, typer.Option(metavar="N", help="Put the recipe over a server of N shards.")] = None,
    on_nan: Annotated[OnNan, typer.Option(help="What a server does with an update that is not finite.")] = "stop",
    plain: Annotated[bool, typer.Option("--plain", help="Count bytes without encryption.")] = False,
    patience: Annotated[
        str, typer.Option(metavar="TIME", help="Who is not heard of so long is taken for dead.")
    ] = "10s",
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
        "servers": servers,
        "seed": seed,
    }
    if not sweep and (target is not None or jobs is not None):
        raise _wrong("--target and --jobs are for a sweep", "no --sweep", "--sweep too", '--sweep "workers=1,2,4"')
    order = Order(
        script=script,
        args=tuple(args or ()),
        workers=_whole(workers, "the number of workers", "-n 4"),
        recipe=recipe,
        seed=_whole(seed, "the seed", "--seed 1"),
        output=output,
        servers=None if servers is None else _whole(servers, "the number of servers", "--servers 2"),
        on_nan=on_nan,
        plain=plain,
        patience_s=_time(patience, "the patience", "--patience 10s"),
        min_workers=_whole(min_workers, "the least number of workers", "--min-workers 2"),
        max_workers=None if max_workers is None else _whole(max_workers, "the largest number", "--max-workers 8"),
        batch=keep_batch,
    )
    if sweep:
        if step_time.startswith(AUTO):
            options["step_time"] = _asked_before(out) or _measured_once(order, network, step_time, processors)
        also = (*(["--plain"] if plain else []), *(["--on-nan", on_nan] if on_nan != "stop" else []), *_survival(order))
        given = {name: value for name, value in options.items() if value}
        grid = SweepOrder(script, tuple(sweep), order.args, given, also, target, jobs, out, json_to, quiet)
        run_sweep(grid, lambda text: print(text, file=sys.stderr if _here(json_to) else sys.stdout))
        return
    from stretto.sim.run import Simulation, check

    simulation = Simulation(
        order,
        Tariff(0.0),
        network_.parse(network),
        speeds_.parse(speeds),
        chaos.parse(faults) if faults.strip() else (),
        _some(processors),
        **_ends(until),
    )
    _run(check(simulation), step_time, out, quiet, json_to)


def _survival(order: Order) -> list[str]:
    """What was said of workers that die, as it is typed."""
    most = ["--max-workers", str(order.max_workers)] if order.max_workers is not None else []
    said = {
        "--patience": (f"{spelled(order.patience_s)}s", order.patience_s != Order.patience_s),
        "--min-workers": (str(order.min_workers), order.min_workers != Order.min_workers),
        "--keep-batch": (order.batch, order.batch != Order.batch),
    }
    return [word for name, (value, is_said) in said.items() if is_said for word in (name, value)] + most


def _measured_once(order: Order, network: str, step_time: str, processors: float | None) -> str:
    """The time of a step for all points of a sweep; what they may say of speeds and faults is theirs."""
    from stretto.sim.run import Simulation, check

    simulation = Simulation(order, Tariff(0.0), network_.parse(network), processors=_some(processors))
    return str(_measured(check(simulation), step_time))


def _asked_before(out: Path | None) -> str | None:
    """The time of a step that a sweep was begun with which this one goes on."""
    if out is None or not (out / SWEEP).exists():
        return None
    text: str | None = read_sweep(out)["asked"]["options"].get("step_time")
    return text


def _run(simulation: Simulation, step_time: str, out: Path | None, quiet: bool, json_to: Path | None) -> None:
    from stretto.report.summary import conclude
    from stretto.sim.run import begin, simulate
    from stretto.sim.script import Heard

    watch = Watch(quiet=quiet, out=2 if _here(json_to) else 1)
    tariff = _measured(simulation, step_time)
    if step_time.startswith(AUTO):
        watch.note(f'measured: --step-time "{tariff}"')
    simulation = replace(simulation, tariff=tariff)
    folder = begin(simulation, out)
    watch.begin(folder, simulation.order)
    try:
        simulate(simulation, folder, Heard(watch.say), sparing(watch.poll))
    finally:
        watch.end()
    conclude(folder, json_to, silent=quiet)


def _measured(simulation: Simulation, step_time: str) -> Tariff:
    """What was typed, or else what is measured, as its text has it: so the text gives the same run again."""
    found = tariff_of(step_time, lambda: replace(_work(simulation), **_wires(simulation)))
    return tariff_of(str(found))


def _work(simulation: Simulation) -> Tariff:
    """What the script's work takes here; where workers share processors, while others are at the same work."""
    from stretto.sim.measure import measure

    processors, workers = simulation.processors, simulation.order.workers
    if processors is None or processors >= workers:
        return measure(simulation, stopclock, lambda: None)

    def act() -> Tariff:
        return measure(simulation, crowd.seconds, lambda: None)

    with crowd.beside(crowd.copies(workers, processors), act):
        return act()


def _wires(simulation: Simulation) -> dict[str, float]:
    """What the wires take of a processor here, where there is a network at all."""
    from stretto.launch.wires import here

    if simulation.order.workers == 1 or simulation.network == network_.Network():
        return {}
    return asdict(here(simulation.order.plain))


def _ends(until: str | None) -> dict[str, float]:
    """When the run ends before the script does."""
    if until is None:
        return {}
    name, _, value = until.partition("=")
    read = typed_seconds(value.strip()) if name.strip() == "time" else _float(value)
    if name.strip() not in ("samples", "time") or read is None or not (read > 0 and isfinite(read)):
        problem, expected = f"--until cannot be {until!r}", "samples= with a number, or time= with a time"
        raise _wrong(problem, until, expected, '--until "samples=1e6", or --until "time=1h"')
    return {"time_s": read} if name.strip() == "time" else {"samples": read}


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(text: str, what: str, to_type: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _wrong(f"{what} cannot be {text}", text, "a whole number", to_type) from None


def _time(text: str, what: str, to_type: str) -> float:
    if (found := typed_seconds(text)) is None:
        raise _wrong(f"{what} cannot be {text}", text, "a time such as 500ms, 10s, 2m", to_type)
    return found


def _some(processors: float | None) -> float | None:
    if processors is not None and not 0 < processors < inf:
        raise _wrong(f"there cannot be {processors:g} processors", processors, "more than 0", "--processors 2")
    return processors


def _here(json_to: Path | None) -> bool:
    return str(json_to) == STANDARD_OUTPUT


def _wrong(problem: str, got: object, expected: str, to_type: str) -> LaunchError:
    return LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
