"""Benchmarks of recovery, of its cost, and of long runs with faults: times, reading of logs, and tables."""

import json
from dataclasses import asdict

import pytest

from benchmarks import last_model, recovery, soak, tables, upkeep
from benchmarks.measure import outcomes
from benchmarks.pace import Seconds
from benchmarks.soak import Case, Sample
from benchmarks.upkeep import Segment
from stretto.checkpoint.folder import NAME
from stretto.events import COORDINATOR, of_process
from stretto.faults.plan import Every, check, parse
from stretto.recipe.parser import parse as recipe


def formed(at, *members):
    return {"event": "membership", "what": "formed", **of_process(COORDINATOR), "at": at, "members": list(members)}


def failed(worker):
    return {"event": "membership", "what": "failed", **of_process(worker), "at": 0.0}


# --- recovery ---------------------------------------------------------------------------------------------------------


def test_recovery_ends_with_a_later_generation_without_the_victim():
    events = [formed(1.0, 0, 1), formed(2.9, 0), failed(1), formed(3.1, 0, 1), formed(3.2, 0, 2), formed(4.0, 0)]
    assert recovery.formed_without(events, 1, 3.0) == 3.2
    assert recovery.formed_without(events, 0, 3.0) is None


def test_recovery_ends_with_the_last_survivors_first_step():
    steps = [[1.0, 3.05, 3.3, 3.4], [2.9, 3.5, 3.6]]
    assert recovery.latest(steps, since=3.2, failed_at=3.0) == pytest.approx(0.5)
    assert recovery.latest([*steps, [3.1]], since=3.2, failed_at=3.0) is None
    assert recovery.latest([], since=3.2, failed_at=3.0) is None


@pytest.mark.parametrize(
    ("steps", "calm"), [([8.0, 9.9], True), ([9.5, 9.9], False), ([8.0, 9.0], False), ([8.0], False), ([], False)]
)
def test_process_is_steady_with_an_old_and_a_recent_step(steps, calm):
    assert recovery.is_steady(steps, 10.0) is calm


def test_figure_of_a_victim_is_that_of_its_own_failures():
    found = recovery.by_side({"stretto": [(0, 0.1), (2, 0.9), (0, 0.3)]}, 0)["stretto"]
    assert found["s"]["median"] == pytest.approx(0.2)
    assert (found["worst"], found["deaths"], found["all_s"]) == (0.3, 2, [0.1, 0.3])


def test_only_torchrun_uses_ddp():
    assert [(side.name, "--ddp" in side.arguments) for side in (recovery.STRETTO, recovery.TORCHRUN)] == [
        ("stretto", False),
        ("torchrun", True),
    ]


def test_table_of_recovery_shows_both_sides():
    strikes = {"stretto": [(0, 0.1), (2, 0.2)], "torchrun": [(0, 9.0), (2, 8.0)]}
    victims = {f"worker {one}": recovery.by_side(strikes, one) for one in (0, 2)}
    vanished = {"model": "0.03 M", "victim": "worker 2", "failure_timeout_s": 2.0, **victims["worker 2"]["stretto"]}
    record = {
        "question": recovery.QUESTION,
        "wanted_s": 0.3,
        "workers": 4,
        "machine": {"cores": 2},
        "cases": {"5 M": {"victims": victims, "step_ms": {"stretto": 10.0, "torchrun": 11.0}}},
        "vanished": vanished,
        "layouts": {
            "model": "0.03 M",
            "workers": 3,
            "wanted_s": 0.1,
            "step_s": {"pipeline(2)": [0.004]},
            "sides": {"pipeline(2)": recovery.by_side({"x": [(0, 0.05)]}, 0)["x"]},
        },
    }
    page = "\n".join(tables.recovery(record))
    assert "| 5 M | worker 0 killed | stretto | 0.100 | 0.100 to 0.100 | 0.100 | 1 | 10.0 | at most 0.3 |" in page
    assert "| 5 M | worker 2 killed | torchrun | 8.000 | 8.000 to 8.000 | 8.000 | 1 | 11.0 |  |" in page
    assert "| 0.03 M | one of 3 killed | pipeline(2) | 0.050 | 0.050 to 0.050 | 0.050 | 1 | 4.0 | at most 0.1 |" in page
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1


def test_table_of_spark_has_a_row_for_each_figure_with_its_goal():
    figures = outcomes({"task killed": [0.1, 0.3], "start": [9.0]}, {"task killed": 1.5})
    record = {"question": "seconds of a run", "workers": 4, "machine": {"cores": 2}, "figures": figures}
    page = "\n".join(tables.TABLES["spark"](record))
    assert "## Seconds of a run\n\n`python -m benchmarks spark`" in page
    assert "| task killed | 0.200 | 0.150 to 0.250 | 0.300 | 2 | at most 1.5 |" in page
    assert "| start | 9.000 | 9.000 to 9.000 | 9.000 | 1 |  |" in page


# --- upkeep -----------------------------------------------------------------------------------------------------------


def segments(seconds, checkpoints=0):
    return [Segment(Seconds(one, one), checkpoints) for one in seconds]


def test_cost_of_a_checkpoint_is_the_difference_of_the_sides():
    found = upkeep.cost(
        [segments([10.0, 12.0], 2), segments([11.0], 1)], [segments([10.0, 11.0]), segments([11.0])], 30
    )
    assert found["checkpoints"] == 5
    assert found["s_a_checkpoint"] == pytest.approx(1 / 5)
    assert found["share"] == pytest.approx(1 / 150)
    assert found["error_s"] == pytest.approx(3**-0.5 * 3**0.5 / 5)  # the pairs differ by 0, 1 and 0


def test_cost_without_checkpoints_is_none():
    found = upkeep.cost([segments([1.0])], [segments([1.0])], 30)
    assert (found["checkpoints"], found["s_a_checkpoint"], found["share"]) == (0, None, None)


def test_fewer_seconds_are_a_ratio_above_one():
    taken = {upkeep.READY: [segments([1.0])], upkeep.NOT_READY: [segments([2.0])]}
    assert upkeep._ratio(taken, upkeep.READY, upkeep.NOT_READY, "wall").median == 2.0


def test_the_mean_of_two_segments():
    assert upkeep._mean(*segments([1.0, 3.0])) == Segment(Seconds(2.0, 2.0), 0)


def test_segment_is_a_whole_number_of_rounds():
    rounds = [
        getattr(recipe(one).when, "every", 1) for one in (*upkeep.RECIPES, *(one for _, one, _ in upkeep.SWITCHED))
    ]
    assert all(steps % each == 0 for steps in upkeep.SEGMENTS.values() for each in rounds)


def test_only_complete_checkpoints_are_counted():
    assert NAME.fullmatch("round-00000012-2") and not NAME.fullmatch(".unfinished-1")


def test_table_of_upkeep():
    one = {"median": 0.995, "standard_error": 0.002}
    speeds = {"ready": 99.5, "not ready": 100.0}
    case = {"case": "5 M", "recipe": "allreduce", "ratio": one, "processor_ratio": one, "steps_a_second": speeds}
    case["starts"] = 10
    save = {
        "case": "5 M",
        "recipe": "allreduce",
        "checkpoints": 5,
        "s_a_checkpoint": 0.2,
        "error_s": 0.01,
        "share": 0.2 / 30,
    }
    none = {
        "case": "0.8 M",
        "recipe": "allreduce",
        "checkpoints": 0,
        "s_a_checkpoint": None,
        "error_s": None,
        "share": None,
    }
    record = {"question": upkeep.QUESTION, "wanted": 0.99, "wanted_share": 0.03, "workers": 2, "cases": [case]}
    aside = dict.fromkeys(("ratio", "ratio_of_the_same", "processor_ratio", "processor_ratio_of_the_same"), one)
    record["aside"] = [{"case": "5 M", "recipe": "allreduce", "clips": clips, **aside} for clips in (False, True)]
    record |= {"together": one, "every_s": 3, "asked_s": 30, "checkpoints": [save, none], "machine": {"cores": 2}}
    page = "\n".join(tables.upkeep(record))
    assert "| 5 M | allreduce | 0.995 ± 0.002 | at least 0.99 | 0.995 ± 0.002 | 99.5 | 100.0 |" in page
    ratios = 4 * " | 0.995 ± 0.002" + " | at least 0.99 |"
    assert "| 5 M | allreduce" + ratios in page and "| 5 M | allreduce, gradients clipped" + ratios in page
    assert "All 10 pairs of runs together: 0.995 ± 0.002." in page
    assert "| 5 M | allreduce | 5 | 0.200 ± 0.010 | 0.7% | at most 3% |" in page
    assert "| 0.8 M | allreduce | 0 | none was written | | at most 3% |" in page


def test_table_of_last_models():
    case = {"case": "5 M", "recipe": "allreduce", "ratio": {"median": 0.99, "standard_error": 0.002}, "epoch_s": 1.5}
    page = "\n".join(tables.last_model({"wanted": last_model.WANTED, "workers": 2, "cases": [case]}))
    assert "| 5 M | allreduce | 0.990 ± 0.002 | at least 0.97 | 1.50 |" in page


# --- soak -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", soak.RECIPES)
def test_faults_have_the_stated_rate_and_existing_targets(name):
    case = Case(name)
    recipe(case.options[1])
    faults = parse(case.faults)
    check(faults, soak.WORKERS, 2 if case.has_server else 0)
    assert any(fault.who.kind == "server" for fault in faults) == case.has_server
    means = [fault.when.mean_s for fault in faults if isinstance(fault.when, Every)]
    assert len(means) == len(faults)
    assert sum(1 / mean for mean in means) == pytest.approx(1 / soak.EVERY_S)
    assert soak.PAUSE_S > soak.FAILURE_TIMEOUT_S


def samples_of(pid, start, sizes, every=4.0):
    return [Sample(pid, start + every * number, int(1e6 * size)) for number, size in enumerate(sizes)]


def test_memory_is_that_of_the_longest_running_process_after_warm_up():
    long = samples_of(1, 0.0, [9, 9, 9, 9, 9, 100, 100, 104, 103, 110, 110])
    found = soak.memory_growth([*samples_of(2, 0.0, [500] * 5), *long])
    assert found == soak.Memory(40.0, 100.0, 110.0, 110.0)


@pytest.mark.parametrize("samples", [[], samples_of(1, 0.0, [1] * 10)])
def test_short_lived_processes_give_no_memory_figure(samples):
    assert soak.memory_growth(samples) is None


def epoch(number, once=10, **other):
    audit = {"once": once, "twice": 0, "never": 0, "dropped": 0, **other}
    return {"event": "epoch", "t": 1.0, "worker": 0, "epoch": number, "sample_counts": audit}


def outcome(folder, events, states=("00", "00"), code=0, asked=2, late=False):
    (folder / "run").mkdir()
    (folder / "run" / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (folder / "out").write_text("".join(f"steps 5 state {8 * one}\n" for one in states))
    return soak.outcome_of(folder, asked, code, late, 9.0, [], agrees=True)


FACTS = [
    {"event": "evaluation", "t": 1.0, "worker": 0, "metrics": {"test_accuracy": 0.5}},
    {"event": "evaluation", "t": 2.0, "worker": 0, "metrics": {"test_accuracy": 0.9}},
    {"event": "end", "t": 3.0, "worker": 0, "rounds": 17},
    {"event": "fault_injected", "t": 1.0, "worker": 1, "verb": "kill"},
    *map(failed, (0, 1, -1, COORDINATOR)),
]


def test_outcome_is_read_from_the_log(tmp_path):
    done = outcome(tmp_path, [*FACTS, epoch(1), epoch(1, once=11), epoch(2, recovered_samples=3)])
    assert done.good and done.completed and done.equal and not done.why
    assert (done.rounds, done.struck, done.passes, done.accuracy) == (17, 1, 2, 0.9)
    assert done.deaths == {"coordinator": 1, "server": 1, "worker": 2}
    assert done.seen == {"once": 21, "twice": 0, "never": 0, "dropped": 0, "recovered_samples": 3}


@pytest.mark.parametrize(
    ("events", "more"),
    [
        ([epoch(1), epoch(2, twice=1)], {}),
        ([epoch(1, never=1), epoch(2)], {}),
        ([epoch(1)], {}),
        ([epoch(1), epoch(2) | {"sample_counts": None}], {}),
        ([epoch(1), epoch(2)], {"states": ("00", "11")}),
        ([epoch(1), epoch(2)], {"code": 1}),
        ([epoch(1), epoch(2)], {"late": True}),
    ],
)
def test_incomplete_or_wrong_runs_are_not_good(tmp_path, events, more):
    assert not outcome(tmp_path, events, **more).good


def test_run_without_a_log_has_failed(tmp_path):
    (tmp_path / "out").write_text("")
    done = soak.outcome_of(tmp_path, 2, 1, False, 1.0, [], agrees=True)
    assert not done.completed and done.why == "exit code 1"


def test_table_of_the_soak_shows_failures(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    good = asdict(outcome(tmp_path / "a", [*FACTS, epoch(1), epoch(2)])) | {
        "memory": vars(soak.Memory(60, 300, 301, 310))
    }
    bad = asdict(outcome(tmp_path / "b", [epoch(1, never=4)], code=1))
    told = [{"run": number, "recipe": "allreduce", "undisturbed": 0.9, **one} for number, one in enumerate((good, bad))]
    page = "\n".join(tables.soak({"minutes": 30, "every_s": 15.0, "runs": told}))
    assert "| 0 | allreduce | yes | 17 | 1 | 4 | 20 | 0 | 0 | 0 |" in page
    assert "| 1 | allreduce | no: exit code 1 | 0 | 0 | 0 | 10 | 0 | 4 | 0 |" in page
    assert "| 0 | 0.900 | 0.900 | 60 | 300 | 301 | 310 |" in page
    assert "| 1 |  | 0.900 | | | | |" in page
    assert "1 of 2 runs completed, 4 samples lost or counted twice." in page
