"""Configuration of a run, and the checks that precede the start of any process."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stretto.errors import LaunchError, explain
from stretto.faults.plan import Fault, FaultEvent, Kill, Pause, check_live, parse, schedule
from stretto.faults.plan import check as check_faults
from stretto.faults.stragglers import factors
from stretto.interval import every
from stretto.launcher import entry
from stretto.run_dir import CHECKPOINTS, cores
from stretto.units import spelled

Batch = Literal["per-worker-batch", "global-batch"]
Output = Literal["rank0", "all", "none"]
OnNan = Literal["stop", "skip"]
GlobalBatch = Literal["keep", "split"]
LrScale = Literal["none", "linear", "sqrt"]
LARGEST_SEED = 2**32 - 1
MIN_FAILURE_TIMEOUT_S = 0.1


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run on workers of this machine, of a script file or, with `module`, of a module.

    `recipe` is text and takes precedence over the script's. `single_process` disables all communication, and
    `global_batch_of` is the number of the script's batches that form one batch. `threads` is per worker, `timeout_s`
    limits every wait for another worker, `output` selects the workers whose output reaches the terminal; log files hold
    all output.

    `servers` runs the recipe over a parameter server of that many shards, `on_nan` is their reaction to an update that
    is not finite, and `plain` leaves their traffic unencrypted. `stragglers` slows some workers down: `1:2.0,3:5.0`.

    A process without a heartbeat for `failure_timeout_s` is declared failed. A failed worker is restarted up to
    `restarts` times, and the others continue as long as `min_workers` are left; at most `max_workers` are admitted.
    `batch` selects the batch size that stays the same then. Workers of other machines can join where `host` is an
    address of this machine that they reach. `faults` are injected. A checkpoint is written at the interval
    `checkpoint_every` (`5m`, `20 rounds`) and the newest `keep` are kept; training continues from the newest checkpoint
    in the run directory `resume`. `retyped` holds the words after `stretto run --resume FOLDER` that continue the run.
    """

    script: Path
    args: tuple[str, ...] = ()
    workers: int = 1
    recipe: str | None = None
    seed: int = 0
    single_process: bool = False
    global_batch_of: int = 1
    out: Path | None = None
    threads: int | None = None
    port: int | None = None
    timeout_s: float = 600.0
    keep_states: bool = False
    output: Output = "rank0"
    servers: int | None = None
    stragglers: str | None = None
    on_nan: OnNan = "stop"
    plain: bool = False
    failure_timeout_s: float = 10.0
    min_workers: int = 1
    max_workers: int | None = None
    restarts: int = 3
    checkpoint_every: str | None = None
    keep: int | None = None
    resume: Path | None = None
    batch: Batch = "per-worker-batch"
    host: str | None = None
    faults: str | None = None
    module: bool = False
    retyped: tuple[str, ...] = ()
    global_batch: GlobalBatch = "keep"
    """The batch of the script is that of each worker (keep), or is split among all workers."""
    lr_scale: LrScale = "none"
    """Factor on the learning rate of the script: 1, the number of workers, or its square root."""
    recovery: bool = True
    """False if the first failure ends the run, which has no coordinator then."""
    scaled_workers: int | None = None
    """Number of workers for this factor; None for the number that is started."""

    @property
    def lr_factor(self) -> float:
        """Factor on the learning rate of the script."""
        count = self.scaled_workers or self.workers * self.global_batch_of
        return {"none": 1.0, "linear": float(count), "sqrt": math.sqrt(count)}[self.lr_scale]

    @property
    def elastic(self) -> bool:
        """True if the run survives failed workers; it has a coordinator then."""
        several = self.workers > 1 or self.host is not None
        return several and not self.single_process and self.recovery

    @property
    def name(self) -> str:
        """Name of the program, for the name of a run folder."""
        return entry.title(self.script, self.module)

    def __str__(self) -> str:
        """Return the workers, the program and the recipe, for the line that announces the run."""
        program = shlex.join(entry.typed(self.script, self.module, self.args))
        workers = f"{self.workers} worker{'s' * (self.workers != 1)}"
        recipe = f"recipe {self.recipe}" if self.recipe is not None else "the script's recipe"
        resumed = f", from the newest checkpoint of {self.resume}" if self.resume is not None else ""
        return f"{workers} of {program}, {recipe}{resumed}"

    def file(self) -> Path:
        """Return the Python file that is executed. Raises LaunchError if there is none."""
        return entry.file_of(self.script, self.module)

    def threads_each(self) -> int:
        """Return the threads of each worker: as given, else an equal share of the cores, at least one."""
        return self.threads or max(1, cores() // self.workers)

    def asked(self) -> dict[str, Any]:
        """Return the options as `run.json` records them."""
        return {
            "script": str(self.script),
            "module": self.module,
            "args": list(self.args),
            "recipe": self.recipe,
            "workers": self.workers,
            "seed": self.seed,
            "single_process": self.single_process,
            "global_batch_of": self.global_batch_of,
            "threads": self.threads_each(),
            "servers": self.servers or 0,
            "stragglers": self.stragglers,
            "failure_timeout_s": self.failure_timeout_s,
            "min_workers": self.min_workers,
            "max_workers": self.max_workers,
            "restarts": self.restarts,
            "recovery": self.recovery,
            "checkpoint_every": self.checkpoint_every,
            "keep": self.keep,
            "resume": str(self.resume) if self.resume else None,
            "batch": self.batch,
            "host": self.host,
            "faults": self.faults,
            "global_batch": self.global_batch,
            "lr_scale": self.lr_scale,
        }


def settled(order: RunConfig) -> RunConfig:
    """Return the configuration with derived values: script file, recipe over its servers, number of servers."""
    order = order if order.module else replace(order, script=entry.located(order.script))
    if order.recipe is None:
        return replace(order, servers=0)
    from stretto.recipe.parser import parse, with_shards

    make_codecs_importable(order)
    recipe = with_shards(order.recipe, order.servers) if order.servers else order.recipe
    shards = parse(recipe).shards
    return replace(order, recipe=recipe, servers=0 if order.single_process else shards)


def codec_folder(order: RunConfig) -> str | None:
    """Return the folder from which a recipe's own codecs are imported: that of the script; None if it has none."""
    from stretto.recipe.parser import import_paths

    if order.recipe is None or not import_paths(order.recipe):
        return None
    return str(Path.cwd() if order.module else Path(order.script).resolve().parent)


def make_codecs_importable(order: RunConfig) -> None:
    """Let this process import a recipe's own codecs as the script does."""
    folder = codec_folder(order)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def server_notice(order: RunConfig) -> str | None:
    """Return what `--servers` makes of a recipe that has no server of its own, or None where it changes nothing."""
    if order.recipe is None or not order.servers or order.single_process:
        return None
    from stretto.recipe.parser import parse

    if parse(order.recipe).shards:
        return None
    shards = f"{order.servers} shard{'s' * (order.servers > 1)}"
    means = f"the workers exchange through a parameter server of {shards}, not with each other"
    return f"--servers {order.servers} makes {settled(order).recipe} of the recipe {order.recipe}: {means}"


def is_free(order: RunConfig) -> bool:
    """Return True if the recipe of a resolved configuration is asynchronous."""
    if order.recipe is None:
        return False
    from stretto.recipe.parser import parse

    return parse(order.recipe).asynchronous


def check(order: RunConfig, live: bool = True) -> None:
    """Raise LaunchError or RecipeError if the configuration cannot be run.

    A run that is not `live` is simulated and has no encrypted traffic with a coordinator.
    """
    entry.check(order.script, order.module)
    _check_numbers(order)
    if order.single_process and order.workers != 1:
        raise LaunchError(explain("alone means one worker", got=order.workers, expected="1 worker", to_type="-n 1"))
    if order.servers and order.recipe is None:
        raise _without_recipe(order.servers)
    factors(order.stragglers, order.workers)
    _check_server_options(order, live)
    _check_survival(order)
    _check_host(order)
    _check_faults(order)
    _check_checkpoints(order)
    _check_batch(order)


def _check_server_options(order: RunConfig, live: bool) -> None:
    """Raise LaunchError for options that have no effect without a server."""
    from stretto.recipe.parser import parse

    recipe = settled(order).recipe
    asked = parse(recipe) if recipe is not None else None
    got = f"--recipe {recipe}" if recipe is not None else "no --recipe"
    if order.on_nan == "skip" and not (asked and asked.asynchronous):
        problem, expected = (
            "only an update that arrives at a server can be skipped",
            "a recipe on arrival, as async_sgd",
        )
        raise LaunchError(explain(problem, got=got, expected=expected, to_type="--recipe async_sgd --on-nan skip"))
    if order.plain and not (asked and asked.shards) and not (live and order.elastic):
        problem, expected = (
            "no traffic with a server could be unencrypted",
            "a recipe with a server, as async_sgd",
        )
        raise LaunchError(explain(problem, got=got, expected=expected, to_type="--recipe async_sgd --no-encryption"))


def _check_numbers(order: RunConfig) -> None:
    _at_least_one("the number of workers", order.workers, "-n 4")
    _at_least_one("the number of threads per worker", order.threads, "--threads 1")
    _at_least_one("the number of joined batches", order.global_batch_of, "global_batch_of=4")
    _at_least_one("the number of servers", order.servers, "--servers 2")
    if not 0 <= order.seed <= LARGEST_SEED:
        _refuse("the seed", order.seed, f"a whole number from 0 to {LARGEST_SEED}", "--seed 1")
    if not (order.timeout_s > 0 and math.isfinite(order.timeout_s)):
        _refuse("the limit of a wait", order.timeout_s, "seconds, more than 0", "--timeout 600")
    if order.port is not None and not 0 <= order.port <= 65535:
        _refuse("the port", order.port, "a port from 1 to 65535, or 0 for a free one", "leave --port away")


def _check_survival(order: RunConfig) -> None:
    """Raise LaunchError for impossible limits."""
    minimum, maximum = order.min_workers, order.max_workers
    if not (order.failure_timeout_s >= MIN_FAILURE_TIMEOUT_S and math.isfinite(order.failure_timeout_s)):
        got, to_type = f"{spelled(order.failure_timeout_s)}s", "--failure-timeout 10s"
        _refuse("the failure timeout", got, "a time, at least 100ms", to_type)
    if not 1 <= minimum <= order.workers:
        started = f"a number from 1 to {order.workers}, as many as are started"
        _refuse("the minimum number of workers", minimum, started, f"--min-workers {order.workers}")
    if maximum is not None and maximum < order.workers:
        started = f"at least {order.workers}, as many as are started"
        _refuse("the largest number of workers", maximum, started, f"--max-workers {order.workers}")
    if order.restarts < 0:
        _refuse("the number of restarts", order.restarts, "a whole number, 0 or more", "--restarts 3")


def _check_host(order: RunConfig) -> None:
    """Raise LaunchError for a run that workers cannot join: the number of workers of a parameter server is fixed."""
    if order.host is None:
        return
    if order.single_process:
        _refuse("the host of a run alone", order.host, "a run that others can join", "leave --host away")
    if settled(order).servers:
        problem, expected = "a run over a parameter server cannot be joined", "a recipe without a server, as allreduce"
        got, to_type = f"--host {order.host} --recipe {order.recipe}", "--recipe allreduce, or leave --host away"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))


def _check_batch(order: RunConfig) -> None:
    """Raise LaunchError for a scaled learning rate without a larger batch."""
    if order.global_batch == "split" and order.lr_scale != "none":
        problem = "--lr-scale is for a larger batch, and with --batch split all workers share the script's batch"
        got, to_type = f"--batch split --lr-scale {order.lr_scale}", "--batch split, or --lr-scale alone"
        raise LaunchError(explain(problem, got=got, expected="one of the two", to_type=to_type))


def _check_faults(order: RunConfig) -> None:
    if order.faults is not None:
        faults = parse(order.faults)
        check_faults(faults, order.workers, settled(order).servers or 0)
        check_live(faults, order.restarts)
        if not order.elastic and any(_targets_coordinator(fault) for fault in faults):
            problem, expected = "there is no coordinator for the fault", "at least 2 workers"
            raise LaunchError(explain(problem, got=f"--faults {order.faults!r}", expected=expected, to_type="-n 4"))


def _targets_coordinator(fault: Fault) -> bool:
    return isinstance(fault, Kill | Pause) and fault.who.kind == "coordinator"


def planned(order: RunConfig) -> Iterator[tuple[float, FaultEvent]]:
    """Yield the faults of a resolved configuration, each with the seconds after the start of the run."""
    faults = parse(order.faults) if order.faults is not None else ()
    return schedule(faults, order.workers, order.servers or 0, order.seed, supervised=order.elastic)


def _check_checkpoints(order: RunConfig) -> None:
    _at_least_one("the number of checkpoints kept", order.keep, "--keep 3")
    if order.checkpoint_every is not None:
        every(order.checkpoint_every)
    elif order.keep is not None:
        problem, expected = "--keep changes nothing without --checkpoint-every", "how often a checkpoint is written"
        to_type = f"--checkpoint-every 5m --keep {order.keep}"
        raise LaunchError(explain(problem, got=f"--keep {order.keep} alone", expected=expected, to_type=to_type))
    if order.resume is not None and not (order.resume / CHECKPOINTS).is_dir():
        _refuse_resume(order.resume)


def _refuse_resume(run: Path) -> None:
    near = sorted(path.parent for path in run.absolute().parent.glob(f"*/{CHECKPOINTS}"))
    problem = f"{run} has no checkpoints" if run.is_dir() else f"there is no run {run}"
    expected = "the folder of a run with checkpoints" + (f"; near it are {_names(near)}" if near else "")
    to_type = (
        f"--resume {run.parent / near[-1].name}" if near else "--resume runs/RUN, of a run with --checkpoint-every 5m"
    )
    raise LaunchError(explain(problem, got=f"--resume {run}", expected=expected, to_type=to_type))


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths[-3:])


def _at_least_one(what: str, got: int | None, to_type: str) -> None:
    if got is not None and got < 1:
        _refuse(what, got, "a whole number, at least 1", to_type)


def _refuse(what: str, got: object, expected: str, to_type: str) -> None:
    raise LaunchError(explain(f"{what} cannot be {got}", got=got, expected=expected, to_type=to_type))


def _without_recipe(servers: int) -> LaunchError:
    got, expected = f"--servers {servers} alone", "a recipe to put over a parameter server"
    to_type = f"--recipe async_sgd --servers {servers}"
    return LaunchError(explain("--servers needs --recipe", got=got, expected=expected, to_type=to_type))
