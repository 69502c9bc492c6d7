"""Benchmarks of the parameter server: pushed updates are applied, ratios have the right base, tables."""

import json
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks import against, figures, overlap, push, server, tables, unequal, updates
from benchmarks.measure import Ratio, save
from benchmarks.pace import in_turns
from benchmarks.peers import Rate, update_of
from benchmarks.peers.processes import Child

LIMIT_S = 60.0
PARAMETERS = 1003


def test_turns_alternate_in_order_and_the_first_is_not_counted():
    order = []
    found = in_turns({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, 3)
    assert "".join(order) == "abbaabba"
    assert found == {"a": [4, 5, 8], "b": [3, 6, 7]}


@pytest.mark.parametrize(("curve", "shards"), [(True, 2)])
def test_our_server_applies_all_updates(curve, shards):
    with push.team(2) as team:
        processes = [one.process for one in team._workers]
        for workers in (2, 1):
            outcome = team.run(PARAMETERS, workers, 0.2, curve, shards)
            assert outcome.updates >= 2 * workers
            assert outcome.pushed == outcome.change >= outcome.updates * float(update_of(0, PARAMETERS).sum())
            assert outcome.rate().updates_per_s > 0
    assert all(one.poll() is not None for one in processes)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def test_every_exchange_is_timed_and_the_server_ends():
    before = children()
    with push.team(1) as team, push.servers(1) as place, team.connected_to(place, PARAMETERS):
        (seconds,) = team.exchanges(5)
        assert len(children() - before) == 2
    assert len(seconds) == 5 and min(seconds) > 0
    assert children() <= before


def send_often(child):
    """Send messages for ten seconds: a process that is being started may hold the pipe for a moment."""
    for _ in range(1000):
        child.send(do="count")
        time.sleep(0.01)


def test_sending_to_a_child_that_ended_is_an_error():
    child = Child("benchmarks.push", "work", {})
    try:
        child.receive(LIMIT_S)
        child.process.kill()
        child.process.wait(LIMIT_S)
        with pytest.raises(SystemExit, match="ended before it received"):
            send_often(child)
    finally:
        child.close(0.1)


def test_shares_are_relative_to_the_bare_pair():
    taken = {server.ONE_WAY: [[2.0, 2.0]], server.BOTH_WAYS: [[1.0, 1.0]], "plain, 1 worker": [[4.0, 4.0]]}
    found = server._shares(taken, "plain, 1 worker")
    assert found["gb_per_s"]["median"] == 0.25
    assert found["of_one_way"]["median"] == 0.5
    assert found["of_both_ways"]["median"] == 0.25


class FakeTeam:
    def exchanges(self, count):
        return [[1.0] * count, [2.0] * count]


def test_two_workers_move_twice_the_bytes_in_the_time_of_the_slower():
    assert server._ours(FakeTeam(), 2) == pytest.approx(1e9 * 2.0 / (2 * 2 * 4 * server.LARGE))


def test_our_server_is_compared_with_each_peer():
    load = against.Load(100, 2, 1.0)
    asked = {against.OURS: lambda *_: Rate(30.0, 3e9), "other": lambda *_: Rate(10.0, 1e9)}
    sides = against._case(load, asked, 2)["sides"]
    assert sides["other"]["ratio"] == {"median": pytest.approx(3.0), "standard_error": 0.0}
    assert sides[against.OURS]["ratio"]["median"] == 1.0
    assert sides["other"]["gb_per_s"] == 1.0


def test_without_ray_the_others_are_measured(monkeypatch, capsys):
    monkeypatch.setattr(against.importlib.util, "find_spec", lambda name: None)
    assert against.RAY not in against.sides()
    assert capsys.readouterr().out.count("\n") == 1


def test_straggler_factors_of_a_case():
    assert unequal.Case("x.py", (), 0.9).slow == "1:5.0"
    assert unequal.Case("x.py", (), 0.9, 2.0).slow == "0:2.0,1:10.0,2:2.0,3:2.0"


def test_mnist_cases_are_left_out_without_the_data(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STRETTO_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not any(unequal.CASES[name].script == "mnist.py" for name in unequal.available_cases())
    assert "set STRETTO_DATA" in capsys.readouterr().out
    (tmp_path / "mnist").mkdir()
    (tmp_path / unequal.datasets.TRAIN_IMAGES.name).touch()
    assert any(unequal.CASES[name].script == "mnist.py" for name in unequal.available_cases())


def test_seconds_to_target_end_at_the_first_evaluation_at_the_target(tmp_path):
    log = tmp_path / "events.jsonl"
    said = [(1.0, 0.5), (2.0, 0.96), (3.0, 0.94), (4.0, 0.99)]
    evaluations = [
        {"event": "evaluation", "t": at, "worker": 0, "training_s": at, "metrics": {"test_accuracy": accuracy}}
        for at, accuracy in said
    ]
    log.write_text("".join(json.dumps(one) + "\n" for one in evaluations))
    assert unequal.reached(log, 0.95) == 2.0
    assert unequal.reached(log, 0.995) is None


def outcome(recipe, seed, speed, seconds=1.0):
    return unequal.Outcome(recipe, seed, speed, seconds, 0.9, [1], [0.5], None, None)


def test_recipe_is_compared_with_the_barrier_of_the_same_seed():
    outcomes = [outcome("allreduce", 0, 10.0), outcome("allreduce", 1, 20.0)]
    outcomes += [outcome("async_sgd", 0, 30.0), outcome("async_sgd", 1, 60.0, None)]
    found = unequal.summary(outcomes, "async_sgd")
    assert found["ratio"] == {"median": pytest.approx(3.0), "standard_error": pytest.approx(0.0)}
    assert found["samples_per_s"] == 45.0
    assert (found["seconds_to_target"], found["reached"], found["runs"]) == (None, 1, 2)


def test_failed_run_has_no_ratio():
    outcomes = [outcome("allreduce", 0, 10.0), outcome("async_sgd", 0, None, None)]
    assert unequal.summary(outcomes, "async_sgd")["ratio"] is None


def test_run_above_the_time_limit_is_ended(tmp_path, monkeypatch):
    before = children()
    monkeypatch.setattr(unequal, "LIMIT_S", 0.2)
    with pytest.raises(SystemExit, match="longer than 0.2 s"):
        unequal._run_to_end([sys.executable, "-c", "import signal; signal.pause()"], tmp_path / "log")
    assert children() <= before


def store_results(folder):
    """Store invented results as the benchmarks do."""
    taken = {name: [[1.0, 1.0]] for name in (server.ONE_WAY, server.BOTH_WAYS, *server.WAYS)}
    spread = {"median": 0.123}
    save(
        "server",
        {
            "wanted": 0.75,
            "wanted_ms": 0.3,
            "bytes": 100_000_000,
            "bare": {server.ONE_WAY: spread},
            "ways": {name: server._shares(taken, name) for name in server.WAYS},
            "round_trip_ms": {"plain": spread},
        },
        folder=folder,
    )
    cases = [updates._case((curve, 1, workers), [100.0 * workers]) for curve in (False, True) for workers in (1, 2)]
    save("updates", {"parameters": 100_000, "cases": cases}, folder=folder)
    sides = {name: against._side([Rate(7.0, 1e9)], [Rate(21.0, 3e9)]) for name in (against.OURS, "other")}
    case = {"parameters": 25_000_000, "workers": 2, "sides": sides}
    save("peers", {"sides": [against.OURS, "other"], "cases": [case]}, folder=folder)
    trained = {"samples_per_second": 80.0, "staleness": {"mean": 1.5}, "metrics": {"test_accuracy": 0.9}}
    sides = {side: overlap._side([trained]) for side in overlap.SIDES.values()}
    case = {"ratio": Ratio(1.25, 0.1).record(), "sides": sides}
    save("overlap", {"question": "how fast", "script": "train.py", "starts": 1, "cases": {"slow": case}}, folder=folder)
    outcomes = [outcome("allreduce", 0, 10.0), outcome("async_sgd", 0, 30.0, None)]
    recipes = {recipe: unequal.summary(outcomes, recipe) for recipe in ("allreduce", "async_sgd")}
    about = {"wanted": 2.5, "wanted_of": ["async_sgd"], "against": "allreduce", "workers": 4, "slow": {"1": 5.0}}
    one = {"target": 0.95, "slow": "1:5.0", "recipes": recipes}
    save("unequal", {**about, "cases": {"digits": one}}, folder=folder)


def test_page_shows_the_tables_of_the_parameter_server(tmp_path):
    store_results(tmp_path)
    page = tmp_path / "figures.md"
    page.write_text(f"{figures.BEGIN}{figures.END}")
    figures.write(page, tmp_path)
    written = page.read_text()
    assert "| plain, 1 worker | 1.00 | 1.000 | 1.000 | at least 0.75 of one way |" in written
    assert "plain 0.123 ms; wanted at most 0.3 ms" in written
    assert "| CURVE, 1 shard | 100 | 200 |" in written
    assert "| 25 M | 2 | other | 7 | 1.00 | 3.000 |" in written
    assert "| digits, 95% | async_sgd | 30 | 3.000 | at least 2.5 | reached in 0 of 1 runs |  |" in written
    assert "| slow | 1.250 ± 0.100 | downpour(every=8, overlap=True) | 80 | 1.50 | 0.900 |" in written
    names = [one.stem for one in tmp_path.glob("*.json")]
    assert set(names) <= set(tables.TABLES)
    assert all(f"\n{name}: 2" in written for name in names)
    assert all(f"{name}: not taken yet" in written for name in tables.TABLES if name not in names)


def test_help_names_every_benchmark():
    asked = [sys.executable, "-m", "benchmarks", "--help"]
    shown = subprocess.run(asked, cwd=push.__file__.rpartition("/benchmarks/")[0], capture_output=True, text=True)
    assert all(name in shown.stdout for name in tables.TABLES)
