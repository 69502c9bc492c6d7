"""A comparison saves finished runs, even when later ones fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compare.fake_runs import Pretend

from stretto.compare.runner import Comparison
from stretto.compare.trials import Question, Trial
from stretto.errors import LaunchError
from stretto.launcher.local import Stopped
from stretto.launcher.progress_display import ProgressDisplay
from stretto.report import html_report
from stretto.report.run_record import Record
from stretto.report.target import Target
from stretto.run_config import RunConfig


class Hush:
    """Is told and says nothing."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin(self, trial: Trial) -> ProgressDisplay:
        return ProgressDisplay(quiet=True)

    def end(self, trial: Trial, record: Record) -> None:
        self.said.append(trial.name)

    def say(self, text: str) -> None:
        self.said.append(text)


def made(folder: Path, run: Any, **more: Any) -> Comparison:
    folder.mkdir()
    asked: dict[str, Any] = {"workers": (2,), "recipes": ("allreduce()", "local_sgd(every=10)")}
    question = Question(RunConfig(Path("train.py")), **(asked | more))
    return Comparison(question, folder, Hush(), run)


def kept(folder: Path) -> list[Record]:
    runs: list[Record] = json.loads((folder / "compare.json").read_text())["runs"]
    return runs


def test_all_trials_run_in_order_and_are_saved(tmp_path: Path) -> None:
    run = Pretend()
    comparison = made(tmp_path / "c", run, seeds=2)
    comparison.run()
    assert [order.out.name for order in run.orders if order.out] == [trial.name for trial in comparison.trials]
    assert [one["recipe"] for one in kept(tmp_path / "c")] == [
        *("single process", "single process (global batch)", "allreduce()", "local_sgd(every=10)") * 2
    ]
    assert not comparison.failed()


def test_distances_refer_to_the_global_batch_and_states_are_deleted_afterwards(tmp_path: Path) -> None:
    made(tmp_path / "c", Pretend()).run()
    alone, joined, allreduce, local = kept(tmp_path / "c")
    assert alone["parameter_distance"] == 0.0
    assert joined["parameter_distance"] is None
    assert allreduce["parameter_distance"] == pytest.approx(0.01, rel=1e-4)
    assert local["parameter_distance"] == pytest.approx(0.1, rel=1e-4)
    assert local["compared_with"] == "single-process-global-batch-2-seed0"
    assert [one["samples"] for one in local["distances"]] == [800, 1600]
    assert not list((tmp_path / "c").glob("*/states"))
    assert len(list((tmp_path / "c").glob("*/final.safetensors"))) == 4


def test_a_loop_that_draws_its_batches_is_compared_with_a_single_process_alone(tmp_path: Path) -> None:
    pretend = Pretend()

    def run(order: RunConfig, display: ProgressDisplay) -> Path:
        folder = pretend(order, display)
        with open(folder / "events.jsonl", "a") as log:
            log.write(json.dumps({"event": "start", "t": 0.0, "process": "worker 0", "worker": 0, "numbers": True}))
        return folder

    comparison = made(tmp_path / "c", run, seeds=2)
    comparison.run()
    assert [one["recipe"] for one in kept(tmp_path / "c")] == [
        *("single process", "allreduce()", "local_sgd(every=10)") * 2
    ]
    assert [one["compared_with"] for one in kept(tmp_path / "c")[4:]] == ["single-process-seed1"] * 2
    assert not comparison.failed()


def test_all_trials_repeat_the_shares_by_speed_of_the_first(tmp_path: Path) -> None:
    pretend = Pretend()

    def run(order: RunConfig, watch: ProgressDisplay) -> Path:
        out = pretend(order, watch)
        if order.shares == "speed":
            with (out / "events.jsonl").open("a") as log:
                log.write('{"event":"shares","t":1.0,"process":"worker 0","worker":0,"epoch":1,"after":5,"paces":[]}\n')
        return out

    folder = tmp_path / "c"
    question = Question(RunConfig(Path("train.py"), shares="speed"), (2,), ("allreduce()", "diloco()"), 2)
    folder.mkdir()
    Comparison(question, folder, Hush(), run).run()
    first = str(folder / "allreduce-n2-seed0")
    assert [order.shares for order in pretend.orders] == ["even", "even", "speed", first, "even", "even", first, first]


def test_states_are_kept_only_while_a_later_run_needs_them(tmp_path: Path) -> None:
    folder, seen = tmp_path / "c", []
    pretend = Pretend()

    def run(order: RunConfig, watch: ProgressDisplay) -> Path:
        seen.append(sorted(path.parent.name for path in folder.glob("*/states")))
        return pretend(order, watch)

    made(folder, run, seeds=2).run()
    first = "single-process-seed0", "single-process-global-batch-2-seed0"
    assert seen[:5] == [[], [first[0]], [first[1]], [first[1]], []]


def test_a_failed_run_is_marked_and_the_others_continue(tmp_path: Path) -> None:
    run = Pretend(failing=("allreduce-n2-seed0",), at_once=("single-process-global-batch-2-seed0",))
    comparison = made(tmp_path / "c", run)
    comparison.run()
    alone, joined, allreduce, local = kept(tmp_path / "c")
    assert allreduce["failed"].startswith("worker 1 failed: ValueError: boom")
    assert allreduce["samples"] > 0
    assert joined["failed"] == "no port to be had"
    assert joined["global_batch_of"] == 2
    assert [one["failed"] for one in (alone, local)] == [None, None]
    assert local["parameter_distance"] is None
    assert len(comparison.failed()) == 2
    text = html_report.write(tmp_path / "c").read_text()
    assert "Some runs failed" in text
    assert "no port to be had" in text


def test_error_of_several_runs_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Pretend(failing=("single-process-seed0", "allreduce-n2-seed0"), at_once=("local_sgd-10-n2-seed0",))
    comparison = made(tmp_path / "c", run)
    comparison.run()
    assert isinstance(comparison._reporter, Hush)
    said = [text for text in comparison._reporter.said if "boom" in text or "error of" in text]
    assert said == ["worker 1 failed: ValueError: boom\nTraceback", "with the error of single-process-seed0"]


def test_every_record_has_the_time_to_the_target(tmp_path: Path) -> None:
    made(tmp_path / "c", Pretend(), target=Target("test_accuracy", ">=", 0.9)).run()
    for one in kept(tmp_path / "c"):
        samples = 800 if one["recipe"] == "single process" else 1600
        assert one["reached"] == {"seconds": pytest.approx(2.0), "samples": samples}


def test_an_unknown_target_metric_stops_the_comparison_after_the_first_run(tmp_path: Path) -> None:
    run = Pretend()
    with pytest.raises(LaunchError, match="test_accuracy"):
        made(tmp_path / "c", run, target=Target("accuracy", ">=", 0.9)).run()
    assert len(run.orders) == 1
    assert len(kept(tmp_path / "c")) == 1


def test_a_stopped_comparison_leaves_readable_records(tmp_path: Path) -> None:
    pretend = Pretend()

    def run(order: RunConfig, watch: ProgressDisplay) -> Path:
        if len(pretend.orders) == 2:
            raise Stopped(2)
        return pretend(order, watch)

    with pytest.raises(Stopped):
        made(tmp_path / "c", run).run()
    assert [one["recipe"] for one in kept(tmp_path / "c")] == ["single process", "single process (global batch)"]
    assert not list((tmp_path / "c").glob("*/states"))
    assert "No verdict" in html_report.write(tmp_path / "c").read_text()


def test_compare_json_has_the_verdict_that_the_page_shows(tmp_path: Path) -> None:
    made(tmp_path / "c", Pretend()).run()
    judged = json.loads((tmp_path / "c" / "compare.json").read_text())["verdict"]
    assert judged["by"] == "training time for equal samples at equal quality"
    assert [side["samples"] for side in judged["sides"]] == [2400, 2400]
    assert "for the same 2,400 samples" in judged["sentence"]
    assert judged["sentence"] in html_report.write(tmp_path / "c").read_text()


def test_distances_of_runs_of_unequal_samples_are_those_after_equal_samples(tmp_path: Path) -> None:
    pretend = Pretend()

    def longer(order: RunConfig, watch: ProgressDisplay) -> Path:
        folder = pretend(order, watch)
        if order.single_process and order.global_batch_of == 1:
            events = folder / "events.jsonl"
            events.write_text(events.read_text().replace('"samples": 2400', '"samples": 4800'))
        return folder

    made(tmp_path / "c", longer).run()
    alone, _, allreduce, _ = kept(tmp_path / "c")
    assert alone["samples"] == 4800
    assert alone["compared_at"] == alone["distances"][-1]["samples"] == 1600
    assert allreduce["compared_at"] == allreduce["samples"] == 2400
