"""Tables of stages and of the memory of ranks, from the figures that the ranks write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report.synthetic_runs import Events, named, training, write_run

from stretto.events import of_process
from stretto.report import run_log, stages_section
from stretto.report.html_report import write
from stretto.report.run_record import record
from stretto.report.stages_section import MEMORY, STAGES

PASSES = 100


def events(seconds: list[float], waiting: list[float], predicted: bool = True, workers: int = 1) -> Events:
    """Return the events of workers with a rank for each of these seconds of all its passes."""
    made: Events = []
    for event in map(named, training(workers, 0.02, 1000, 1, 0.97)):
        for rank in range(len(seconds)):
            copy: dict[str, Any] = event | of_process(event["worker"], rank)
            if event["event"] == "start":
                copy |= {"ranks": len(seconds)}
            if event["event"] in ("progress", "end"):
                share = 1.0 if event["event"] == "end" else 0.1
                times = {"seconds": share * seconds[rank], "waiting": share * waiting[rank]}
                copy["stage"] = {"passes": int(share * PASSES), **times}
                megabytes = {"parameters": 1, "gradients": 2, "state": 3, "peak": 400}
                copy["memory"] = {name: (rank + 1) * size * 10**6 for name, size in megabytes.items()}
            if rank == 0 or event["event"] in ("start", "progress", "end"):
                made.append(copy)
    if predicted:
        modules, computing = [f"blocks.{rank}" for rank in range(len(seconds))], [0.006] * len(seconds)
        kept = [10**6] * len(seconds)
        made.append(
            {
                "event": "stages",
                "t": 0.0,
                **of_process(0),
                "modules": modules,
                "predicted_s": 0.009,
                "computing": computing,
                "activations": kept,
                "balance": 0.95,
            }
        )
    return made


def test_a_pass_of_each_rank_stands_beside_the_predicted_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe="allreduce()", events=events([1.0, 1.0], [0.2, 0.6]))
    stages, memory = stages_section.sheets(run_log.read(folder))
    assert (stages.title, memory.title) == (STAGES, MEMORY)
    rows = [[cell.text for cell in row] for row in stages.rows]
    assert rows == [
        ["worker 0", "blocks.0", "10.0 ms", "8.00 ms", "6.00 ms", "2.00 ms", "20%"],
        ["worker 0 rank 1", "blocks.1", "10.0 ms", "4.00 ms", "6.00 ms", "6.00 ms", "60%"],
    ]
    passes, waits = "A pass took 10.0 ms (predicted 9.00 ms)", "stages waited 40% (predicted 33%) of it"
    sentence = f"{passes}; {waits}; balance 0.75 (predicted 0.95)."
    assert stages.note.startswith(sentence)
    assert [[cell.text for cell in row] for row in memory.rows] == [
        ["worker 0", "1.00", "2.00", "3.00", "1.00", "400"],
        ["worker 0 rank 1", "2.00", "4.00", "6.00", "1.00", "800"],
    ]
    page = write(folder).read_text()
    assert sentence in page
    assert page.count("worker 0 rank 1") >= 2


def test_a_split_that_was_named_has_no_prediction(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe="allreduce()", events=events([1.0, 1.0], [0.5, 0.5], predicted=False))
    stages, memory = stages_section.sheets(run_log.read(folder))
    assert "predicted" not in stages.note
    assert [row[1].text for row in stages.rows] == ["–", "–"]
    assert [row[4].text for row in memory.rows] == ["–", "–"]
    found = record(folder)["stages"]
    assert found["predicted_s"] is found["predicted_waiting"] is None
    assert (found["pass_s"], found["waiting"], found["balance"]) == (pytest.approx(0.01), pytest.approx(0.5), 1.0)


def test_a_simulated_pipeline_has_a_table_of_what_was_predicted(tmp_path: Path) -> None:
    (stages_event,) = (event for event in events([1.0, 1.0], [0.5, 0.5]) if event["event"] == "stages")
    written = [*training(2, 0.02, 1000, 1, 0.97), stages_event | {"computing": [0.006, 0.009], "activations": []}]
    folder = write_run(tmp_path / "run", recipe="allreduce()", events=written, workers=2)
    (sheet,) = stages_section.sheets(run_log.read(folder))
    assert sheet.note.endswith("A pass takes 9.00 ms; balance 0.95.")
    assert [[cell.text for cell in row] for row in sheet.rows] == [
        ["0", "blocks.0", "6.00 ms", "3.00 ms", "33%"],
        ["1", "blocks.1", "9.00 ms", "0 ms", "0"],
    ]
    assert STAGES in write(folder).read_text()


def test_whole_workers_have_no_such_tables(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe="allreduce()", events=training(2, 0.02, 1000, 1, 0.97), workers=2)
    assert stages_section.sheets(run_log.read(folder)) == []
    assert record(folder)["stages"] is None
    assert stages_section.of_recipes([record(folder)]) == []


def test_passes_of_all_incarnations_count(tmp_path: Path) -> None:
    first = events([1.0, 1.0], [0.2, 0.2])
    again = [event | {"t": event["t"] + 100} for event in first if event["event"] in ("start", "progress", "end")]
    folder = write_run(tmp_path / "run", recipe="allreduce()", events=[*first, *again])
    (event, _) = run_log.read(folder).last_counts_by_process()
    assert event["stage"]["passes"] == 2 * PASSES
    assert event["memory"]["parameters"] == 10**6


def test_a_comparison_has_a_row_for_each_run_with_stages(tmp_path: Path) -> None:
    staged = write_run(tmp_path / "staged", recipe="allreduce()", events=events([1.0, 1.0], [0.2, 0.6]))
    whole = write_run(tmp_path / "whole", recipe="local_sgd()", events=training(1, 0.02, 1000, 1, 0.97))
    (sheet,) = stages_section.of_recipes([record(staged), record(whole)])
    assert [[cell.text for cell in row] for row in sheet.rows] == [
        ["allreduce()", "1", "10.0 ms", "9.00 ms", "40%", "33%", "0.75"]
    ]
