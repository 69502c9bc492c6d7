"""Reports of workers with several ranks: rows by rank, and counts by worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report.synthetic_runs import Events, named, training, with_deaths, write_run

from stretto.events import of_process, read_events
from stretto.launcher.run_status import Progress
from stretto.process_config import WorkerConfig, worker_config
from stretto.report import incidents, plots, run_log, tables, time_series
from stretto.report.html_report import write
from stretto.report.run_record import record
from stretto.report.tables import TRAFFIC
from stretto.report.traffic_section import sheet
from stretto.runtime.runtime import Runtime
from stretto.training.worker_context import find_context

PER_RANK = ("start", "progress", "end", "log", "evaluation", "epoch")


def events(workers: int = 2) -> Events:
    made = training(workers, 0.02, 1000, 1, 0.97)
    for event in made:
        if event["event"] in ("progress", "end"):
            event["traffic"] = {"gradients": [event["bytes_sent"]] * 4}
    return made


def with_ranks(made: Events, ranks: int) -> Events:
    """Return the events with further ranks of each worker, which send twice as much as rank 0 and write all kinds."""
    result: Events = []
    for event in map(named, made):
        if event["event"] == "start":
            event["ranks"], event["rank"] = ranks, 0
        result.append(event)
        for rank in range(1, ranks) if event["event"] in PER_RANK else ():
            copy: dict[str, Any] = event | of_process(event["worker"], rank)
            if "bytes_sent" in event:
                copy |= {name: 2 * event[name] for name in ("bytes_sent", "bytes_received")}
                copy["traffic"] = {"gradients": [2 * value for value in event["traffic"]["gradients"]]}
            if "metrics" in event:
                copy["metrics"] = dict.fromkeys(event["metrics"], -1.0)
            result.append(copy)
    return result


def made(folder: Path, written: Events, workers: int = 2) -> Path:
    return write_run(folder, recipe="allreduce()", workers=workers, events=written)


BY_PROCESS = ("processes", "bytes_sent", "bytes_received", "time_breakdown", "traffic", "values_sent", "residual_norms")


@pytest.mark.parametrize("ranks", [2, 3])
def test_samples_failures_and_metrics_are_those_of_workers_whatever_the_number_of_ranks(
    tmp_path: Path, ranks: int
) -> None:
    for name, written in {"whole": events(), "failing": with_deaths(events(3))}.items():
        workers = 2 if name == "whole" else 3
        one = record(made(tmp_path / f"{name}-1", written, workers))
        several = record(made(tmp_path / f"{name}-{ranks}", with_ranks(written, ranks), workers))
        differing = {field for field in one if one[field] != several[field]}
        assert differing == {"folder", *BY_PROCESS} - {"values_sent", "residual_norms"}
        assert one["processes"] == [f"worker {worker}" for worker in range(workers)]
        names = [f"worker {w}" + f" rank {r}" * (r > 0) for w in range(workers) for r in range(ranks)]
        assert several["processes"] == names
        assert several["workers"] == workers
        per_worker = tables.megabytes(one, "sent")
        assert per_worker is not None
        assert tables.megabytes(several, "sent") == pytest.approx(per_worker * (1 + 2 * (ranks - 1)))


def test_tables_and_bars_have_a_row_for_each_rank_only_if_there_are_several(tmp_path: Path) -> None:
    one = record(made(tmp_path / "one", events()))
    several = record(made(tmp_path / "several", with_ranks(events(), 2)))
    for found, heading, names in (
        (one, "worker", ["worker 0", "worker 1"]),
        (several, "rank", ["worker 0", "worker 0 rank 1", "worker 1", "worker 1 rank 1"]),
    ):
        assert [bar.label for bar in plots.bars_of(found, "", "black").bars] == names
        (table,) = sheet(found)
        assert (table.title, table.columns[0]) == (TRAFFIC, heading)
        shown = [row[0].text for row in table.rows if row[0].text]
        assert shown == [f"mean of {len(names)} {heading}s", *names]


def test_curves_of_bytes_are_sums_over_ranks(tmp_path: Path) -> None:
    one, several = (
        run_log.read(made(tmp_path / name, written))
        for name, written in {"one": events(), "several": with_ranks(events(), 3)}.items()
    )
    for curve in (time_series.on_wire, lambda history: time_series.traffic_curve(history, "sent")):
        pairs = zip(curve(one).samples, curve(several).samples, strict=True)
        assert all(b.value == pytest.approx(5 * a.value) for a, b in pairs)


def test_a_run_with_ranks_has_a_page(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", with_ranks(with_deaths(events(3)), 2), 3)
    page = write(folder).read_text()
    assert "worker 1 rank 1" in page


def test_the_display_counts_the_samples_of_workers(tmp_path: Path) -> None:
    one, several = Progress(), Progress()
    lines: list[list[str | None]] = [[], []]
    for status, written, shown in ((one, events(), lines[0]), (several, with_ranks(events(), 2), lines[1])):
        shown += [line for event in map(named, written) if (line := status.take(event)) is not None]
    assert lines[0] == lines[1]
    assert one.samples_per_second() == several.samples_per_second()
    assert (one.step, one.metrics) == (several.step, several.metrics)


def test_an_incident_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    written = [*map(named, with_deaths(events(3)))]
    for event in written:
        if event["event"] == "membership" and event["what"] == "failed":
            event["rank"] = 1
    lines = incidents.in_lines(run_log.read(made(tmp_path / "run", written, 3)))
    assert any("worker 1, at 0.510 s: failed (rank 1, killed by SIGKILL, injected)" in line for line in lines), lines


@pytest.mark.parametrize("rank", [0, 1])
def test_events_of_a_process_name_its_rank(tmp_path: Path, rank: int) -> None:
    runtime = Runtime(rank=rank, ranks=2)
    log = runtime.log(tmp_path, 3)
    log.write("start", 0.0, **runtime.process_info())
    log.write("warning", 1.0, text="slow")
    log.close()
    start, warning = read_events(tmp_path / "events.jsonl")
    assert (start["rank"], start["ranks"]) == (rank, 2)
    name = {"process": "worker 3 rank 1", "worker": 3, "rank": 1} if rank else {"process": "worker 3", "worker": 3}
    assert warning == {"event": "warning", "t": 1.0, **name, "text": "slow"}
    assert not {"rank", "ranks"} & set(Runtime().process_info())


def test_a_configuration_carries_worker_rank_and_ranks() -> None:
    config = WorkerConfig(worker=3, rank=1, ranks=2)
    assert worker_config(config.environment()) == config
    assert (WorkerConfig().worker, WorkerConfig().rank, WorkerConfig().ranks) == (0, 0, 1)
    context = find_context(config.environment())
    assert context is not None
    assert (context.worker, context.runtime.rank, context.runtime.ranks) == (3, 1, 2)
