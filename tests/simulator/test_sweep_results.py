"""Speed-up, efficiency and the limit beyond which more workers stop paying, by definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report import synthetic_runs

from stretto.errors import LogError
from stretto.report.target import Target
from stretto.simulator.sweep import report
from stretto.simulator.sweep.grid import Point
from stretto.simulator.sweep.runner import results

TIMES = st.dictionaries(st.integers(1, 4096), st.floats(0.01, 100.0) | st.just(math.inf), min_size=1, max_size=9)


def point(**values: str) -> Point:
    return Point("here", values, {"recipe": "local_sgd", "workers": values.get("workers", "1")}, ())


def found(workers: int, pace: float | None = None, reached: float | None = None, **values: str) -> dict[str, Any]:
    """Return a point in the format of sweep.json."""
    one = results.failed(point(workers=str(workers), **values), "no reason")
    return one | {"failed": None, "seconds": 9.0, "samples_per_second": pace, "seconds_to_target": reached}


# Where more workers stop paying


@given(TIMES)
def test_limit_is_the_first_number_beyond_which_none_is_faster(times: dict[int, float]) -> None:
    def enough(w: int) -> bool:
        best = min(times[u] for u in times if u <= w)
        return best < math.inf and not any(times[v] <= 0.95 * best for v in times if v > w)

    first = min((w for w in times if enough(w)), default=None)
    expected = None if first == max(times) else first
    assert results.stops_paying(times) == expected


@given(TIMES, st.sampled_from([0.5, 2.0, 1024.0]))
def test_the_unit_of_time_does_not_matter(times: dict[int, float], unit: float) -> None:
    assert results.stops_paying({w: unit * t for w, t in times.items()}) == results.stops_paying(times)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([8, 4, 2, 1], None),  # halved each time: more always pays
        ([8, 4, 4, 4], 2),
        ([8, 4, 3.9, 3.8], 4),  # from 2 to 8 by 5%, from 4 to 8 not
        ([8, 4, 3.9, 3.81], 2),  # each a little faster, together not by 5%
        ([8, 4, 6, 3], None),  # worse in between, and better again
        ([math.inf, 4, 4, 4], 2),
        ([math.inf] * 4, None),
        ([1, 2, 3, 4], 1),
        ([5, 4, math.inf, math.inf], 2),
        ([5], None),
    ],
)
def test_examples_of_the_limit(times: list[float], expected: int | None) -> None:
    assert results.stops_paying(dict(zip((1, 2, 4, 8), times, strict=False))) == expected


# Speed-up


@given(st.lists(st.floats(1.0, 1e6), min_size=2, max_size=6))
def test_speed_up_is_relative_to_one_worker_and_efficiency_per_worker(paces: list[float]) -> None:
    line = results.compared([found(w, pace) for w, pace in enumerate(paces, 1)])
    for w, (one, pace) in enumerate(zip(line, paces, strict=True), 1):
        assert one["speed_up"] == pytest.approx(pace / paces[0])
        assert one["efficiency"] == pytest.approx(pace / paces[0] / w)
        assert one["speed_up_by"] == "samples_per_second"


def test_speed_up_is_by_the_time_to_the_target_where_one_worker_reached_it() -> None:
    one, two, four = results.compared([found(1, 10, 8.0), found(2, 30, 5.0), found(4, 90, None)])
    assert (one["speed_up"], two["speed_up"], two["efficiency"]) == (1.0, 1.6, 0.8)
    assert two["speed_up_by"] == "target"
    assert four["speed_up"] is four["speed_up_by"] is four["efficiency"] is None


def test_speed_up_is_by_throughput_where_one_worker_missed_the_target() -> None:
    _, two = results.compared([found(1, 10), found(2, 15, 5.0)])
    assert (two["speed_up"], two["speed_up_by"]) == (1.5, "samples_per_second")


def test_each_line_is_measured_by_its_own_worker() -> None:
    points = [found(1, 10, every="1"), found(2, 15, every="1"), found(1, 20, every="9"), found(2, 50, every="9")]
    assert [one["speed_up"] for one in results.compared(points)] == [1.0, 1.5, 1.0, 2.5]
    assert list(results.lines(points)) == ["every=1", "every=9"]


def test_no_speed_up_without_a_complete_point_of_one_worker() -> None:
    bad = results.failed(point(workers="1"), "boom")
    assert [one["speed_up"] for one in results.compared([bad, found(2, 15)])] == [None, None]
    assert [one["speed_up"] for one in results.compared([found(4, 15), found(2, 15)])] == [None, None]


def test_limits_are_per_line() -> None:
    points = [found(w, 10 * min(w, 4), every="1") for w in (8, 4, 2, 1)]
    points += [found(w, 10, 8 / w, every="9") for w in (1, 2)]
    points += [found(1, 10, every="20"), results.failed(point(workers="2", every="20"), "boom")]
    assert results.stops(points) == [
        {"line": "every=1", "values": {"every": "1"}, "workers": 4, "most": 8, "by": "samples_per_second"},
        {"line": "every=9", "values": {"every": "9"}, "workers": None, "most": 2, "by": "target"},
    ]


def test_line_is_named_by_its_values_or_its_recipe() -> None:
    assert results.label(found(2, recipe="async_sgd", seed="1")) == "async_sgd, seed=1"
    assert results.label(found(2)) == "local_sgd"
    assert results.label(found(2, every="3"), "every") == "workers=2"
    assert results.label({"values": {"every": "3"}, "recipe": "local_sgd(every=3)"}, "every") == "local_sgd"


# Equal samples

METRICS = [(100, 0.5), (200, 0.7), (300, 0.8), (400, 0.85)]


def trained(workers: int, samples: int, pace: float, metric: list[tuple[int, float]], **values: str) -> dict[str, Any]:
    """Return a point that trained on this number of samples, with these accuracies on the way."""
    seen = [{"samples": at, "training_s": at / pace, "metrics": {"acc": value}} for at, value in metric]
    last = {"metrics": {"acc": metric[-1][1]}} if metric else {}
    return found(workers, pace, **values) | {"samples": samples, "evaluations": seen, "seconds": samples / pace, **last}


def test_more_workers_pay_at_equal_quality_only() -> None:
    line = [trained(w, 400, 10 * w, [*METRICS[:3], (400, 0.85 if w < 8 else 0.7)]) for w in (1, 2, 4, 8)]
    points = results.compared(line)
    assert [one["as_good"] for one in points] == [True, True, True, False]
    assert results.stops(points)[0]["workers"] == 4


def test_quality_is_compared_after_equal_samples() -> None:
    points = [trained(1, 200, 10, METRICS[:2]), trained(2, 400, 15, METRICS)]
    assert results.as_good(points) == [True, True]
    late = [trained(1, 200, 10, METRICS[:2]), trained(2, 400, 15, METRICS[3:])]
    assert results.as_good(late) == [True, None]
    assert results.as_good([found(1, 10), found(2, 15)]) == [None, None]
    worse = [(at, value - 0.02 * (at > 100)) for at, value in METRICS]
    assert results.as_good([trained(1, 200, 10, METRICS[:2]), trained(2, 400, 15, worse)]) == [True, False]


def test_report_of_unequal_samples_has_no_seconds_of_different_work(tmp_path: Path) -> None:
    points = [trained(1, 200, 10, METRICS[:2]), trained(2, 400, 15, METRICS)]
    text = written(tmp_path, points, workers=["1", "2"])
    assert "Most samples/s at equal quality (acc after 200 samples): local_sgd on 2 workers, 15, 1.50×" in text
    assert "Quality was not compared" not in text
    assert "Seconds for 1,000 samples" in text
    assert "acc after 200 samples" in text
    assert "<td>0.7000</td>" in text and "<td>0.8500</td>" not in text
    assert "26.7 s" not in text and "20.0 s" not in text
    silent = [trained(w, 200 * w, 10 * w, []) for w in (1, 2)]
    unmeasured = written(tmp_path / "silent", silent, workers=["1", "2"])
    assert "<code>evaluate_every=</code>" in unmeasured


# Records and the report


def test_a_point_is_measured_from_its_run_folder(tmp_path: Path) -> None:
    run = synthetic_runs.write_run(tmp_path / "run", recipe="local_sgd(every=2)", workers=2, every=2)
    seen = results.measured(point(workers="2", every="2"), run, Target.parse("test_accuracy>=0.93"))
    assert seen["values"] == {"workers": "2", "every": "2"}
    assert (seen["seconds"], seen["samples"], seen["workers"]) == (3.0, 2400, 2)
    assert seen["seconds_to_target"] == 2.0
    assert seen["samples_to_target"] == 1600
    assert seen["samples_per_second"] == 800
    assert seen["bytes_sent_per_worker"] == 75 * 1000
    assert seen["mean_staleness"] is None
    assert seen["waiting_share"] == 0
    assert seen["metrics"]["test_loss"] == pytest.approx(0.22)
    never = results.measured(point(workers="2"), run, Target.parse("test_accuracy>=0.99"))
    assert never["seconds_to_target"] is never["samples_to_target"] is None
    assert set(results.failed(point(workers="2"), "boom")) == set(seen)
    events = synthetic_runs.asynchronous([[1, 1], [2, 4]])
    stale = synthetic_runs.write_run(tmp_path / "stale", workers=2, events=events)
    assert results.measured(point(workers="2"), stale, None)["mean_staleness"] == 2.0


def test_saved_sweep_is_read_back_and_other_files_are_refused(tmp_path: Path) -> None:
    points = results.save(tmp_path, {"asked": {"target": None}}, [found(1, 10), found(2, 15)])
    kept = results.read(tmp_path)
    assert kept["points"] == points
    assert kept["points"][1]["speed_up"] == 1.5
    assert kept["stops_paying"][0]["most"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(LogError, match="was not written by a sweep"):
        results.read(tmp_path)


def head(target: str | None = None, **sweep: list[str]) -> dict[str, Any]:
    asked = {"script": "train.py", "args": [], "options": {"network": "instant"}, "sweep": sweep, "target": target}
    machine = {"processor": "Imaginary CPU", "cores": 4}
    return {"asked": asked, "machine": machine, "versions": {}, "started": "today", "command": ["stretto", "simulate"]}


def written(folder: Path, points: list[dict[str, Any]], target: str | None = None, **sweep: list[str]) -> str:
    folder.mkdir(exist_ok=True)
    results.save(folder, head(target, **sweep), points)
    return report.write(folder).read_text()


def test_report_shows_the_fastest_point_the_limit_and_failures(tmp_path: Path) -> None:
    points = [found(w, 10 * min(w, 4), 8 / min(w, 4)) for w in (1, 2, 4, 8)]
    bad = results.failed(point(workers="16"), "ValueError: <boom>")
    text = written(tmp_path, [*points, bad], "accuracy>=0.9", workers=["1", "2", "4", "8", "16"])
    assert "Fastest to accuracy&gt;=0.9: local_sgd on 4 workers, 2.00 s, 4.00× as fast as one." in text
    assert "beyond 4 workers more of them do not pay; there they are 4.00× as fast as one to the target." in text
    assert "points/here: ValueError: &lt;boom&gt;" in text
    assert "Ring: beyond it" in text
    assert "as many times as workers" in text
    assert "<dt>Network</dt>" in text
    assert text.count("<td>failed</td>") == 7
    assert report.write(tmp_path).read_text() == text


def test_plot_marks_only_the_limit(tmp_path: Path) -> None:
    def rings(points: list[dict[str, Any]]) -> int:
        panels = report._fast({"points": points, "stops_paying": results.stops(points), **head()}, "workers")
        return sum(len(panel.marks) for panel in panels)

    assert rings(results.compared([found(w, 10 * min(w, 4)) for w in (1, 2, 4, 8)])) == 2
    assert rings(results.compared([found(w, 10 * w) for w in (1, 2, 4, 8)])) == 0


def test_report_without_a_workers_axis_uses_the_first_numeric_axis(tmp_path: Path) -> None:
    points = [found(8, 10 * int(every), seed=seed, every=every) for seed in ("0", "1") for every in ("1", "2")]
    text = written(tmp_path, points, seed=["0", "1"], every=["1", "2"])
    assert "How long?" in text
    assert "stop paying" not in text
    assert text.count("<svg") == 1
    assert "Most samples/s: seed=0, every=2 on 8 workers, 20." in text
    assert report._across(results.read(tmp_path)) == "every"
    assert report._across(head(network=["instant", "20ms"], recipe=["allreduce", "async_sgd"])) == ""


def test_plot_has_at_most_eight_lines(tmp_path: Path) -> None:
    points = [found(w, 10 * w, every=str(every)) for w in (1, 2) for every in range(1, 21)]
    text = written(tmp_path, points, workers=["1", "2"], every=[str(every) for every in range(1, 21)])
    assert "8 of 20 lines are drawn; the table lists all." in text
    assert len(report._colours(results.read(tmp_path), "workers")) == 8
    assert len(set(report._colours(results.read(tmp_path), "workers").values())) == 8
    assert {"every=1", "every=20"} <= set(report._colours(results.read(tmp_path), "workers"))


@pytest.mark.parametrize(
    ("options", "sweep", "told"),
    [
        ({}, {}, True),
        ({"step_time": "auto"}, {}, True),
        ({"step_time": "5ms"}, {}, False),
        ({"step_time": "auto"}, {"step_time": ["1ms", "2ms"]}, False),
        ({"step_time": "auto", "measured": "5ms"}, {}, False),
    ],
)
def test_report_notes_points_with_their_own_step_time(
    options: dict[str, str], sweep: dict[str, list[str]], told: bool
) -> None:
    """No notice for points whose step time was measured before they started."""
    measured = {"step_times": {"allreduce": options["measured"]}} if "measured" in options else {}
    asked = head(**sweep)["asked"] | {"options": options} | measured
    found = {"asked": asked, "points": [], "stops_paying": []}
    assert (report.MEASURED in report.sentences(found)) == told


def test_empty_sweep_has_a_report(tmp_path: Path) -> None:
    assert "No point has been measured." in written(tmp_path, [], workers=["1", "2"])
    assert "No point reached loss&lt;=0." in written(tmp_path, [found(1, 10)], "loss<=0", workers=["1", "2"])
    bad = [results.failed(point(workers=w), "boom") for w in "12"]
    assert "No point has been measured." in written(tmp_path, bad, "loss<=0", workers=["1", "2"])
