"""Invalid input of `stretto simulate` gives one readable error, and the process state is restored."""

from __future__ import annotations

import gc
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from combinations import each_value, pairwise
from greenlet import getcurrent, greenlet

from stretto.cli.main import FAILED, USAGE, command
from stretto.events import read_events
from stretto.run_config import RunConfig
from stretto.simulator.isolation import memory_estimate
from stretto.simulator.sweep.runner import SweepConfig

SCRIPT = """
import torch, stretto
BEFORE
x = torch.arange(24.0).reshape(12, 2) / 24
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=2LOADER)
loader = stretto.distribute(net, optimizer, loaderRECIPE)
lead = torch.initial_seed() == 0  # the other workers have other seeds
for epoch in range(EPOCHS):
    for a, b in loader:
        optimizer.zero_grad()
        IN_LOOP
        loss = ((net(a) - b) ** 2).mean()
        loss.backward()
        optimizer.step()
AFTER
"""
SLOTS = {"BEFORE": "", "LOADER": "", "RECIPE": "", "EPOCHS": "2", "IN_LOOP": "", "AFTER": ""}

Simulate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def simulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Simulate:
    """Return a function that runs the command on a modified script: exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*options: str, **slots: str) -> tuple[int, str, str]:
        text = SCRIPT
        for name, inside in (SLOTS | slots).items():
            text = text.replace(name, inside)
        Path("train.py").write_text(text)
        if "--step-time" not in options:
            options = ("--step-time", "10ms", *options)
        code = command(["simulate", *([] if "-n" in options else ["-n", "2"]), "--out", "run", *options, "train.py"])
        return code, *capfd.readouterr()

    return run


def living() -> list[greenlet]:
    """Return the unfinished greenlets other than the current one."""
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), greenlet)]
    return [one for one in found if one and not one.dead and one is not getcurrent() and one.parent is not None]


def errors() -> list[str]:
    """Return the errors in the log."""
    return [one["text"] for one in read_events(Path("run/events.jsonl")) if one["event"] == "error"]


def test_valid_simulation_succeeds(simulate: Simulate) -> None:
    code, said, wrong = simulate("--recipe", "allreduce", AFTER="print('all is well')")
    assert code == 0, wrong
    assert "all is well" in said
    assert Path("run/final.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (
            ["--network", "100Mbit/s 20mm"],
            FAILED,
            ["--network cannot be read: 20mm", "got: 100Mbit/s 20mm", "                 ^^^^"],
        ),
        (["--network", ""], FAILED, ["--network cannot be read", "missing at the end"]),
        (["--speeds", "equl"], FAILED, ["--speeds cannot be read: equl", "^^^^"]),
        (["--speeds", "1,1,4"], FAILED, ["speeds are given for 3 workers, but there are 2"]),
        (["--faults", "kill worker 7 at 1s"], FAILED, ["there is no worker 7 of 2", "a worker from 0 to 1"]),
        (
            ["--recipe", "allreduce", "--faults", "pause server 0 for 1s at 1s"],
            FAILED,
            ["there is no parameter server"],
        ),
        (["--faults", "cut workers 0-1 for 1s at 1s"], FAILED, ["all 2 workers on one side of a cut"]),
        *(
            (["--network", "1Gbit/s, servers in worker 0", "--faults", fault], FAILED, ["can only fail together"])
            for fault in ("kill worker 0 at 1s", "pause worker for 1s at 1s", "kill server 0 at 1s")
        ),
        (["--faults", "explode at 1s"], FAILED, ["--faults cannot be read: explode", "^^^^^^^"]),
        (["--until", "tomorrow"], FAILED, ["--until cannot be 'tomorrow'", '--until "time=1h"']),
        (["--until", "samples=-3"], FAILED, ["--until cannot be 'samples=-3'"]),
        (["--until", "time=nan"], FAILED, ["--until cannot be 'time=nan'"]),
        (["--step-time", "soon"], FAILED, ["--step-time cannot be read: soon", "5ms"]),
        (["--step-time", "1ms encoding"], FAILED, ["no time of a step"]),
        (["--step-time", "-1ms"], FAILED, ["--step-time cannot be read: -1ms"]),
        (["--failure-timeout", "soon"], USAGE, ["soon is not a time", "a time such as 500ms"]),
        (["--failure-timeout", "1ms"], FAILED, ["the failure timeout cannot be 0.001s", "at least 100ms"]),
        (["--min-workers", "few"], USAGE, ["few is not a whole number"]),
        (["--min-workers", "3"], FAILED, ["the minimum number of workers cannot be 3", "from 1 to 2"]),
        (["--max-workers", "1"], FAILED, ["the largest number of workers cannot be 1"]),
        (["-n", "0"], FAILED, ["the number of workers cannot be 0", "at least 1"]),
        (["-n", "many"], USAGE, ["many is not a whole number"]),
        (["--seed", "x"], USAGE, ["x is not a whole number"]),
        (["--seed", "-1"], FAILED, ["the seed cannot be -1"]),
        (["--processors", "0"], FAILED, ["there cannot be 0 processors"]),
        (["--processors", "nan"], FAILED, ["there cannot be nan processors"]),
        (["--recipe", "alreduce"], FAILED, ["alreduce"]),
        (["--servers", "2"], FAILED, ["--servers needs --recipe"]),
        (["--no-encryption"], FAILED, ["no traffic with a server could be unencrypted"]),
        (["--target", "loss<=1"], FAILED, ["--target and --jobs are for a sweep"]),
        (["--on-nan", "hope"], USAGE, ["hope"]),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_invalid_options_are_refused_before_anything_runs(
    simulate: Simulate, options: list[str], code: int, said: list[str]
) -> None:
    ended, here, wrong = simulate(*options, BEFORE="print('it runs')")
    assert ended == code
    assert wrong.startswith("stretto: ")
    assert all(one in wrong for one in said), wrong
    assert "Traceback" not in wrong and "it runs" not in here
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ({"BEFORE": "raise KeyError('of mine')"}, ["worker 0 failed at 0 s", "KeyError", "of mine"]),
        ({"IN_LOOP": "if not lead and epoch: a.nothing"}, ["worker 1 failed at 0.03 s", "AttributeError", "nothing"]),
        ({"IN_LOOP": "a = a / 0"}, ["worker 0 failed at 0.01 s", "NaN or infinite", "learning rate"]),
        ({"AFTER": "raise SystemExit(3)"}, ["worker 0 failed", "SystemExit", "3"]),
        ({"BEFORE": "import nothing_of_the_kind"}, ["ModuleNotFoundError", "nothing_of_the_kind"]),
        ({"BEFORE": "raise SystemExit"}, ["the script ended without calling stretto.distribute"]),
    ],
    ids=str,
)
def test_failing_script_ends_the_run_with_one_error_that_names_the_worker(
    simulate: Simulate, slots: dict[str, str], said: list[str]
) -> None:
    code, _, wrong = simulate("--recipe", "local_sgd(every=2)", **slots)
    assert code == FAILED
    assert all(one in wrong for one in said), wrong
    assert "stretto/simulator" not in wrong, "the way into the script is none of the script's"
    assert not living()
    assert len(errors()) == 1


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ({"BEFORE": "raise KeyError('of mine')"}, ["KeyError", "of mine"]),
        ({"IN_LOOP": "a.nothing"}, ["AttributeError", "nothing"]),
        ({"AFTER": "raise SystemExit(3)", "EPOCHS": "1"}, ["the script called sys.exit(3)"]),
    ],
    ids=str,
)
def test_script_that_fails_while_it_is_measured_gives_an_error(
    simulate: Simulate, slots: dict[str, str], said: list[str]
) -> None:
    code, _, wrong = simulate("--recipe", "local_sgd(every=2)", "--step-time", "auto", **slots)
    assert code == FAILED
    said = [*said, "worker 0 failed while its step time was measured"]
    assert all(one in wrong for one in said), wrong
    assert "stretto/simulator" not in wrong
    assert not living()
    assert not Path("run").exists()


def test_script_with_a_syntax_error_is_refused_before_anything_runs(simulate: Simulate) -> None:
    code, _, wrong = simulate(BEFORE="1 +")
    assert code == FAILED
    assert "train.py is not valid Python: invalid syntax (train.py, line 3)" in wrong
    assert not Path("run").exists()


def test_worker_that_trains_an_epoch_more_than_the_others_is_named(simulate: Simulate) -> None:
    code, _, wrong = simulate("-n", "3", "--recipe", "allreduce", EPOCHS="2 if lead else 1")
    assert code == FAILED
    assert "workers 1 and 2 have ended their scripts in epoch 1 at step 2, worker 0 waits in epoch 2 at step 3" in wrong
    assert len(errors()) == 1
    assert not living()


COUNTS = """
hands = iter(loader)
for step in range(60):
    try: next(hands)
    except StopIteration: hands = iter(loader); next(hands)
"""


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_loop_with_its_own_step_count_ends_well(recipe: str, simulate: Simulate) -> None:
    code, _, wrong = simulate("-n", "4", "--recipe", recipe, "--speeds", "1,1,1,3", EPOCHS="0", AFTER=COUNTS)
    assert code == 0, wrong
    assert not living()


def test_timeout_option_limits_waiting(simulate: Simulate) -> None:
    """The limit does not apply to a worker that computes."""
    slow = "--recipe", "local_sgd(every=2)", "--step-time", "60s", "--speeds", "1,20"
    code, _, wrong = simulate(*slow)
    assert code == FAILED
    assert re.search(r"worker 0 waited \d+ s for .*, longer than 600 s; --timeout \d+ would let it", wrong)
    assert simulate(*slow, "--timeout", "1e5", "--out", "again")[0] == 0


def test_workers_that_diverge_within_an_epoch_give_an_error(simulate: Simulate) -> None:
    code, _, wrong = simulate("--recipe", "allreduce", IN_LOOP="if not lead: break")
    assert code == FAILED
    assert "the workers call different collective operations at the same position" in wrong
    assert "got: worker 0 in the collective of a step; worker 1 in " in wrong
    assert not living()


def test_too_few_survivors_end_the_run_with_one_error(simulate: Simulate) -> None:
    code, _, wrong = simulate("--recipe", "allreduce", "--faults", "kill worker 1 at 15ms", "--min-workers", "2")
    assert code == FAILED
    assert "too few workers are left" in wrong
    assert "expected: at least 2" in wrong
    assert len(errors()) == 1
    assert not living()


def test_sweep_passes_on_the_options_of_failures() -> None:
    order = RunConfig(
        Path("train.py"), workers=4, failure_timeout_s=2.5, min_workers=2, max_workers=8, on_resize="per-worker-batch"
    )
    said = ["--failure-timeout", "2.5s", "--min-workers", "2", "--on-resize", "per-worker-batch", "--max-workers", "8"]
    assert SweepConfig(order, ()).common_options == said
    assert SweepConfig(RunConfig(Path("train.py")), ()).common_options == []


def test_a_kill_of_the_server_of_an_only_worker_ends_the_run_with_its_time(simulate: Simulate) -> None:
    code, _, wrong = simulate("-n", "1", "--recipe", "async_sgd", "--faults", "kill server 0 at 15ms")
    assert code == FAILED
    assert "server 0 was killed at 0.015 s of virtual time, as --faults asked" in wrong
    assert len(errors()) == 1
    assert not living()


@pytest.mark.parametrize(
    ("recipe", "case", "workers"),
    pairwise(
        ["async_sgd(shards=2)", "allreduce"],
        [
            ("kill server 2 at 0s", "server 2 was killed at 0 s"),
            ("kill server 2 at 15ms", "server 2 was killed at 0.015 s"),
            ("pause server 2 for 1ms at 15ms", "server 2 was stopped at 0.015 s"),
        ],
        ["1", "2"],
    ),
)
def test_fault_of_a_server_that_the_scripts_recipe_lacks_is_an_error(
    simulate: Simulate, recipe: str, case: tuple[str, str], workers: str
) -> None:
    fault, said = case
    code, _, wrong = simulate("-n", workers, "--faults", fault, RECIPE=f", recipe={recipe!r}")
    assert code == FAILED
    assert f"{said} of virtual time, as --faults asked, and the recipe of this run has no such" in wrong
    assert len(errors()) == 1
    assert not living()


def test_insufficient_memory_is_predicted(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "_free_bytes", lambda: 64 << 20)
    big = "net.big = torch.nn.Parameter(torch.zeros(1 << 20)); net.add_module('last', torch.nn.Linear(2, 1))"
    code, _, wrong = simulate("-n", "500", "--recipe", "local_sgd", BEFORE=f"B = {big!r}", LOADER=")\nexec(B")
    assert code == FAILED
    assert "500 workers will not fit into memory" in wrong
    assert "64 MiB are free" in wrong
    assert not living()


def test_loader_processes_are_not_started_and_a_notice_is_shown(simulate: Simulate) -> None:
    code, _, wrong = simulate("--recipe", "allreduce", LOADER=", num_workers=2")
    assert code == 0, wrong
    assert wrong.count("the loader's 2 processes are not started: batches are loaded in this process") == 1


LOGS = "import logging; logging.basicConfig(level='INFO', format='LOG %(message)s')"


@pytest.mark.parametrize("step_time", ["auto", "10ms"])
def test_what_the_first_worker_logs_is_shown_once(
    simulate: Simulate, step_time: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    code, _, wrong = simulate("--step-time", step_time, "-n", "3", BEFORE=LOGS, AFTER="logging.info('the end')")
    assert code == 0, wrong
    assert wrong.count("LOG the end") == 1


NAMED = """
import logging
log = logging.getLogger("train")
if not log.handlers:
    log.addHandler(logging.FileHandler("named.log"))
"""


@pytest.mark.parametrize("step_time", ["auto", "10ms"])
def test_logging_handlers_are_per_worker(simulate: Simulate, step_time: str) -> None:
    """Like separate processes, three workers write one line each, with or without a measurement before."""
    after = "log.warning('the end'); log.handlers[0].close()"
    code, _, wrong = simulate("--step-time", step_time, "-n", "3", BEFORE=NAMED, AFTER=after)
    assert code == 0, wrong
    (log,) = Path().rglob("files/named.log")  # that of the measurement is not kept
    assert log.read_text().count("the end") == 3
    assert not Path("named.log").exists()
    assert logging.getLogger("train").handlers == []
    assert logging.Logger.addHandler.__qualname__ == "Logger.addHandler"


@pytest.mark.parametrize(("epochs", "workers"), each_value(["0", "1", "3"], ["1", "2"]))
def test_step_time_is_measured_with_few_steps(simulate: Simulate, workers: str, epochs: str) -> None:
    """One step per epoch, one step in all, or none."""
    code, _, wrong = simulate("--step-time", "auto", "-n", workers, EPOCHS=epochs, LOADER=f" * {6 // int(workers)}")
    assert code == 0, wrong
    assert [one["step"] for one in read_events(Path("run/events.jsonl")) if one["event"] == "epoch"] == [
        *range(1, int(epochs) + 1)
    ]
    assert not living()


FORKS = """
import os, sys
codes = []
for end in (lambda: None, lambda: sys.exit(0), lambda: sys.exit(3), lambda: sys.exit("no"), lambda: 1 / 0):
    if (pid := os.fork()) == 0:
        end()
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    print("codes", codes)
"""


def test_forked_children_end_as_under_python_and_the_simulation_is_their_parents(simulate: Simulate) -> None:
    code, said, wrong = simulate("--recipe", "allreduce", AFTER=FORKS)
    assert code == 0, wrong
    assert "codes [0, 0, 3, 1, 1]" in said
    assert Path("run/final.safetensors").exists() and not Path("run/.files").exists()


MINIMISES = """def loss_of():
            optimizer.zero_grad()
            loss = ((net(a) - b) ** 2).mean()
            loss.backward()
            return loss
        optimizer.step(loss_of)
        continue"""


@pytest.mark.parametrize("batch", [4, 6])
def test_lbfgs_is_measured_with_any_number_of_batches(simulate: Simulate, batch: int) -> None:
    """Three batches divide by three workers, and not by the two that are measured; two batches do not."""
    loader = f" * {batch // 2})\noptimizer = torch.optim.LBFGS(net.parameters(), max_iter=2"
    code, _, wrong = simulate(
        "-n", "3", "--recipe", "allreduce", "--step-time", "auto", LOADER=loader, IN_LOOP=MINIMISES
    )
    assert code == 0, wrong


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_simulation_with_one_line(simulate: Simulate, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    code, _, wrong = simulate(IN_LOOP=f"import os; epoch and os.kill(os.getpid(), {int(number)})")
    assert code == 128 + number
    *_, report, stopped, model = wrong.splitlines()
    assert report == "stretto: report of the run so far: stretto report run"
    assert stopped == f"stretto: stopped by {number.name}"
    assert model.startswith("the last model on which the workers agreed, ") and "run/last.safetensors" in model
    assert errors() == [f"stopped by {number.name}"]
    assert signal.getsignal(number) is before


def test_ignored_signal_stays_ignored(simulate: Simulate) -> None:
    """SIGHUP is ignored, as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code, _, wrong = simulate(IN_LOOP=f"import os; os.kill(os.getpid(), {int(signal.SIGHUP)})")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0, wrong


def test_computing_thread_of_the_script_is_tolerated(simulate: Simulate) -> None:
    before = threading.active_count()
    spawn = "import threading; seen = []; one = threading.Thread(target=lambda: seen.append(a.sum())); one.start()"
    code, _, wrong = simulate("--recipe", "async_sgd", IN_LOOP=f"{spawn}; one.join(); assert len(seen) == 1")
    assert code == 0, wrong
    assert threading.active_count() == before


def test_a_failed_simulation_leaves_the_process_as_it_was(simulate: Simulate) -> None:
    def here() -> list[object]:
        return [sys.modules["__main__"], sys.argv, list(sys.path), sys.stdout, torch.get_rng_state().tolist()]

    before = [*here(), torch.manual_seed, torch.autograd.backward]
    code, _, _ = simulate("--seed", "3", IN_LOOP="raise ValueError('in the middle')")
    assert code == FAILED
    assert [*here(), torch.manual_seed, torch.autograd.backward] == before


def test_measured_step_time_is_a_valid_option(simulate: Simulate) -> None:
    """A run with a measured step time and one with its printed value have equal logs."""
    code, _, wrong = simulate("--recipe", "async_sgd", "--seed", "3", "--step-time", "auto", "--speeds", "exponential")
    assert code == 0, wrong
    line = next(one for one in wrong.splitlines() if "--step-time" in one)
    measured = line.split('--step-time "')[1].rstrip('"')
    log = Path("run/events.jsonl").read_bytes()
    Path("run").rename("measured")
    options = ("--recipe", "async_sgd", "--seed", "3", "--step-time", measured, "--speeds", "exponential")
    assert simulate(*options)[0] == 0
    assert Path("run/events.jsonl").read_bytes() == log
