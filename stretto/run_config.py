"""Configuration of a run: the options of the command line, each declared once.

The same fields are the options of `stretto run`, the keys of a file for `--config`, and the keys of `run.json`; the
processes of a run receive them in the environment variable STRETTO_CONFIG.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import msgspec

from stretto import free_ports
from stretto.host_list import parse as parse_hosts
from stretto.interval import NEVER, Interval, every
from stretto.run_dir import cores
from stretto.units import spelled

OnResize = Literal["per-worker-batch", "global-batch"]
Output = Literal["rank0", "all", "none"]
OnNan = Literal["stop", "skip"]
GlobalBatch = Literal["keep", "split"]
Uneven = Literal["train", "drop"]
LrScale = Literal["none", "linear", "sqrt"]
ResumeStream = Literal["skip", "restart"]
"""Ways to continue a stream that cannot be brought to its place."""

WORKERS, SERVER, FAILURES = "Workers and recipe", "Parameter server", "Failures and membership"
HOSTS, CHECKPOINTS, OUTPUT = "Several machines", "Checkpoints", "Output"
"""Headings of the help texts."""


@dataclass(frozen=True)
class Option:
    """Command-line option of a field: its help text, and the heading that it stands under.

    `names` are its names where the field's is not its own, `default` is shown where the default value says little.
    """

    help: str
    heading: str
    metavar: str | None = None
    default: str | None = None
    names: tuple[str, ...] = ()
    completed_by_recipes: bool = False
    variable: str | None = None
    """Environment variable that sets the option."""


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of a run of a script file or, with `module`, of a module.

    Fields without an option are set by the launcher.
    """

    script: Path
    args: tuple[str, ...] = ()
    module: Annotated[
        bool, Option("SCRIPT is the name of a module, as for python -m.", WORKERS, names=("-m", "--module"))
    ] = False
    workers: Annotated[int, Option("Number of workers on this machine.", WORKERS, "N", names=("-n", "--workers"))] = 1
    recipe: Annotated[
        str | None,
        Option(
            "Recipe; overrides the one in the script.",
            WORKERS,
            default="the script's",
            completed_by_recipes=True,
            variable="STRETTO_RECIPE",
        ),
    ] = None
    layout: Annotated[
        str | None,
        Option(
            'Layout: what one worker is, such as "pipeline(stages=4)"; -n then counts all processes of all workers.',
            WORKERS,
            default="whole()",
        ),
    ] = None
    seed: Annotated[int, Option("Added to every seed that the script sets.", WORKERS, "N")] = 0
    threads: Annotated[int | None, Option("Threads per worker.", WORKERS, "N", "the cores, shared out")] = None
    stragglers: Annotated[
        str | None, Option('Slow workers down by a factor: "1:2.0,3:5.0".', WORKERS, "WORKER:FACTOR,...", "none")
    ] = None
    global_batch: Annotated[
        GlobalBatch,
        Option(
            "The script's batch is each worker's (keep), or is split among all workers (split).",
            WORKERS,
            names=("--batch",),
        ),
    ] = "keep"
    shares: Annotated[
        str,
        Option(
            "Division of each global step among the workers, under recipes that wait: evenly, by their speeds as they "
            "are measured, in ratios (1:1:0.2), or as in a run before.",
            WORKERS,
            "even|speed|N:N:...|RUN",
        ),
    ] = "even"
    max_batch: Annotated[
        str | None,
        Option(
            "Largest share of a global step that some workers have memory for, under recipes that wait; the others "
            "have the rest: 0:64,1:16.",
            WORKERS,
            "WORKER:SAMPLES,...",
            "no limit",
        ),
    ] = None
    uneven: Annotated[
        Uneven,
        Option(
            "A last step with fewer whole batches than workers: trained, others making a pass of weight 0, or dropped.",
            WORKERS,
        ),
    ] = "train"
    lr_scale: Annotated[
        LrScale,
        Option("Multiply the script's learning rate by the number of workers, or by its square root.", WORKERS),
    ] = "none"
    trainers: Annotated[
        bool,
        Option(
            "Leave the loops of other libraries, such as transformers.Trainer, alone.",
            WORKERS,
            names=(" /--no-trainers",),
        ),
    ] = True
    servers: Annotated[
        int | None,
        Option(
            "Run the recipe over a parameter server of N shards, here or on hosts that ssh reaches: 2@a,1@b.",
            SERVER,
            "N[@HOST],...",
            "the recipe's",
        ),
    ] = None
    on_nan: Annotated[OnNan, Option("End the run at an update that is not finite, or skip the update.", SERVER)] = (
        "stop"
    )
    plain: Annotated[
        bool,
        Option(
            "Do not encrypt the traffic with the parameter server and the coordinator, and between hosts.",
            SERVER,
            names=("--no-encryption",),
        ),
    ] = False
    failure_timeout_s: Annotated[
        float,
        Option(
            "Declare a process failed after this long without a heartbeat.",
            FAILURES,
            "TIME",
            "10s",
            ("--failure-timeout",),
        ),
    ] = 10.0
    timeout_s: Annotated[
        float, Option("Longest wait for a message of another process.", FAILURES, "SECONDS", names=("--timeout",))
    ] = 600.0
    restarts: Annotated[int, Option("Number of times that a failed process is restarted.", FAILURES, "N")] = 3
    recovery: Annotated[
        bool,
        Option("End the run at the first failure; no coordinator is started.", FAILURES, names=(" /--no-recovery",)),
    ] = True
    min_workers: Annotated[int, Option("End the run when fewer workers are left.", FAILURES, "N")] = 1
    max_workers: Annotated[int | None, Option("Admit no more workers than this.", FAILURES, "N", "no limit")] = None
    on_resize: Annotated[
        OnResize,
        Option(
            "Batch size kept when the number of workers changes: the global one, or each worker's own.",
            FAILURES,
        ),
    ] = "global-batch"
    host: Annotated[
        str | None,
        Option(
            "Address of this machine, and port, at which `stretto join` on other machines reaches the run: the one "
            "port that has to be open.",
            HOSTS,
            "ADDRESS[:PORT]",
            "this machine alone",
            ("--listen",),
        ),
    ] = None
    wait_for: Annotated[
        int | None,
        Option(
            "With --listen, begin with N workers in all: those that `stretto join` adds are awaited, and count for "
            "--lr-scale and --batch split.",
            HOSTS,
            "N",
            "those that this command starts",
        ),
    ] = None
    hosts: Annotated[
        str | None,
        Option(
            "Hosts on which ssh starts workers of this run, with the number of workers on each: a:2,user@b:4.",
            HOSTS,
            "HOST[:N],...",
            "none",
        ),
    ] = None
    hostfile: Annotated[
        Path | None,
        Option(
            "File of such hosts, one a line: `a`, `a:2` or `a slots=2`; `#` begins a comment.", HOSTS, "FILE", "none"
        ),
    ] = None
    remote_stretto: Annotated[
        str,
        Option('Shell command that runs Stretto on the hosts, such as "~/venv/bin/stretto".', HOSTS, "COMMAND"),
    ] = "stretto"
    secret_file: Annotated[
        Path | None,
        Option("File with the secret of the run: 64 hexadecimal digits, mode 600.", HOSTS, "FILE", "a new secret"),
    ] = None
    on: Annotated[
        str | None,
        Option(
            "Cluster engine that starts the workers: ray, at RAY_ADDRESS or on this machine; or ray://HEAD:PORT; "
            "spark, as spark-submit or its settings say; or spark://HEAD:PORT.",
            HOSTS,
            "ENGINE",
            "this machine",
        ),
    ] = None
    resources: Annotated[
        str | None,
        Option('Resources of each worker with --on, such as "1 GPU, 4 CPU".', HOSTS, "N NAME,...", "1 CPU"),
    ] = None
    relay: Annotated[
        bool,
        Option(
            "With --listen, pass all that workers of different hosts exchange through the port of --listen, without an "
            "attempt to connect directly.",
            HOSTS,
        ),
    ] = False
    ports: Annotated[
        str | None,
        Option(
            "With --listen, the ports that workers, shards and the batch dispatcher take, on all machines.",
            HOSTS,
            "A-B",
            "free ones",
        ),
    ] = None
    port: Annotated[int | None, Option("Rendezvous port.", FAILURES, "N", "a free one")] = None
    faults: Annotated[str | None, Option('Faults to inject: "kill worker every 20s".', FAILURES, "FAULTS", "none")] = (
        None
    )
    checkpoint_every: Annotated[
        str | None,
        Option(
            'Interval between checkpoints: 5m, "20 rounds"; or never.',
            CHECKPOINTS,
            "TIME|ROUNDS",
            "first after 10 minutes, then at most 3% of the time",
        ),
    ] = None
    keep: Annotated[int | None, Option("Number of checkpoints kept.", CHECKPOINTS, "N", "the newest 3")] = None
    resume: Annotated[
        Path | None,
        Option("Continue from the newest complete checkpoint of this run.", CHECKPOINTS, "RUN", "a new run"),
    ] = None
    resume_stream: Annotated[
        ResumeStream | None,
        Option(
            "With --resume, do not bring a stream to the place where the run stopped: train what it gives now as the "
            "rest of the epoch (skip), or begin the epoch and its stream again (restart).",
            CHECKPOINTS,
            default="read it to its place",
        ),
    ] = None
    stop_within_s: Annotated[
        float,
        Option(
            "After SIGTERM, let all workers write a checkpoint and leave, within this time.",
            CHECKPOINTS,
            "TIME",
            "end at once",
            ("--stop-within",),
        ),
    ] = 0.0
    copy_to: Annotated[
        str | None,
        Option(
            "Copy the checkpoints, and at the end the run, here too: a folder, s3://...", CHECKPOINTS, "URI", "none"
        ),
    ] = None
    out: Annotated[Path | None, Option("Run folder.", OUTPUT, default="runs/DATE-NAME")] = None
    output: Annotated[Output, Option("Output that is shown: of worker 0, of all workers, or none.", OUTPUT)] = "rank0"
    server_hosts: str | None = None
    """Hosts of the shards, with the number of shards on each, as in `hosts`; None if they are on this machine."""
    announced: int = 0
    """Number of workers that tasks of a cluster's job, or an engine, start beside those of this machine."""
    listen_port: int | None = None
    """Port of the coordinator; None for a free one."""
    single_process: bool = False
    """True if all communication is disabled."""
    global_batch_of: int = 1
    """Number of the script's batches that form one batch."""
    keep_states: bool = False
    """True if the model and optimizer state are written at the end, for a comparison."""
    private_files: Path | None = None
    """Folder in which the launcher has made private files of the script; None where it works in its own folder."""
    ranks: int = 1
    """Number of processes of each worker."""
    scaled_workers: int | None = None
    """Number of workers for the factor on the learning rate; None for the number that is started."""
    retyped: tuple[str, ...] = ()
    """Words after `stretto run --resume FOLDER` that continue the run."""
    launched_from: str | None = None
    """Working folder of the run's launcher, in the options that launchers that join receive."""
    subcommand: str = "run"
    """Command of `stretto` that started the run."""
    first_checkpoint_s: float = 600.0
    """Seconds after which a run for which no interval was typed writes its first checkpoint."""

    @property
    def checkpoints(self) -> Interval | None:
        """Interval between checkpoints, which begins now; None for a run that writes none.

        Without a typed one, checkpoints are written where the coordinator asks for them, or a single worker decides.
        """
        if self.checkpoint_every is not None:
            return every(self.checkpoint_every) if self.checkpoint_every != NEVER else None
        is_alone = self.workers * self.ranks == 1 and not self.announced
        return Interval(self.first_checkpoint_s, follows_cost=True) if self.elastic or is_alone else None

    @property
    def lr_factor(self) -> float:
        """Factor on the learning rate of the script."""
        count = self.scaled_workers or self.initial_workers * self.global_batch_of
        return {"none": 1.0, "linear": float(count), "sqrt": math.sqrt(count)}[self.lr_scale]

    @property
    def initial_workers(self) -> int:
        """Number of workers that the run begins with: those that are awaited, or else the fewest that it needs."""
        return max(self.awaited, self.wait_for or 0) or self.min_workers

    @property
    def awaited(self) -> int:
        """Number of workers that are started on this machine, its hosts and by its job; 0 if all join by hand."""
        return self.workers + self.announced + sum(host.workers for host in parse_hosts(self.hosts or ""))

    @property
    def most_workers(self) -> int:
        """Number of workers that a cluster starts as soon as it has room; the run begins with the initial ones."""
        return max(self.max_workers or 0, self.announced)

    @property
    def elastic(self) -> bool:
        """True if the run survives failed workers; it has a coordinator then."""
        several = self.workers * self.ranks > 1 or self.host is not None or self.on is not None
        return several and not self.single_process and self.recovery

    @property
    def name(self) -> str:
        """Name of the program, for the name of a run folder."""
        return str(self.script) if self.module else self.script.stem

    @property
    def port_range(self) -> range | None:
        """Ports of workers and shards; None for any that are free."""
        return free_ports.parse(self.ports) if self.ports is not None else None

    def threads_each(self) -> int:
        """Return the threads of each worker: as given, else an equal share of the cores, at least one."""
        return self.threads or max(1, cores() // max(1, self.workers * self.ranks))

    def record(self) -> dict[str, Any]:
        """Return the configuration for `run.json`; `--config` reads it. The folder of the run is left out."""
        fields = msgspec.to_builtins(self, enc_hook=str)
        placed = [f"{host.workers}@{host.name}" for host in parse_hosts(self.server_hosts or "")]
        return {name: value for name, value in fields.items() if name not in NOT_RECORDED} | {
            "servers": ",".join(placed) or self.servers,
            "threads": self.threads_each(),
            "workers": self.workers or (self.announced if self.on is not None else 0),
        }


NOT_RECORDED = (
    "out",
    "private_files",
    "retyped",
    "subcommand",
    "server_hosts",
    "scaled_workers",
    "announced",
    "launched_from",
    "first_checkpoint_s",
)


@functools.cache
def options() -> Mapping[str, tuple[Any, Option, Any]]:
    """Return the type, the option and the default value of each field that has an option."""
    hints = get_type_hints(RunConfig, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(RunConfig)}
    return {
        name: (hint.__origin__, _named(hint.__metadata__[0], name), defaults[name])
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
    }


def _named(option: Option, field: str) -> Option:
    """Return the option with its names: those that are given, or else that of its field."""
    return option if option.names else replace(option, names=(f"--{field.replace('_', '-')}",))


def typed_options(config: RunConfig, names: Iterable[str]) -> list[str]:
    """Return the words that are typed for those of these options that differ from their defaults.

    >>> typed_options(RunConfig(Path("train.py"), plain=True, failure_timeout_s=5.0), ("plain", "failure_timeout_s"))
    ['--no-encryption', '--failure-timeout', '5s']
    """
    words: list[str] = []
    for name in names:
        kind, option, default = options()[name]
        value = getattr(config, name)
        if value != default:
            words.append(option.names[-1])
            words += [] if kind is bool else [_typed(value, option)]
    return words


def _typed(value: Any, option: Option) -> str:
    text = spelled(value) if isinstance(value, float) else str(value)
    return f"{text}s" if option.metavar == "TIME" else text


def decode_path(wanted: type, value: Any) -> Any:
    """Return a field of a type that JSON lacks: the hook of msgspec's decoders for a configuration."""
    return wanted(value)
