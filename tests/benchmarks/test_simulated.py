"""Benchmarks of the simulator: reading of logs, arguments passed to the simulator, and tables."""

import json

import pytest
import torch

from benchmarks import simulated, simulator, tables
from benchmarks.peers import flower
from benchmarks.simulated import Case, Figures, Link
from stretto.recipe.parser import parse
from stretto.simulator.compute import cost_model
from stretto.simulator.compute.transport_costs import TransportCosts
from stretto.simulator.network import topology

COSTS = TransportCosts(5e-4, 8e-5, 3e-3, 4e-4, 7e-5, 2e-3, 1e-3)
LINK = Link(95.66, 24e-6, COSTS, 1.97)


def split(scale: float) -> dict[str, float]:
    return {"computing": 2 * scale, "exchanging": 3 * scale}


def epoch(number: int, samples: int, training_s: float) -> dict[str, object]:
    workers = [{"worker": worker, "time_breakdown": split(number * (worker + 1))} for worker in range(4)]
    return {"event": "epoch", "t": 0.0, "worker": 0, "samples": samples, "training_s": training_s, "workers": workers}


def test_step_time_from_a_log_leaves_out_the_first_epoch(tmp_path):
    ends = [
        {"event": "end", "t": 9.0, "worker": worker, "bytes_sent": 100 + worker, "bytes_received": 7}
        for worker in (3, 1, 0, 2)
    ]
    events = [epoch(1, 1280, 50.0), epoch(2, 2560, 51.0), epoch(3, 3840, 52.0), *ends]
    log = tmp_path / "events.jsonl"
    log.write_text("".join(json.dumps(one) + "\n" for one in events))
    found = simulated.figures(log)
    assert found.step_s == pytest.approx(2.0 / 20)
    assert found.bytes_sent == [100, 101, 102, 103]
    assert found.bytes_received == [7, 7, 7, 7]
    assert found.splits[1] == {"computing": pytest.approx(0.4), "exchanging": pytest.approx(0.6)}


def test_simulator_arguments_contain_the_measured_values():
    one = topology.parse(LINK.network)
    assert one.link.up == pytest.approx(95.66e6) and one.link.latency == pytest.approx(12e-6)
    assert one.in_worker and one.burst == simulated.BURST_BYTES
    found = cost_model.parse(LINK.step_time, lambda: cost_model.CostModel(0.004, codec_s=0.001))
    own = {"step_s": 0.004, "sample_s": 0.0, "epoch_s": 0.0, "codec_s": 0.001, "update_s": 0.0}
    values = dict(vars(found))
    assert values.pop("turns_s") == (), "the workers have no stages"
    assert values == pytest.approx({**own, **vars(COSTS)}, abs=1e-7)


@pytest.mark.parametrize("recipe", simulated.RECIPES)
def test_every_case_has_at_least_two_epochs(recipe):
    parse(recipe)
    for mbit in simulated.RATES:
        for script in ("digits.py", "mnist.py"):
            asked = list(simulated.arguments(script, recipe, mbit))
            assert int(asked[asked.index("--epochs") + 1]) >= 2


def test_table_counts_cases_within_the_wanted_error(monkeypatch):
    found = iter([(0.011, 1010), (0.010, 1000), (0.024, 990), (0.020, 1000)])

    def figures(*_):
        step_s, sent = next(found)
        return Figures(step_s, [sent] * 4, [900] * 4, [{}] * 4)

    monkeypatch.setattr(simulated, "simulated", figures)
    monkeypatch.setattr(simulated, "measured", figures)
    monkeypatch.setattr(simulated, "free_processors", lambda: 2.0)
    case = simulated._case(None, LINK, Case("digits.py", (), "allreduce", 100.0), 2)
    assert case["time_ratio"] == pytest.approx(1.15)
    assert case["bytes_ratio"] == pytest.approx(1.0)
    assert case["received_ratio"] == 1.0
    record = {"hosts": 4, "wanted": 0.16, "wanted_bytes": 0.01, "cases": [case, {**case, "time_ratio": 0.8}]}
    page = "\n".join(tables.simulated(record))
    assert "| digits.py, allreduce | 100 | 17.50 | 15.00 | 1.15 | 1.0000 | 1.0000 |" in page
    assert "Time within 16% in 1 of 2 cases; bytes within 1% of those sent in 2, of those received in 2:" in page


def test_plain_loop_is_the_script_without_stretto():
    source = simulator.SCRIPT.read_text()
    assert source.count(simulator.DISTRIBUTE_CALL) == 1
    assert "stretto." not in source.replace(simulator.DISTRIBUTE_CALL, "").replace("import stretto\n", "")


def test_simulated_and_plain_loops_run():
    before = torch.get_rng_state()
    simulator._plain(1, times=1)
    torch.set_rng_state(before)
    simulator._simulated("local_sgd(every=2)", 2, 1, times=1)
    simulator._simulated("local_sgd(every=2)", 3, 1, 1, faults="kill worker 1 at 2ms, back after 1ms")


def test_step_time_is_the_difference_of_a_longer_and_a_shorter_run(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(simulator.time, "perf_counter", lambda: now[0])

    def run(epochs: int) -> None:
        now[0] += 7.0 + epochs * 562 * 0.001

    assert simulator._step_s(run) == pytest.approx(0.001)


def test_table_names_flower_only_if_it_was_measured():
    spread = {
        "steps_a_second": {"simulated": 3100.0, "plain": 4000.0},
        "ratio": {"median": 0.775, "standard_error": None},
    }
    record = {
        "workers": 16,
        "every": 16,
        "wanted_steps": 3000.0,
        "wanted_mib": 1024.0,
        "cases": {"allreduce": spread, "local_sgd(every=16)": spread},
        "memory": {"workers": 1000, "mib": 900.0, "kib_a_worker": 600.0, "mortal_mib": 950.0},
        "rounds": {"stretto": 0.1},
    }
    assert "Flower" not in "\n".join(tables.simulator(record))
    record["rounds"] = {"stretto": 0.1, "flower": 0.5}
    page = "\n".join(tables.simulator(record))
    assert "| allreduce | 3100 | 4000 | 0.775 | at least 3000 steps/s |" in page
    assert "900 MiB at the peak, wanted at most 1024; 600 KiB a worker. Where one fails and rejoins: 950 MiB." in page
    assert "0.100 s, in Flower's simulation engine 0.500 s" in page


def test_flower_has_no_interpreter_by_default(monkeypatch):
    monkeypatch.delenv("STRETTO_FLOWER", raising=False)
    assert flower.interpreter() is None


def test_failure_of_flower_is_reported_with_its_output(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match="no such luck"):
        flower.measure(str(python), 2, 1)
