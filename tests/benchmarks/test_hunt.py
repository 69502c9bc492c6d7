"""Plans of the hunt are functions of their seeds and cover all recipes; its judge finds each kind of wrong run."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hunt, laboratory
from benchmarks.counting_model import Counted, run_counted
from benchmarks.hunt import (
    CLOCKS,
    HOSTS,
    LOST,
    OTHER_NUMBER,
    PHASES,
    RECIPES,
    SAMPLES,
    WITH_HOSTS,
    WITH_JOINS,
    Plan,
    findings,
    plan_of,
    summary,
)
from benchmarks.laboratory import LabError, Laboratory, namespaces
from benchmarks.proxy import TROUBLES, proxy
from benchmarks.tables import TABLES
from stretto.events import read_events
from stretto.recipe.named import NAMED
from stretto.recipe.parser import parse

PLANS = [plan_of(seed) for seed in range(8 * len(RECIPES))]
OVER_HOSTS = [plan for plan in map(plan_of, range(WITH_HOSTS, WITH_HOSTS + 400)) if plan.has_hosts]
JOINED = [
    plan
    for plan in map(plan_of, range(WITH_JOINS, WITH_JOINS + 400))
    if any(":JOIN:" in strike for strike in plan.strikes)
]


def test_plan_depends_on_its_seed_alone() -> None:
    random.seed(3)
    assert [plan_of(plan.seed) for plan in reversed(PLANS)] == PLANS[::-1]
    assert len({str(plan) for plan in PLANS}) > len(PLANS) * 0.9


def test_as_many_seeds_as_there_are_recipes_have_all_recipes_of_all_names() -> None:
    assert {recipe.split("(")[0] for recipe in RECIPES} == set(NAMED)
    for first in range(0, len(PLANS), len(RECIPES)):
        assert {plan.recipe for plan in PLANS[first : first + len(RECIPES)]} == set(RECIPES)
    for recipe in RECIPES:
        parse(recipe)


def test_plans_have_all_layouts_data_signals_phases_and_processes() -> None:
    words = {word for plan in PLANS for word in (*plan.options, *plan.script)}
    assert words >= {"pipeline(stages=2)", "sharded(over=2)", "--servers", "split", "own", "contiguous", "--loaders"}
    assert words >= {
        "stream",
        "list",
        "numbers",
        "--best",
        "--drop",
        "--tail",
        "--checkpoint-every",
        "per-worker-batch",
    }
    assert words >= {"--restarts", "--evaluate"}
    strikes = [strike.split(":") for plan in PLANS for strike in plan.strikes]
    assert {strike[1] for strike in strikes} == {"KILL", "PAUSE", "STOP", "TERM", "FILL", "CUT", *CLOCKS, *TROUBLES}
    assert {strike[2] for strike in strikes} == set(PHASES)
    assert {word for strike in strikes for word in strike[4:]} == {"shard", "coordinator", "launcher", "proxy"}


def test_launcher_is_killed_at_most_once_and_only_where_there_are_checkpoints() -> None:
    for plan in (*PLANS, *OVER_HOSTS):
        here = workers_of(plan)[0]
        killed = sum(strike.endswith("launcher") or ends_host(strike, range(here)) for strike in plan.strikes)
        assert killed <= ("--checkpoint-every" in plan.options)
        assert killed == (plan.resumed_by > 0)


def workers_of(plan: Plan) -> tuple[int, int]:
    """Return the workers on the host of the launcher, and on the other one."""
    there = plan.options[plan.options.index("--hosts") + 1].split(":")[1] if plan.has_hosts else 0
    return int(plan.options[1]), int(there)


def ends_host(strike: str, workers: range) -> bool:
    """Return whether a fault kills the host of these workers."""
    worker, kind, *_, who = strike.split(":")
    return (kind, who) == ("KILL", "host") and int(worker) in workers


def test_from_a_seed_on_runs_of_several_whole_workers_are_over_two_hosts() -> None:
    assert not any(plan.has_hosts for plan in PLANS)
    assert {plan.recipe for plan in OVER_HOSTS} == set(RECIPES)
    assert all(min(workers_of(plan)) > 0 for plan in OVER_HOSTS)
    others = [plan for plan in map(plan_of, range(WITH_HOSTS, WITH_HOSTS + 400)) if not plan.has_hosts]
    assert all(plan.options[1] == "1" or "--layout" in plan.options or plan.disk for plan in others)
    faults = {strike.split(":")[1] for plan in OVER_HOSTS for strike in plan.strikes if strike.endswith(":host")}
    assert faults == set(HOSTS)


def test_hosts_are_struck_so_that_a_worker_is_left() -> None:
    for plan in OVER_HOSTS:
        here, there = workers_of(plan)
        struck = [int(strike.split(":")[0]) for strike in plan.strikes if strike.endswith(":host")]
        for strike in plan.strikes:
            worker, kind, _, _, *who = strike.split(":")
            assert int(worker) < (here if who in (["launcher"], ["coordinator"], ["shard"]) else here + there)
            if struck and not who and kind in ("KILL", "STOP", "TERM", "SUSPEND"):
                assert (int(worker) < here) == (struck[0] < here)


def test_from_a_seed_on_runs_on_one_host_get_a_worker_more_by_a_process_that_joins() -> None:
    assert not any(":JOIN:" in strike for plan in (*PLANS, *OVER_HOSTS) for strike in plan.strikes)
    for plan in JOINED:
        (joins,) = (strike.split(":") for strike in plan.strikes if ":JOIN:" in strike)
        assert int(joins[0]) < int(plan.options[1]) > 1
        assert "--listen" in plan.options and not plan.has_hosts
        assert "--layout" not in plan.options and "own" not in plan.script and not plan.disk
    words = {word for plan in JOINED for word in (*plan.options, *plan.script)}
    assert words >= {"stream", "list", "numbers", "split", "--servers", "--checkpoint-every", "--accumulate"}
    assert {plan.recipe.split("(")[0] for plan in JOINED} >= {"allreduce", "local_sgd", "gossip", "async_sgd"}


@pytest.mark.parametrize("recipe", ["local_sgd(every=3)", pytest.param("async_sgd", marks=pytest.mark.long)])
def test_worker_that_joins_trains_and_its_run_has_no_finding(recipe: str, tmp_path: Path) -> None:
    options, script = ("-n", "2", "--listen", "127.0.0.1"), ("--pause", "2", "--until-back")
    plan = Plan(WITH_JOINS, recipe, options, script, ("1:JOIN:stepped:1",))
    done = run_counted(tmp_path, recipe, options=options, script=[*script, "--strike", *plan.strikes])
    assert findings(plan, done) == [], done.text
    assert any(done.record["samples_by_worker"][2:])


@pytest.mark.long
def test_proxy_tears_what_a_worker_sends_to_others_and_its_run_has_no_finding(tmp_path: Path) -> None:
    """A broken exchange is repeated in a new generation, in which no worker has failed."""
    options = ("-n", "2", "--failure-timeout", "30s")
    plan = Plan(0, "allreduce", options, (), tuple(f"1:TEAR:exchange:{at}:proxy" for at in (4, 8, 12)))
    script = ["--pause", "0.03", *(word for strike in plan.strikes for word in ("--strike", strike))]
    with proxy() as there:
        done = run_counted(tmp_path, "allreduce", options=options, script=[*script, "--proxy", there])
    assert findings(plan, done) == [], done.text
    whats = [
        event["what"] for event in read_events(tmp_path / "run-1" / "events.jsonl") if event["event"] == "membership"
    ]
    assert whats.count("formed") > 1 and "failed" not in whats


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder for the table and the folders of runs, whose processes are started plainly."""
    monkeypatch.setattr(hunt, "_forking", lambda: nullcontext(tmp_path))
    monkeypatch.setattr(hunt, "RESULTS", tmp_path)
    return tmp_path


def test_run_over_hosts_is_skipped_with_a_line_where_there_can_be_none(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(laboratory.os, "geteuid", lambda: 1000)
    assert hunt.run([OVER_HOSTS[0].seed])["seeds"] == 0
    assert "skipped" in capsys.readouterr().out
    assert not [path for path in alone.iterdir() if path.is_dir()]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["0:KILL:stepped:5:host", "1:KILL:stepped:5:host", "1:AWAY:stepped:5:host"])
def test_lost_host_costs_no_sample_and_leaves_nothing(
    fault: str, only_laboratory: None, alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        with Laboratory(hosts=1):
            pass
    except LabError as error:
        pytest.skip(str(error))
    options = ("-n", "1", "--hosts", "there:1", "--listen", laboratory.address(0), "--failure-timeout", "3s")
    options += ("--checkpoint-every", "300ms")
    plan = Plan(
        WITH_HOSTS, "allreduce", options, ("--pause", "0.4" if "AWAY" in fault else "0.03"), (fault,), resumed_by=1
    )
    monkeypatch.setattr(hunt, "plan_of", lambda _: plan)
    monkeypatch.setattr(hunt, "LIMIT_S", 300.0)
    record = hunt.run([WITH_HOSTS])
    said = capsys.readouterr().out
    assert record["wrong"] == {}, said
    assert record["faults"] == {f"host {fault.split(':')[1]}": 1}, said
    assert namespaces() == []


GOOD = Counted(
    code=0,
    text="",
    record={
        "samples": 480,
        "samples_before": 0,
        "samples_by_worker": [240, 240],
        "sample_counts": [{"once": 240, "twice": 0, "never": 0}] * 2,
    },
    epochs=[{1: SAMPLES}] * 2,
    digests={"epoch-2-0": "a", "epoch-2-1": "a"},
)
PLAN = Plan(0, "async_sgd", ("-n", "2"), (), ("0:KILL:stepped:3",))
Change = Callable[[Counted], Counted]
WRONG: dict[str, Change] = {
    "exit code": lambda done: replace(done, code=1),
    "differ": lambda done: replace(done, digests={"epoch-2-0": "a", "epoch-2-1": "b"}),
    "of which workers": lambda done: replace(done, record={**done.record, "samples": 472}),
    "each epoch has trained": lambda done: replace(done, epochs=[{1: SAMPLES}, {0: 8, 1: SAMPLES - 8}]),
    "epochs have ended": lambda done: replace(done, epochs=done.epochs[:1]),
    "the record says": lambda done: replace(
        done, record={**done.record, "sample_counts": [{"once": 232, "twice": 8, "never": 0}] * 2}
    ),
}


def test_right_run_has_no_finding() -> None:
    assert findings(PLAN, GOOD) == []


@pytest.mark.parametrize("words", WRONG)
def test_wrong_run_has_a_finding(words: str) -> None:
    assert any(words in finding for finding in findings(PLAN, WRONG[words](GOOD)))


@pytest.mark.parametrize(("again", "is_allowed"), [(8, True), (0, False)])
def test_untouched_samples_are_lost_unless_the_next_epoch_has_done_them_again(again: int, is_allowed: bool) -> None:
    counts = [{"once": 240}, {"once": 240, "recovered_samples": again}]
    record = {**GOOD.record, "sample_counts": [{"never": 0, "twice": 0, **one} for one in counts]}
    changed = replace(GOOD, record=record, epochs=[{0: 8, 1: SAMPLES - 8}, {1: SAMPLES}])
    assert (findings(replace(PLAN, recipe="gossip(every=2)"), changed) == []) == is_allowed


@pytest.mark.parametrize(
    ("changes", "is_allowed"),
    [
        ({}, False),
        ({"script": ("--data", "list")}, False),
        ({"script": ("--data", "stream", "--deal", "own"), "recipe": "allreduce", "strikes": ()}, False),
        ({"script": ("--data", "list"), "recipe": "allreduce"}, False),
        ({"script": ("--data", "stream", "--deal", "own"), "recipe": "allreduce"}, True),
    ],
)
def test_run_may_lose_a_part_of_a_stream_only_where_the_pages_say_so(changes: dict[str, Any], is_allowed: bool) -> None:
    for text in (LOST, OTHER_NUMBER):
        assert (findings(replace(PLAN, **changes), replace(GOOD, code=1, text=f"stretto: {text}")) == []) == is_allowed


def test_last_row_of_a_seed_counts_in_the_summary_and_on_the_page() -> None:
    row = {"seed": 7, "recipe": "allreduce", "struck": ["1:KILL:stepped:3"], "findings": ["models differ"]}
    other = {**row, "seed": 8, "struck": ["0:PAUSE:begun:2:shard"]}
    record = summary([row, other, {**row, "findings": []}])
    assert record["faults"] == {"shard PAUSE": 1, "worker KILL": 1}
    assert record["wrong"] == {"8": ["models differ"]}
    assert "| 2 | 1 | 2 | 1 |" in list(TABLES["hunt"](record))
