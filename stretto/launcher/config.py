"""Checks of a run configuration, which precede the start of any process, and its derived values."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from stretto.checkpoint.folder import CheckpointFolder
from stretto.data.shares import EVEN, Move, parse_limits, unlisted
from stretto.data.shares import parse as parse_shares
from stretto.data.shares import spelled as spelled_moves
from stretto.errors import LaunchError, explain
from stretto.events import read_events
from stretto.faults.plan import Fault, FaultEvent, Kill, Pause, check_live, parse, schedule
from stretto.faults.plan import check as check_faults
from stretto.faults.stragglers import factors
from stretto.host_list import from_file
from stretto.host_list import parse as parse_hosts
from stretto.interval import NEVER
from stretto.launcher import entry
from stretto.launcher.engines.clusters import kind_of
from stretto.launcher.engines.resources import DEFAULT
from stretto.launcher.engines.resources import parse as parse_resources
from stretto.launcher.layout_checks import check_layout
from stretto.launcher.listeners import is_address, own_addresses
from stretto.masking import masked
from stretto.run_config import RunConfig
from stretto.run_dir import CHECKPOINTS, check_owner, section_folders
from stretto.units import spelled

LARGEST_SEED = 2**32 - 1
MIN_FAILURE_TIMEOUT_S = 0.1


def described(config: RunConfig) -> str:
    """Return the workers, the program and the recipe, for the line that announces the run."""
    program = shlex.join(masked(entry.typed(config.script, config.module, config.args)))
    workers = f"{config.initial_workers} worker{'s' * (config.initial_workers != 1)}"
    missing = config.initial_workers - config.awaited
    begins = f"; the run begins when {missing} {'has' if missing == 1 else 'have'} joined" * (missing > 0)
    if config.hosts:
        elsewhere = (f"{host.workers} on {host.name}" for host in parse_hosts(config.hosts))
        workers += f" ({', '.join([f'{config.workers} here', *elsewhere])}{begins})"
    elif config.on:
        workers += f" ({kind_of(config.on).place}s of {config.on}, each with {config.resources or DEFAULT})"
    elif config.announced:
        workers += f" (1 here, {config.announced} in other tasks)"
    elif begins:
        workers += f" ({config.workers} here{begins})"
    of = f"of {config.ranks} processes each, {config.layout}, running" if config.ranks > 1 else "of"
    recipe = f"recipe {config.recipe}" if config.recipe is not None else "the script's recipe"
    resumed = f", from the newest checkpoint of {config.resume}" if config.resume is not None else ""
    return f"{workers} {of} {program}, {recipe}{resumed}"


def with_hosts(config: RunConfig) -> RunConfig:
    """Return the configuration with the hosts of its host file. Raises LaunchError for a file without hosts."""
    if config.hostfile is None:
        return config
    if config.hosts is not None:
        problem, got = "the hosts are given twice", f"--hosts {config.hosts} --hostfile {config.hostfile}"
        to_type = f"--hostfile {config.hostfile}"
        raise LaunchError(explain(problem, got=got, expected="one of the two", to_type=to_type))
    return replace(config, hosts=from_file(config.hostfile), hostfile=None)


def on_engine(config: RunConfig) -> RunConfig:
    """Return the configuration with all workers on the cluster that `--on` names. Raises LaunchError."""
    if config.on is None:
        if config.resources is not None:
            problem, got = "--resources needs --on", f"--resources {config.resources!r}"
            to_type = f'--on ray --resources "{config.resources}"'
            raise LaunchError(explain(problem, got=got, expected="an engine", to_type=to_type))
        return config
    kind_of(config.on)
    _at_least_one("the number of workers", config.workers, f"-n 4 --on {config.on}")
    refused = {"--hosts": config.hosts, "--layout": config.layout, "--no-recovery": not config.recovery}
    if (option := next((name for name, value in refused.items() if value), None)) is not None:
        problem, got = f"workers on a cluster cannot run with {option}", f"--on {config.on} {option}"
        raise LaunchError(explain(problem, got=got, expected="one of the two", to_type=f"--on {config.on}"))
    processors = parse_resources(config.resources).get("CPU")
    threads = config.threads or (max(1, int(processors)) if processors is not None else None)
    return replace(config, workers=0, announced=config.workers, threads=threads)


def settled(config: RunConfig) -> RunConfig:
    """Return the configuration with derived values: script file, recipe over its servers, number of servers."""
    script = config.script if config.module else entry.located(config.script)
    config = replace(config, script=script, resume=config.resume and config.resume.resolve())
    config = _with_port(_in_workers(config))
    if checkpoint_notice(config) is not None:
        config = replace(config, checkpoint_every=NEVER)
    config = replace(config, shares=_with_moves(config.shares))
    if config.recipe is None:
        return replace(config, servers=None)
    from stretto.recipe.parser import parse, with_shards

    make_codecs_importable(config)
    recipe = with_shards(config.recipe, config.servers) if config.servers else config.recipe
    shards = parse(recipe).shards
    return replace(config, recipe=recipe, servers=None if config.single_process else shards or None)


def _with_moves(shares: str) -> str:
    """Return the moves of a run in place of its folder. Raises LaunchError for a folder without any."""
    if not Path(shares).is_dir():
        return shares
    log = Path(shares) / "events.jsonl"
    events = [one for one in read_events(log) if one["event"] == "shares"] if log.exists() else []
    if not events:
        problem, expected = "there are no shares to repeat", "the folder of a run with --shares speed"
        raise LaunchError(explain(problem, got=f"--shares {shares}", expected=expected, to_type="--shares speed"))
    moved = [one for one in events if one["after"] is not None]
    return spelled_moves([Move(one["epoch"], one["after"], unlisted(one["paces"])) for one in moved]) if moved else EVEN


def ranks_of(config: RunConfig) -> int:
    """Return the number of processes of each worker under the layout."""
    if config.layout is None:
        return 1
    from stretto.recipe.parser import parse_layout

    return parse_layout(config.layout).ranks_in(config.workers)


def _in_workers(config: RunConfig) -> RunConfig:
    """Return the configuration with numbers of workers in place of those of processes, if a layout is given."""
    ranks = ranks_of(config)
    if ranks == 1 or config.ranks > 1:
        return config
    hosts = ",".join(f"{one.name}:{one.workers // ranks}" for one in parse_hosts(config.hosts or "")) or None
    return replace(config, workers=config.workers // ranks, hosts=hosts, ranks=ranks)


def _with_port(config: RunConfig) -> RunConfig:
    """Return the configuration with the port of `--listen ADDRESS:PORT` in a field of its own."""
    host, colon, port = (config.host or "").rpartition(":")
    if not colon or ":" in host:  # without a port, or an IPv6 address
        return config
    if not is_address(f"{host}:{port}"):
        _refuse(
            "the address to listen on", f"--listen {config.host}", "ADDRESS or ADDRESS:PORT", "--listen 10.0.0.1:7878"
        )
    return replace(config, host=host, listen_port=int(port))


def codec_folder(config: RunConfig) -> str | None:
    """Return the folder from which a recipe's own codecs are imported: that of the script; None if it has none."""
    from stretto.recipe.parser import import_paths

    if config.recipe is None or not import_paths(config.recipe):
        return None
    return str(Path.cwd() if config.module else Path(config.script).resolve().parent)


def make_codecs_importable(config: RunConfig) -> None:
    """Let this process import a recipe's own codecs as the script does."""
    folder = codec_folder(config)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def server_notice(config: RunConfig) -> str | None:
    """Return what `--servers` makes of a recipe that has no server of its own, or None where it changes nothing."""
    if config.recipe is None or not config.servers or config.single_process:
        return None
    from stretto.recipe.parser import parse

    if parse(config.recipe).shards:
        return None
    shards = f"{config.servers} shard{'s' * (config.servers > 1)}"
    means = f"the workers exchange through a parameter server of {shards}, not with each other"
    return f"--servers {config.servers} makes {settled(config).recipe} of the recipe {config.recipe}: {means}"


def checkpoint_notice(config: RunConfig) -> str | None:
    """Return the reason why a run, for which no interval was typed, writes no checkpoints; None if it writes any."""
    if config.checkpoint_every is not None or config.single_process:
        return None
    if config.layout is not None:
        from stretto.recipe.parser import parse_layout

        if not parse_layout(config.layout).takes_recipe:
            rotated = 'column blocks have rotated, not by the clock; --checkpoint-every "4 rounds" writes them'
            return f"no checkpoints are written: the processes of this layout save when {rotated}"
    return None


def is_asynchronous(config: RunConfig) -> bool:
    """Return True if the recipe of a resolved configuration is asynchronous."""
    if config.recipe is None:
        return False
    from stretto.recipe.parser import parse

    return parse(config.recipe).asynchronous


def _waits_at_servers(config: RunConfig) -> bool:
    """Return True if the workers of a resolved configuration wait for each other at a parameter server."""
    return bool(config.servers) and not is_asynchronous(config)


def check(config: RunConfig, live: bool = True) -> None:
    """Raise LaunchError or RecipeError if the configuration cannot be run.

    A run that is not `live` is simulated and has no encrypted traffic with a coordinator.
    """
    entry.check(config.script, config.module)
    _check_numbers(config)
    if config.single_process and config.workers != 1:
        raise LaunchError(explain("alone means one worker", got=config.workers, expected="1 worker", to_type="-n 1"))
    if config.servers and config.recipe is None:
        raise _without_recipe(config.servers)
    check_layout(config, ranks_of(config), lambda: _waits_at_servers(settled(config)))
    config = _in_workers(config)
    factors(config.stragglers, config.initial_workers)
    _check_server_options(config, live)
    _check_survival(config)
    _check_host(config)
    _check_growth(config)
    _check_relay(config)
    _check_faults(config)
    _check_checkpoints(config)
    _check_batch(config)


def _check_server_options(config: RunConfig, live: bool) -> None:
    """Raise LaunchError for options that have no effect without a server."""
    from stretto.recipe.parser import parse

    recipe = settled(config).recipe
    parsed_recipe = parse(recipe) if recipe is not None else None
    got = f"--recipe {recipe}" if recipe is not None else "no --recipe"
    if config.on_nan == "skip" and not (parsed_recipe and parsed_recipe.asynchronous):
        problem, expected = (
            "only an update that arrives at a server can be skipped",
            "a recipe on arrival, as async_sgd",
        )
        raise LaunchError(explain(problem, got=got, expected=expected, to_type="--recipe async_sgd --on-nan skip"))
    if config.plain and not (parsed_recipe and parsed_recipe.shards) and not (live and config.elastic):
        problem, expected = (
            "no traffic with a server could be unencrypted",
            "a recipe with a server, as async_sgd",
        )
        raise LaunchError(explain(problem, got=got, expected=expected, to_type="--recipe async_sgd --no-encryption"))


def _check_numbers(config: RunConfig) -> None:
    if config.workers or (config.host is None and config.on is None):
        _at_least_one("the number of workers", config.workers, "-n 4, or -n 0 --listen 10.0.0.1:7878")
    _at_least_one("the number of threads per worker", config.threads, "--threads 1")
    _at_least_one("the number of joined batches", config.global_batch_of, "global_batch_of=4")
    _at_least_one("the number of servers", config.servers, "--servers 2")
    if not 0 <= config.seed <= LARGEST_SEED:
        _refuse("the seed", config.seed, f"a whole number from 0 to {LARGEST_SEED}", "--seed 1")
    if not (config.timeout_s > 0 and math.isfinite(config.timeout_s)):
        _refuse("the limit of a wait", config.timeout_s, "seconds, more than 0", "--timeout 600")
    if config.port is not None and not 0 <= config.port <= 65535:
        _refuse("the port", config.port, "a port from 1 to 65535, or 0 for a free one", "leave --port away")


def _check_survival(config: RunConfig) -> None:
    """Raise LaunchError for impossible limits."""
    minimum, maximum = config.min_workers, config.max_workers
    if config.wait_for is not None:
        _check_wait(config, config.wait_for)
    if not (config.failure_timeout_s >= MIN_FAILURE_TIMEOUT_S and math.isfinite(config.failure_timeout_s)):
        got, to_type = f"{spelled(config.failure_timeout_s)}s", "--failure-timeout 10s"
        _refuse("the failure timeout", got, "a time, at least 100ms", to_type)
    workers = config.initial_workers
    if not 1 <= minimum <= workers:
        started = f"a number from 1 to {workers}, as many as are started"
        _refuse("the minimum number of workers", minimum, started, f"--min-workers {max(workers, 1)}")
    if maximum is not None and maximum < workers:
        started = f"at least {workers}, as many as are started"
        _refuse("the largest number of workers", maximum, started, f"--max-workers {workers}")
    if config.restarts < 0:
        _refuse("the number of restarts", config.restarts, "a whole number, 0 or more", "--restarts 3")


def _check_wait(config: RunConfig, wait_for: int) -> None:
    """Raise LaunchError for a number of workers to wait for that no others could reach."""
    if config.host is None or config.on is not None:
        problem, got = "no others could join", f"--wait-for {wait_for}" + f" --on {config.on}" * (config.on is not None)
        expected, to_type = "a run that others join", f"--listen 10.0.0.1:7878 --wait-for {wait_for}"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
    if wait_for < max(config.awaited, 1):
        expected = f"at least {max(config.awaited, 1)}, as many as are started"
        _refuse("the number of workers to wait for", wait_for, expected, f"--wait-for {config.awaited + 1}")


def _check_host(config: RunConfig) -> None:
    """Raise LaunchError for a run that workers cannot join."""
    if config.host is None:
        if config.hosts is not None and config.on is None:
            raise _without_listen("--hosts", config.hosts)
        if config.server_hosts is not None:
            raise _without_listen("--servers", str(config.record()["servers"]))
        if config.secret_file is not None:
            problem, got = "only a run that others join has a secret to share", f"--secret-file {config.secret_file}"
            to_type = f"--listen 10.0.0.1:7878 {got}"
            raise LaunchError(explain(problem, got=got, expected="a run with --listen", to_type=to_type))
        return
    if not config.recovery:
        problem, got = "workers join through the coordinator", f"--listen {config.host} --no-recovery"
        raise LaunchError(explain(problem, got=got, expected="one of the two", to_type=f"--listen {config.host}"))
    if config.secret_file is not None and config.plain:
        problem, got = "a run without encryption has no secret", "--secret-file --no-encryption"
        raise LaunchError(explain(problem, got=got, expected="one of the two", to_type="--secret-file FILE"))
    if config.single_process:
        _refuse("the host of a run alone", config.host, "a run that others can join", "leave --listen away")


def _check_growth(config: RunConfig) -> None:
    """Raise LaunchError for a run of one worker that others join: its parameter server has no update rule."""
    grows = config.host is not None or (config.on is not None and config.most_workers > config.initial_workers)
    if not grows or config.initial_workers > 1 or not settled(config).servers:
        return
    number, options = config.workers + config.announced, {"on": config.on, "max-workers": config.max_workers}
    options |= {"listen": config.host}
    words = " ".join(f"--{name} {value}" for name, value in options.items() if value is not None)
    problem, expected = "one worker over a parameter server cannot be joined", "at least 2 workers from the start"
    to_type = f"-n 2 {words}" if config.on is not None else f"-n {number} --wait-for 2 {words}"
    got = f"-n {number} {words} --recipe {config.recipe}"
    raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))


def _without_listen(option: str, hosts: str) -> LaunchError:
    """Return the error for hosts that cannot reach this machine."""
    addresses = own_addresses()
    expected = f"an address of this machine that the hosts reach, such as {', '.join(addresses)}"
    got = f"{option} {hosts}"
    to_type = f"{got} --listen {addresses[-1]}"
    return LaunchError(explain(f"{option} needs --listen", got=got, expected=expected, to_type=to_type))


def _check_relay(config: RunConfig) -> None:
    """Raise LaunchError for a relay or ports that no worker would use."""
    if config.port_range is not None and (config.host is None or config.plain):
        problem, expected = "ports are limited for other machines, in encrypted runs", "an encrypted run with --listen"
        got = f"--ports {config.ports}" + " --no-encryption" * config.plain
        to_type = f"--listen 10.0.0.1:7878 --ports {config.ports}"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
    if not config.relay:
        return
    got = "--relay" + f" --listen {config.host}" * bool(config.host) + " --no-encryption" * config.plain
    if config.host is None or config.plain:
        problem = "only encrypted traffic between hosts can be relayed"
        expected, to_type = "a run that other hosts join, encrypted", "--listen 10.0.0.1:7878 --relay"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
    if settled(config).servers:
        problem = "over a parameter server no worker connects with another one, so there is nothing to relay"
        got += f" --recipe {settled(config).recipe}"
        raise LaunchError(explain(problem, got=got, expected="no --relay", to_type=f"--listen {config.host}"))


def _check_batch(config: RunConfig) -> None:
    """Raise LaunchError for a scaled learning rate without a larger batch, or shares that the workers can't have."""
    if config.shares != EVEN:
        from stretto.recipe.parser import parse
        from stretto.recipe.recipe import refuse_shares

        run = settled(config)
        shares = parse_shares(run.shares)
        if run.recipe is not None:
            refuse_shares(parse(run.recipe), f"--shares {config.shares}")
        if shares.paces and len(shares.paces) != config.initial_workers:
            problem, expected = "--shares has a number for each worker", f"{config.initial_workers} numbers"
            to_type = "--shares " + ":".join("1" * config.initial_workers) if config.initial_workers > 1 else "-n 2"
            raise LaunchError(explain(problem, got=f"--shares {config.shares}", expected=expected, to_type=to_type))
    if config.max_batch is not None:
        from stretto.recipe.parser import parse
        from stretto.recipe.recipe import refuse_shares

        asked, largest = f"--max-batch {config.max_batch}", max(parse_limits(config.max_batch), default=0)
        if (recipe := settled(config).recipe) is not None:
            refuse_shares(parse(recipe), asked)
        if not 0 < largest < config.initial_workers and config.host is None:
            problem, expected = (
                "--max-batch limits shares of several workers",
                f"numbers below {config.initial_workers}",
            )
            raise LaunchError(explain(problem, got=asked, expected=expected, to_type="-n 2 --max-batch 1:16"))
    if config.global_batch == "split" and config.lr_scale != "none":
        problem = "--lr-scale is for a larger batch, and with --batch split all workers share the script's batch"
        got, to_type = f"--batch split --lr-scale {config.lr_scale}", "--batch split, or --lr-scale alone"
        raise LaunchError(explain(problem, got=got, expected="one of the two", to_type=to_type))


def _check_faults(config: RunConfig) -> None:
    if config.faults is not None:
        faults = parse(config.faults)
        check_faults(faults, config.workers, settled(config).servers or 0)
        check_live(faults, config.restarts)
        if not config.elastic and any(_targets_coordinator(fault) for fault in faults):
            problem, expected = "there is no coordinator for the fault", "at least 2 workers"
            raise LaunchError(explain(problem, got=f"--faults {config.faults!r}", expected=expected, to_type="-n 4"))


def _targets_coordinator(fault: Fault) -> bool:
    return isinstance(fault, Kill | Pause) and fault.who.kind == "coordinator"


def planned(config: RunConfig) -> Iterator[tuple[float, FaultEvent]]:
    """Yield the faults of a resolved configuration, each with the seconds after the start of the run."""
    faults = parse(config.faults) if config.faults is not None else ()
    return schedule(faults, config.workers, config.servers or 0, config.seed, supervised=config.elastic)


def _check_checkpoints(config: RunConfig) -> None:
    _at_least_one("the number of checkpoints kept", config.keep, "--keep 3")
    if config.checkpoints is None and config.keep is not None:
        problem, expected = "--keep changes nothing in a run without checkpoints", "how often a checkpoint is written"
        to_type = f"--checkpoint-every 5m --keep {config.keep}"
        got = f"--keep {config.keep}" + f" --checkpoint-every {NEVER}" * (config.checkpoint_every is not None)
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
    if config.stop_within_s and not (config.checkpoints is not None and config.elastic):
        problem, expected = "no checkpoint could be written at the end", "checkpoints, and workers that may leave"
        got, to_type = f"--stop-within {spelled(config.stop_within_s)}s", "-n 2 --stop-within 25s"
        got += f" --checkpoint-every {config.checkpoint_every}" * (config.checkpoint_every is not None)
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
    if config.resume is not None:
        if not (config.resume / CHECKPOINTS).is_dir():
            _refuse_resume(config.resume)
        check_owner(config.resume, "--resume")
        if all(lacks := _missing(config.resume)):
            problem, expected = f"there is no complete checkpoint in {config.resume}", "all files of one checkpoint"
            to_type = "stretto run without --resume; or another copy of the folder"
            raise LaunchError(explain(problem, got=lacks[-1] or "", expected=expected, to_type=to_type))
    elif config.resume_stream is not None:
        problem, expected = "--resume-stream changes nothing without --resume", "the run that is continued"
        got, to_type = (
            f"--resume-stream {config.resume_stream}",
            f"--resume runs/RUN --resume-stream {config.resume_stream}",
        )
        raise LaunchError(explain(problem, got=f"{got} alone", expected=expected, to_type=to_type))


def _missing(run: Path) -> list[str | None]:
    """Return for each section of a run what its checkpoints lack; None if one is complete."""
    return [CheckpointFolder(one / CHECKPOINTS).missing() for one in (run, *section_folders(run))]


def _refuse_resume(run: Path) -> None:
    found = run.absolute().parent.glob(f"*/{CHECKPOINTS}")
    near = sorted(path.parent for path in found if not all(_missing(path.parent)))
    problem = f"{run} has no checkpoints" if run.is_dir() else f"there is no run {run}"
    expected = "the folder of a run with checkpoints" + (f"; near it are {_names(near)}" if near else "")
    to_type = (
        f"--resume {run.parent / near[-1].name}" if near else "--resume runs/RUN, of a run with --checkpoint-every 5m"
    )
    raise LaunchError(explain(problem, got=f"--resume {run}", expected=expected, to_type=to_type))


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths[-3:])


def _at_least_one(field: str, got: int | None, to_type: str) -> None:
    if got is not None and got < 1:
        _refuse(field, got, "a whole number, at least 1", to_type)


def _refuse(field: str, got: object, expected: str, to_type: str) -> None:
    raise LaunchError(explain(f"{field} cannot be {got}", got=got, expected=expected, to_type=to_type))


def _without_recipe(servers: int) -> LaunchError:
    got, expected = f"--servers {servers} alone", "a recipe to put over a parameter server"
    to_type = f"--recipe async_sgd --servers {servers}"
    return LaunchError(explain("--servers needs --recipe", got=got, expected=expected, to_type=to_type))
