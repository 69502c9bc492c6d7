"""Traffic of a record, its tables and curves are sums over the events of workers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report.synthetic_runs import Events, exchanging, named, training, write_comparison, write_run
from rich.console import Console

from stretto.report import run_log, time_series, traffic
from stretto.report.html_report import write
from stretto.report.run_record import record
from stretto.report.tables import TRAFFIC, Sheet, sheets, show
from stretto.report.traffic_section import ALL, ALL_BUT_EVALUATION, TRANSPORT, sheet

EXACT = {"gradients": [4000, 4000, 4000, 4000]}
SPARSE = {
    "updates": [40_000, 1000, 40_000, 3000],
    "state": [2000, 2000, 2000, 2000],
    "evaluation_sync": [0, 0, 5000, 5000],
}


def sparse(workers: int = 2) -> Events:
    """Write a run of 150 rounds of 1,500 bytes, with a tenth of the values sent; residual 1/2, and 1/4 at worker 1."""
    return exchanging(
        training(workers, 0.02, 7000, 1, 0.97),
        SPARSE,
        entries=[1000, 10_000],
        norms=lambda t, worker: (4.0 - t, (4.0 - t) / (2 + 2 * worker)),
    )


def run(folder: Path, events: Events, workers: int = 2) -> dict[str, Any]:
    return record(write_run(folder / "run", recipe="sparse()", workers=workers, events=events))


def rows(found: Sheet) -> dict[tuple[str, str], dict[str, str]]:
    """The cells of a table by name and purpose; a row without a name belongs to the one above."""
    by_name, name = {}, ""
    for row in found.rows:
        name = row[0].text or name
        cells = {heading: cell.text for heading, cell in zip(found.columns, row, strict=True)}
        by_name[name, cells["purpose"]] = cells
    return by_name


def test_a_record_has_the_bytes_of_each_worker_purpose_and_direction(tmp_path: Path) -> None:
    found = run(tmp_path, sparse())
    rounds = 150
    names = ("raw_sent", "sent", "raw_received", "received")
    for worker in found["traffic"]:
        assert worker == {
            purpose: {name: rounds * value for name, value in zip(names, row, strict=True)}
            for purpose, row in SPARSE.items()
        }
    assert len(found["traffic"]) == 2
    assert found["compression"]["sent"] == pytest.approx(42 / 3)
    assert found["compression"]["received"] == pytest.approx(42 / 5)
    assert found["compression"]["wire_sent"] == pytest.approx(42 / 7)
    assert found["compression"]["wire_received"] == pytest.approx(47 / 7)
    assert found["values_sent"] == [{"sent": 150_000, "of": 1_500_000}] * 2
    assert found["values_sent_share"] == pytest.approx(0.1)
    assert json.loads(json.dumps(found)) == found


def test_the_residual_share_uses_norms_over_all_workers(tmp_path: Path) -> None:
    found = run(tmp_path, sparse())
    last = 4.0 - 3.3
    assert [one["input"] for one in found["residual_norms"]] == pytest.approx([last, last])
    assert [one["residual"] for one in found["residual_norms"]] == pytest.approx([last / 2, last / 4])
    assert found["residual_share"] == pytest.approx((0.5**2 + 0.25**2) ** 0.5 / 2**0.5)


def test_without_a_codec_raw_and_encoded_bytes_are_equal(tmp_path: Path) -> None:
    events = exchanging(training(2, 0.02, 6000, 1, 0.97), EXACT, entries=[1000, 1000])
    found = run(tmp_path, events)
    assert found["compression"]["sent"] == found["compression"]["received"] == 1.0
    assert found["values_sent_share"] == 1.0
    assert not traffic.is_encoded(found)
    assert traffic.summary(found) == ""
    assert TRAFFIC not in [one.title for one in sheets([found])]
    assert rows(sheet(found)[0])["worker 1", "gradients"]["ratio, sent"] == "1.00×"


account = st.lists(st.integers(0, 10**12), min_size=4, max_size=4)
told = st.dictionaries(st.sampled_from(["updates", "counts", "state", "evaluation_sync"]), account)


@given(st.lists(told, min_size=1, max_size=4))
def test_the_bytes_of_all_purposes_sum_to_the_total(by_worker: list[dict[str, list[int]]]) -> None:
    exchanged = [traffic.accounts({"traffic": one}) for one in by_worker]
    for place, way in enumerate(traffic.DIRECTIONS):
        whole = sum(row[place] for one in by_worker for row in one.values())
        looks = sum(one.get("evaluation_sync", [0] * 4)[place] for one in by_worker)
        assert traffic.total(exchanged, way, evaluation=True) == whole
        assert traffic.total(exchanged, way) == whole - looks
        each = [traffic.total([worker], way) for worker in exchanged]
        assert sum(each) == whole - looks
    assert {name for worker in exchanged for name in worker} == set(traffic.purposes(exchanged))


@pytest.mark.parametrize("wrong", [None, [], "x", {"a": None}, {"a": [1, 2]}, {"a": ["x", None, 1.5, True]}])
def test_malformed_traffic_counts_as_zero(tmp_path: Path, wrong: object) -> None:
    events = exchanging(training(2, 0.02, 1, 1, 0.9), {})
    for event in events:
        event |= {"traffic": wrong, "values_sent": wrong, "residual_norms": wrong}
    found = run(tmp_path, events)
    assert traffic.total(found["traffic"], "sent") == 0
    assert found["values_sent_share"] is None
    assert found["residual_share"] is None


def test_a_log_of_an_earlier_version_has_none_of_it(tmp_path: Path) -> None:
    found = run(tmp_path, training(2, 0.02, 1000, 1, 0.97))
    assert {name: found[name] for name in traffic.nothing()} == traffic.nothing()
    assert sheet(found) == []
    assert traffic.summary(found) == ""


# The tables


def test_the_table_of_a_run_says_what_its_record_says(tmp_path: Path) -> None:
    found = run(tmp_path, sparse())
    shown = rows(sheet(found)[0])
    for worker, told in enumerate(found["traffic"]):
        for purpose, account in told.items():
            cells = shown[f"worker {worker}", purpose]
            for way in ("sent", "received"):
                assert float(cells[f"raw, {way}"]) == pytest.approx(account[f"raw_{way}"] / 1e6, rel=5e-3)
                assert float(cells[f"encoded, {way}"]) == pytest.approx(account[way] / 1e6, rel=5e-3)
        whole, wire = shown[f"worker {worker}", ALL_BUT_EVALUATION], shown[f"worker {worker}", TRANSPORT]
        assert whole["ratio, sent"] == f"{found['compression']['sent']:.1f}×"
        assert whole["ratio, received"] == f"{found['compression']['received']:.2f}×"
        assert float(wire["encoded, sent"]) == pytest.approx(found["bytes_sent"][worker] / 1e6, rel=5e-3)
        assert wire["ratio, received"] == f"{found['compression']['wire_received']:.2f}×"
    assert shown["worker 0", "updates"]["residual"] == "0.50"
    assert shown["worker 1", "updates"]["residual"] == "0.25"
    mean = shown["mean of 2 workers", ALL_BUT_EVALUATION]
    assert float(mean["raw, sent"]) == pytest.approx(
        traffic.megabytes(found["traffic"], "raw_sent", found["workers"]), rel=5e-3
    )
    assert shown["mean of 2 workers", "updates"]["values sent"] == "10%"


def test_the_rows_by_purpose_sum_to_the_row_of_all(tmp_path: Path) -> None:
    shown = rows(sheet(run(tmp_path, sparse()))[0])
    for name in ("mean of 2 workers", "worker 0", "worker 1"):
        for column in ("raw, sent", "encoded, sent", "raw, received", "encoded, received"):
            parts = [float(shown[name, purpose][column]) for purpose in ("updates", "state")]
            assert float(shown[name, ALL_BUT_EVALUATION][column]) == pytest.approx(sum(parts), abs=0.011)


def test_one_purpose_needs_no_sum(tmp_path: Path) -> None:
    def purposes(folder: Path, told: dict[str, list[int]]) -> list[str]:
        found = rows(sheet(run(folder, exchanging(training(2, 0.02, 6000, 1, 0.97), told)))[0])
        return [purpose for name, purpose in found if name == "worker 0"]

    assert purposes(tmp_path / "one", EXACT) == ["gradients", TRANSPORT]
    assert purposes(tmp_path / "looked", {"evaluation_sync": [0, 0, 9, 9], **EXACT}) == [
        "gradients",
        "evaluation_sync",
        TRANSPORT,
    ]
    assert purposes(tmp_path / "two", {**EXACT, "counts": [0, 1, 0, 1]}) == ["gradients", "counts", ALL, TRANSPORT]
    assert purposes(tmp_path / "idle", {**EXACT, "state": [0, 0, 0, 0]}) == ["gradients", TRANSPORT]


def test_of_many_workers_the_largest_senders_are_shown(tmp_path: Path) -> None:
    events = exchanging(training(20, 0.02, 1000, 1, 0.97), EXACT)
    for event in events:
        if event["event"] == "end":
            event["bytes_sent"] += event["worker"] % 10
    found = sheet(run(tmp_path, events, workers=20))[0]
    names = [row[0].text for row in found.rows if row[0].text.startswith("worker")]
    assert names == [f"worker {one}" for one in (6, 7, 8, 9, 16, 17, 18, 19)]
    assert "The 8 of 20 workers" in found.note


def encoded(tmp_path: Path, seeds: int = 1) -> list[dict[str, Any]]:
    """The records of a comparison in which the second recipe encodes."""
    folder = write_comparison(tmp_path / "comparison", seeds=seeds)
    for seed in range(seeds):
        for place, purposes in enumerate((EXACT, SPARSE)):
            path = folder / f"recipe{place}-{seed}" / "events.jsonl"
            events = exchanging([json.loads(line) for line in path.read_text().splitlines()], purposes)
            events = sparse() if place else events
            path.write_text("".join(json.dumps(named(event)) + "\n" for event in events))
    kept = json.loads((folder / "compare.json").read_text())
    for one in kept["runs"]:
        one |= {name: record(folder / one["folder"])[name] for name in traffic.nothing()}
    (folder / "compare.json").write_text(json.dumps(kept))
    return list(kept["runs"])


def test_a_comparison_has_a_row_for_each_recipe_once_one_encodes(tmp_path: Path) -> None:
    found = next(one for one in sheets(encoded(tmp_path)) if one.title == TRAFFIC)
    shown = {row[0].text: [cell.text for cell in row[2:]] for row in found.rows}
    assert shown == {
        "allreduce()": ["0.600", "0.600", "0.600", "1.00×", "–", "–"],
        "local_sgd(every=16)": ["6.30", "0.450", "0.750", "14.0×", "10%", "0.40"],
    }


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_table_fits_a_terminal_and_loses_nothing(tmp_path: Path, seeds: int) -> None:
    records = encoded(tmp_path, seeds)
    for one in records:
        for worker in one["traffic"]:
            for account in worker.values():
                account["sent"] *= 1000 + one["seed"]
                account["raw_sent"] *= 10_000 + one["seed"]
        one["residual_share"] = 1234.5 + one["seed"] * 1000
    file = io.StringIO()
    show(Console(file=file, width=80), sheets(records))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for word in ("encoded,", "received", "values", "resi-", "63,000"):
        assert any(word in line for line in lines), word


# The page


def test_the_page_of_a_comparison_has_the_full_table_and_the_plots_once(tmp_path: Path) -> None:
    encoded(tmp_path)
    text = write(tmp_path / "comparison").read_text()
    assert text.count(f"<h2>{TRAFFIC}</h2>") == 1
    assert text.index("Bytes and rounds") < text.index(TRAFFIC) < text.index("Time breakdown")
    assert text.count("transport</td>") == 2
    assert text.count("encoded, received</th>") == 1
    assert "MB sent by a worker, encoded" in text
    assert "Residual, as a share of the input" in text


def test_the_page_of_a_run_draws_only_what_was_encoded(tmp_path: Path) -> None:
    exact = exchanging(training(2, 0.02, 6000, 1, 0.97), EXACT)
    for name, events, is_drawn in (("sparse", sparse(), True), ("exact", exact, False)):
        text = write(write_run(tmp_path / name, recipe="it()", workers=2, events=events)).read_text()
        assert f"<h2>{TRAFFIC}</h2>" in text
        assert ("encoded, received</text>" in text) is is_drawn
    old = write(write_run(tmp_path / "old", recipe="it()", workers=2)).read_text()
    assert TRAFFIC not in old


def test_a_purpose_is_escaped_on_the_page(tmp_path: Path) -> None:
    evil = "<script>alert('$x^2$')</script>"
    events = exchanging(training(2, 0.02, 6000, 1, 0.97), {evil: [9, 3, 9, 3]})
    text = write(write_run(tmp_path / "run", recipe="it()", workers=2, events=events)).read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


# The curves


def test_the_curves_end_where_the_record_does(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe="sparse()", workers=2, events=sparse())
    found, read = record(folder), run_log.read(folder)
    for way in traffic.DIRECTIONS:
        curve = time_series.traffic_curve(read, way)
        assert curve.samples[-1].value == pytest.approx(traffic.megabytes(found["traffic"], way, found["workers"]))
        values = [sample.value for sample in curve.samples]
        assert values == sorted(values)
    assert time_series.on_wire(read).samples[-1].value == pytest.approx(150 * 7000 / 1e6)
    assert time_series.residual(read).samples[-1].value == pytest.approx(found["residual_share"])
    assert time_series.residual(read).samples[-1].seconds == pytest.approx(3.0)


def test_repeated_norms_count_as_one_measurement(tmp_path: Path) -> None:
    events = exchanging(training(2, 0.02, 9, 1, 0.9), EXACT, norms=lambda t, worker: (1.0, 0.5 if t < 1.5 else 0.25))
    curve = time_series.residual(run_log.read(write_run(tmp_path / "run", recipe="sparse()", workers=2, events=events)))
    assert [sample.value for sample in curve.samples] == [0.5, 0.25]


def test_an_old_log_has_no_curves(tmp_path: Path) -> None:
    read = run_log.read(write_run(tmp_path / "run", recipe="sparse()", workers=2))
    assert time_series.traffic_curve(read, "sent").samples == ()
    assert time_series.residual(read).samples == ()
