"""Random runs with random faults, judged by a model that counts: is a sample lost, trained twice, or a process left?

From each seed a run is drawn: recipe, workers, layout, options, script, and faults. Faults are events of the program (a
phase, the k-th exchange, the k-th commit), so that a seed that fails fails again. A run is wrong if it does not end in
time or ends with another exit code, if a process, or a file in shared memory, is left, if replicas differ, if the
record says something else than the model (`counting_model.py`), or if a sample was not trained as often as it should.

From seed 500 on, runs of several whole workers are over two hosts (`laboratory.py`: root, iproute2), of which one may
be lost, or cut off from the other. From seed 1000 on, some runs on one host get a worker more by `stretto join`.

    python -m benchmarks hunt --seeds 0..499
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.counting_model import Counted, run_counted, unit_of
from benchmarks.laboratory import LabError, Laboratory, address, name, set_link
from benchmarks.measure import RESULTS, now, save
from benchmarks.pace import ROOT
from benchmarks.proxy import TROUBLES, proxy

QUESTION = "random runs with random faults: is anything lost, trained twice, or left?"
WHOLE = 100
"""Fewest seeds that are no trial."""
LIMIT_S = 60.0
"""Seconds after which the run of a seed counts as a hanging run."""
LEFT_S = 10.0
"""Seconds in which the processes of a run end after its launcher."""
SAMPLES, BATCH, EPOCHS = 240, 8, 2
COUNTED = ("allreduce", "local_sgd(every=3)", "local_sgd(every=4, optimizer_state='average')")
SUMMED = ("async_sgd", "async_sgd(shards=2)", "async_sgd(overlap=True)", "downpour(every=3)")
SUMMED += ("downpour(every=2, overlap=True, shards=2)",)
TOUCHED = ("diloco(every=3)", "gossip(every=2)", "gossip(every=1, graph='exponential')", "staleness_aware(collect=2)")
TOUCHED += ("soft_sync(collect=2)", "stale_synchronous(bound=2)", "elastic_averaging(every=3)", "delay_compensated")
TOUCHED += ("async_diloco(every=3)", "allreduce(how=cast('fp16'))")
RECORDED = ("gd_sec", "gd_soec", "quantised_gd_sec", "censoring", "ef21", "gradient_sharing(tau=0.001)", "power_sgd")
RECORDED += ("deep_gradient_compression(ratio=0.1)", "sparse_loco(every=3)", "one_bit(warm_up=5)")
"""Recipes whose codecs leave rows for later, or change rows that were not trained: only their record is judged."""
RECIPES = (*COUNTED, *SUMMED, *TOUCHED, *RECORDED)
OVER_A_SERVER = (*SUMMED, *TOUCHED[3:9])
PHASES = ("begun", "computed", "stepped", "exchange", "operation", "commit", "ended")
CLOCKS = ("AHEAD", "BACK", "SKIP", "SUSPEND")
HOSTS = ("KILL", "DOWN", "AWAY", "FLAP")
WITH_HOSTS = 500
"""First seed whose run is over two hosts, if it has several whole workers."""
WITH_JOINS = 1000
"""First seed whose run may get a worker more by `stretto join`."""
LOST = "a part of a stream was not trained"
OTHER_NUMBER = "each worker of the resumed run was in the middle of a shard of its own"
OWN_DISK = ["unshare", "-m", "sh", "-ec", 'mount -t tmpfs -o "size=$1" none "$2"; cd "$2"; shift 2; exec "$@"', "sh"]
"""Words before a command for which a folder is a disk of a size: both follow them."""
SSH = f"""#!/bin/sh
for command; do :; done
cd "$(dirname "$0")" && exec ip netns exec {name(1)} sh -c "$command"
"""
"""A client `ssh` that carries out its last argument on host 1, in the folder that it is in itself."""


@dataclass(frozen=True)
class Plan:
    """A run that is drawn from a seed: the recipe, the options of `stretto run`, the script's arguments, and faults."""

    seed: int
    recipe: str
    options: tuple[str, ...]
    script: tuple[str, ...]
    strikes: tuple[str, ...]
    resumed_by: int = 0
    """Processes of the resumed run, if the launcher is killed."""
    disk: str = ""
    """Size of the disk of the run folder, if it has one of its own."""

    @property
    def is_stream(self) -> bool:
        """True if the script's data has no index."""
        return "--data" in self.script

    @property
    def has_hosts(self) -> bool:
        """True if the run is over two hosts."""
        return "--hosts" in self.options

    @property
    def may_lose(self) -> bool:
        """True if the pages say that a failure costs a part of a stream, with exit code 1."""
        fails = any(not strike.endswith(("launcher", "coordinator")) for strike in self.strikes)
        return "own" in self.script and fails

    def __str__(self) -> str:
        struck = [word for strike in self.strikes for word in ("--strike", strike)]
        words = ["--recipe", self.recipe, *self.options, "counted.py", *self.script, *struck]
        text = " ".join(f'"{word}"' if re.search(r"[ ()]", word) else word for word in words)
        return text + (f", resumed with -n {self.resumed_by}" if self.resumed_by else "")


def plan_of(seed: int) -> Plan:
    """Return the run of a seed; any `len(RECIPES)` seeds from a multiple of it on have all recipes."""
    rounds, place = divmod(seed, len(RECIPES))
    recipe = random.Random(f"recipes {rounds}").sample(RECIPES, len(RECIPES))[place]
    draw = random.Random(f"run {seed}")
    waits = recipe not in OVER_A_SERVER
    workers = draw.choices((1, 2, 3, 4), (1, 3, 4, 2))[0]
    layout = draw.choice(("pipeline(stages=2)", "sharded(over=2)")) if draw.random() < 0.12 else ""
    if recipe in RECORDED:
        layout = ""
    data = draw.choices(("loader", "stream", "list", "numbers"), (14, 2, 2, 2))[0] if not layout else "loader"
    ranks, workers = (2, min(workers, 2)) if layout else (1, workers)
    options = ["-n", str(workers * ranks), "--failure-timeout", "3s"]
    options += ["--layout", layout] if layout else []
    if waits and not layout and recipe.startswith(("allreduce", "local_sgd", "diloco")) and draw.random() < 0.15:
        options += ["--servers", str(draw.choice((1, 2)))]
    script = ["--pause", "0.03"] + (["--data", data] if data != "loader" else []) + (["--divided"] if layout else [])
    if not layout and data != "numbers" and draw.random() < 0.2:
        options += ["--batch", "split"]
    if data == "loader" and waits and not layout and "split" not in options and draw.random() < 0.15:
        script += ["--deal", "contiguous"]
    elif data == "stream" and "split" not in options and draw.random() < 0.25:
        script += ["--deal", "own"]
    elif data == "loader" and not layout and draw.random() < 0.12:
        script += ["--loaders", "1"]
    if not layout and draw.random() < 0.25:
        script += ["--accumulate", str(draw.choice((2, 3))), "--drop", *draw.choice(([], ["--tail"]))]
    script += ["--adam"] if recipe.startswith("one_bit") else []
    script += ["--best"] if draw.random() < 0.25 else []
    options += ["--on-resize", "per-worker-batch"] if draw.random() < 0.12 else []
    checkpoints = draw.choice((None, "2 rounds", "5 rounds", "300ms", "1s"))
    strikes = _faults(draw, workers, ranks, "--servers" in options or not waits)
    disk = "3m" if draw.random() < 0.04 else ""
    if disk:
        strikes = [f"0:FILL:{draw.choice(('begun', 'stepped', 'ended'))}:{draw.randint(1, 2)}"]
        checkpoints = "300ms"
    resumed_by = 0
    if any(strike.endswith("launcher") for strike in strikes):
        checkpoints = checkpoints or "300ms"
        resumed_by = workers * ranks if layout or "own" in script else draw.choice((workers, workers, 2, 3, 4))
    options += ["--checkpoint-every", checkpoints] if checkpoints else []
    more = random.Random(f"more {seed}")  # the draws above stay those of earlier versions
    options += ["--restarts", str(more.choice((2, 3)))] if more.random() < 0.2 else []
    if not layout and more.random() < 0.25:
        script += ["--evaluate", str(more.choice((0, 2, 5)))]
    if workers * ranks > 1 and not disk and more.random() < 0.2:
        who = f"{more.randrange(workers)}" + (f".{more.randrange(ranks)}" if ranks > 1 else "")
        strikes += [f"{who}:CUT:{more.choice(PHASES[:-1])}:{more.randint(1, 12)}"]
    clocks = random.Random(f"clocks {seed}")
    if not disk and clocks.random() < 0.12:
        who = f"{clocks.randrange(workers)}" + (f".{clocks.randrange(ranks)}" if ranks > 1 else "")
        strikes += [f"{who}:{clocks.choice(CLOCKS)}:{clocks.choice(PHASES[:-1])}:{clocks.randint(1, 12)}"]
    troubles = random.Random(f"troubles {seed}")
    if workers * ranks > 1 and not disk and troubles.random() < 0.2:
        who = f"{troubles.randrange(workers)}" + (f".{troubles.randrange(ranks)}" if ranks > 1 else "")
        phase, at = troubles.choice(PHASES[:-1]), troubles.randint(1, 12)
        strikes += [f"{who}:{troubles.choice([*TROUBLES])}:{phase}:{at}:proxy"]
    joins = random.Random(f"joins {seed}")
    joins_fit = seed >= WITH_JOINS and workers > 1 and not layout and not disk and "own" not in script
    if joins_fit and joins.random() < 0.3:
        options += ["--listen", "127.0.0.1"]
        script[:2] = "--pause", "0.3"  # the worker more starts within the run
        strikes += [f"{joins.randrange(workers)}:JOIN:{joins.choice(('begun', 'stepped'))}:{joins.randint(1, 3)}"]
    plan = Plan(seed, recipe, tuple(options), tuple(script), tuple(strikes), resumed_by, disk)
    is_on_one_host = seed < WITH_HOSTS or workers == 1 or layout or disk or "--listen" in options
    return plan if is_on_one_host else _over_hosts(plan, workers)


def _over_hosts(plan: Plan, workers: int) -> Plan:
    """Return a plan with its workers on two hosts, of which one may be lost or cut off from the other."""
    draw = random.Random(f"hosts {plan.seed}")
    here = draw.randint(1, workers - 1)
    options = ["-n", str(here), "--hosts", f"there:{workers - here}", "--listen", address(0), *plan.options[2:]]
    strikes = [_of_host(strike, here) for strike in plan.strikes if not strike.endswith("proxy")]
    resumed_by = here if "own" in plan.script else plan.resumed_by
    script = plan.script
    if draw.random() < 0.6:
        kind, worker = draw.choice(HOSTS), draw.choice((0, workers - 1))
        strikes = [strike for strike in strikes if _is_survived(strike, here, worker)]
        strikes += [f"{worker}:{kind}:{draw.choice(PHASES[:-1])}:{draw.randint(1, 6)}:host"]
        if kind == "AWAY":
            pause = "0.2" if "split" in options else "0.4"  # a host that was cut off returns before the end
            script = ("--pause", pause, *script[2:])
        if kind == "KILL" and worker < here:  # and so does the launcher
            strikes = [strike for strike in strikes if not strike.endswith("launcher")]
            options += [] if "--checkpoint-every" in options else ["--checkpoint-every", "300ms"]
            resumed_by = resumed_by or here
    resumed_by = resumed_by if any(_ends_launcher(strike, here) for strike in strikes) else 0
    return replace(plan, options=tuple(options), script=script, strikes=tuple(strikes), resumed_by=resumed_by)


def _of_host(strike: str, here: int) -> str:
    """Return a fault; those of the launcher and its processes are carried out by workers on its host."""
    worker, rest = strike.split(":", 1)
    return f"{int(worker) % here}:{rest}" if strike.endswith(("launcher", "coordinator", "shard")) else strike


def _is_survived(strike: str, here: int, lost: int) -> bool:
    """Return whether a fault leaves workers if the host of a worker is lost, too."""
    worker, kind, *_, who = strike.split(":")
    fails = who not in ("launcher", "coordinator", "shard") and kind in ("KILL", "STOP", "TERM", "SUSPEND")
    return not fails or (int(worker) < here) == (lost < here)


def _ends_launcher(strike: str, here: int) -> bool:
    worker, kind, *_, who = strike.split(":")
    return who == "launcher" or (who == "host" and kind == "KILL" and int(worker) < here)


def _faults(draw: random.Random, workers: int, ranks: int, has_server: bool) -> list[str]:
    """Draw up to four faults: worker, signal, phase, number of the phase, and the process that gets the signal."""
    strikes: list[str] = []
    for _ in range(draw.choices(range(5), (1, 5, 4, 3, 2))[0]):
        who = draw.choices(("", ":coordinator", ":launcher", ":shard"), (11, 3, 3, 4 if has_server else 0))[0]
        signal = draw.choices(("KILL", "PAUSE", "STOP", "TERM"), (10, 4, 2, 3))[0] if not who else "KILL"
        if who in ("", ":shard") and workers * ranks == 1:
            signal = "PAUSE"  # a single process fails as under `python`, and its server with it
        signal = "PAUSE" if who in (":coordinator", ":shard") and draw.random() < 0.2 else signal
        if signal == "TERM" and (workers == 1 or any("TERM" in strike for strike in strikes)):
            signal = "KILL"
        if who == ":launcher" and any(strike.endswith(who) for strike in strikes):
            continue
        phase = draw.choice(PHASES)
        steps = EPOCHS * SAMPLES // BATCH // workers
        at = draw.randint(1, EPOCHS if phase == "ended" else max(2, steps * 2 // 3))
        rank = f".{draw.randrange(ranks)}" if ranks > 1 else ""
        strikes.append(f"{draw.randrange(workers)}{rank}:{signal}:{phase}:{at}{who}")
    return strikes


def run(seeds: Sequence[int]) -> dict[str, Any]:
    """Run the seeds one after another and print a line for each; return and write the summary of all in the table.

    Fewer than `WHOLE` seeds have a table of their own, a trial.
    """
    print(f"hunt: {QUESTION}", flush=True)
    trial = len(seeds) < WHOLE
    table = RESULTS / f"hunt{'-trial' * trial}.jsonl"
    table.touch()
    with _forking() as place:
        for seed in seeds:
            try:
                row = _row(plan_of(seed), Path(place))
            except LabError as error:
                print(f"  {seed:4} skipped: {error}", flush=True)
                continue
            with table.open("a") as file:
                file.write(json.dumps(row) + "\n")
            kind = "FAIL" if row["findings"] else "ok  "
            print(f"  {seed:4} {kind} {row['seconds']:4.0f} s, {len(row['struck'])} faults: {row['run']}", flush=True)
            for finding in row["findings"]:
                print(f"       {finding}\n       python -m benchmarks hunt --seeds {seed}..{seed}", flush=True)
    record = {"question": QUESTION, **summary([json.loads(line) for line in table.read_text().splitlines()])}
    print(f"  {record['seeds']} seeds in {table}, {len(record['wrong'])} with findings")
    save("hunt", record, trial=trial, folder=RESULTS)
    return record


@contextmanager
def _forking() -> Iterator[str]:
    """Start processes as the tests do, by forks of a process with torch imported: it takes a tenth of the time."""
    sys.path.append(str(ROOT / "tests"))
    tool = importlib.import_module("fork_server")
    with tempfile.TemporaryDirectory(prefix="stretto-processes-") as folder:
        plain, tool.ForkingPopen.server = subprocess.Popen, tool.ForkServer(folder).spawn()
        subprocess.Popen = tool.ForkingPopen  # type: ignore[misc]
        try:
            yield tempfile.gettempdir()
        finally:
            subprocess.Popen = plain  # type: ignore[misc]
            tool.ForkingPopen.server.ours.close()


def _row(plan: Plan, place: Path) -> dict[str, Any]:
    """Run a plan; return its row of the table. The folder of a run with findings is kept."""
    began, before = time.monotonic(), _shared_memory()
    is_proxied = any(strike.endswith(":proxy") for strike in plan.strikes)
    with Laboratory(hosts=2, mbit=1000) if plan.has_hosts else nullcontext():
        folder = Path(tempfile.mkdtemp(prefix=f"stretto-hunt-{plan.seed}-", dir=place))
        with proxy() if is_proxied else nullcontext("") as there:
            findings = _judged(plan, folder, ["--proxy", there] if is_proxied else [])
        findings += _left(folder, before)
    struck = sorted(path.name.removeprefix("sent-") for path in folder.glob("counts/sent-*"))
    row = {"seed": plan.seed, "recipe": plan.recipe, "run": str(plan), "struck": struck, "findings": findings}
    if findings:
        print(f"       kept: {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return {**row, "seconds": round(time.monotonic() - began, 1), "taken": now()}


def _judged(plan: Plan, folder: Path, more: Sequence[str]) -> list[str]:
    """Run a plan, with `more` words of its script, again from its checkpoint if its launcher is killed.

    Returns the findings.
    """
    limit = time.monotonic() + LIMIT_S
    script = [*plan.script, *(word for strike in plan.strikes for word in ("--strike", strike)), *more]
    options, before, environment = list(plan.options), list[str](), dict(os.environ)
    if plan.disk:
        (disk := folder / "disk").mkdir()
        before, options = [*OWN_DISK, plan.disk, str(disk)], [*options, "--out", str(disk / "run")]
    if plan.has_hosts:
        (ssh := folder / "there" / "ssh").parent.mkdir()
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        environment["PATH"] = f"{ssh.parent}:{environment['PATH']}"
        before = ["ip", "netns", "exec", name(0)]
        options += ["--remote-stretto", f"{sys.executable} -m stretto.cli"]
    try:
        while True:
            left_s = limit - time.monotonic()
            done = run_counted(
                folder,
                plan.recipe,
                options=options,
                script=script,
                before=before,
                environment=environment,
                limit_s=left_s,
            )
            if done.code != -9 or "--resume" in options:
                return findings(plan, done) + ([] if done.code else _wrong_best(plan, folder))
            _await_end(folder)
            for host in range(2) if plan.has_hosts else ():
                set_link(host, "up")
            options += ["--resume", str(folder / "run-1"), "-n", str(plan.resumed_by)]
    except subprocess.TimeoutExpired:
        return [f"not over after {LIMIT_S:g} s"]
    except ValueError as error:
        return [str(error)]


def _wrong_best(plan: Plan, folder: Path) -> list[str]:
    """Return the findings in the file of the best model, which the script saves at the end of each epoch."""
    if "--best" not in plan.script:
        return []
    epoch = torch.load(folder / "counts" / "best.pt", weights_only=True)["epoch"]
    return [] if epoch == EPOCHS - 1 else [f"the best model is that of epoch {epoch + 1}"]


def findings(plan: Plan, done: Counted) -> list[str]:
    """Return the findings in a run that has ended."""
    record = done.record
    if done.code == 1 and plan.may_lose and OTHER_NUMBER in done.text:
        return []  # a shard was lost before the checkpoint that another number of workers would continue
    if done.code == 1 and plan.may_lose and LOST in done.text:
        return _other_samples(plan, done)
    if done.code:
        cause = next((line for line in done.text.splitlines() if "rror" in line), "")
        return [f"exit code {done.code}: {cause[:200]}"]
    found = list[str]()
    if len(set(done.digests.values())) > 1:
        found.append(f"models differ at the end of the last epoch: {done.digests}")
    total = record["samples_before"] + sum(record["samples_by_worker"])
    if record["samples"] != total and not plan.disk:  # a full disk has no last counts of the workers
        found.append(f"the record has {record['samples']} samples, of which workers trained {total}")
    drops = "--drop" in plan.script
    if plan.recipe in RECORDED:
        return found + [f"the record says {one}" for one in done.recorded if one != {1: SAMPLES} and not drops]
    if len(done.epochs) != EPOCHS:
        found.append(f"{len(done.epochs)} epochs have ended")
    lost = [epoch for epoch in done.epochs if epoch != {1: SAMPLES}]
    is_done_again = unit_of(plan.recipe) is None and sum(epoch.get(0, 0) for epoch in lost) <= done.again
    if lost and not is_done_again and not (drops and all(set(epoch) <= {0, 1} for epoch in lost)):
        found.append(f"each epoch has trained {done.epochs}, by number of times")
    if (
        not plan.is_stream
        and not is_done_again
        and done.recorded != done.epochs[len(done.epochs) - len(done.recorded) :]
    ):
        found.append(f"the record says {done.recorded}, the model {done.epochs}")
    return found + _other_samples(plan, done)


def _other_samples(plan: Plan, done: Counted) -> list[str]:
    """Return the finding of a record that has other samples than the model."""
    size, samples = BATCH if "numbers" in plan.script else 1, done.record["samples"]
    trained = sum(times * count for epoch in done.epochs for times, count in epoch.items())
    if not unit_of(plan.recipe) or plan.disk or trained == samples * size:
        return []
    return [f"the record has {samples} samples of {size}, the model {trained}"]


def _processes(folder: Path) -> list[psutil.Process]:
    """Return the processes of the run in a folder."""
    return [one for one in psutil.process_iter(["cwd"]) if (one.info["cwd"] or "").startswith(str(folder))]


def _await_end(folder: Path) -> list[psutil.Process]:
    """Wait for the processes of a run whose launcher has ended; return the processes left."""
    return list(psutil.wait_procs(_processes(folder), LEFT_S)[1])


def _left(folder: Path, before: set[str]) -> list[str]:
    """Return what a run has left, and end its processes."""
    found: list[str] = []
    for process in _await_end(folder):
        try:
            found.append(f"process {process.pid} is left: {' '.join(process.cmdline())[-120:]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    new, held = _shared_memory() - before, ""
    for path in Path("/proc").glob("[0-9]*/maps") if new else ():
        with suppress(OSError):  # of a process that has ended
            held += path.read_text()
    return found + [f"/dev/shm/{name} is left" for name in sorted(new) if name not in held]


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*") if path.is_file()}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of seeds and of faults, and the findings by seed, of the last row of each seed."""
    last = {row["seed"]: row for row in rows}
    faults = Counter(_kind(strike) for row in last.values() for strike in row["struck"])
    return {
        "seeds": len(last),
        "faults": dict(sorted(faults.items())),
        "by_recipe": dict(sorted(Counter(row["recipe"] for row in last.values()).items())),
        "wrong": {f"{seed}": row["findings"] for seed, row in sorted(last.items()) if row["findings"]},
    }


def _kind(strike: str) -> str:
    """Return the process and the signal of a fault.

    >>> _kind("1:KILL:stepped:3"), _kind("0.1:PAUSE:begun:2:shard")
    ('worker KILL', 'shard PAUSE')
    """
    _, signal, _, _, *who = strike.split(":")
    return f"{who[0] if who else 'worker'} {signal}"
