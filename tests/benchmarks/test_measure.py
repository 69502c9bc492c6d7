"""Ratios, their errors, and the figures page made from stored results."""

import json
import math

import pytest

from benchmarks import figures, lab
from benchmarks.contest import Contest
from benchmarks.measure import Ratio, Spread, save


def test_ratio_of_a_side_to_itself_is_one():
    seconds = [[1.0, 2.0, 0.5], [3.0, 1.0, 1.0]]
    assert Ratio.of(seconds, seconds) == Ratio(1.0, 0.0)


def test_half_the_seconds_is_twice_the_speed():
    assert Ratio.of([[1.0, 2.0]], [[2.0, 4.0]]).median == 2.0


def test_slow_minute_of_both_sides_does_not_change_the_ratio():
    quiet, slow = [1.0, 1.0, 1.0], [1.0, 7.0, 1.0]
    assert (
        Ratio.of([[2 * one for one in slow]], [slow]).median == Ratio.of([[2 * one for one in quiet]], [quiet]).median
    )


def test_one_start_has_no_standard_error():
    one = Ratio.of([[1.0]], [[1.0]])
    assert math.isnan(one.error)
    assert one.record() == {"median": 1.0, "standard_error": None}


def test_error_is_that_of_the_mean_over_starts():
    assert Ratio.of([[1.0], [1.0]], [[1.0], [3.0]]).error == pytest.approx(1.0)


@pytest.mark.parametrize("values", [[5.0], [1.0, 2.0, 3.0], [4.0, 1.0, 3.0, 2.0]])
def test_quartiles_enclose_the_median(values):
    spread = Spread.of(values)
    assert min(values) <= spread.low <= spread.median <= spread.high <= max(values)


def test_trial_does_not_replace_the_stored_result(tmp_path):
    whole = save("one", {"x": 1}, folder=tmp_path)
    trial = save("one", {"x": 2}, trial=True, folder=tmp_path)
    assert json.loads(whole.read_text())["x"] == 1
    assert json.loads(trial.read_text())["x"] == 2
    assert json.loads(whole.read_text())["machine"]["cores"] >= 1


def outcome(way, seconds, steps=10, bytes_sent=None):
    return lab.Outcome(way, 0, seconds, steps, 1000 * (seconds or 9.0) / steps, 9.0, [110, 110], bytes_sent, [])


def test_lab_compares_a_recipe_with_the_same_written_by_hand():
    ratios = lab._ratios([outcome("torch DDP", 8.0), outcome("allreduce", 4.0), outcome("alone", 1.0)])
    assert ratios == {"allreduce": {"against": "torch DDP", "a_step": 2.0, "to_target": 2.0}}


def test_ratio_to_an_unreached_target_is_none():
    ratios = lab._ratios([outcome("torch DDP", None), outcome("allreduce", 4.0)])
    assert ratios["allreduce"]["to_target"] is None


def test_count_ratio_is_bytes_on_links_over_reported_bytes():
    assert outcome("allreduce", 1.0, bytes_sent=[100, 100]).count_ratio == 1.1
    assert outcome("torch DDP", 1.0).count_ratio is None


def test_partial_lab_is_a_trial():
    assert not lab.Terms().is_trial
    assert lab.Terms(ways=("alone",)).is_trial
    assert lab.Terms(target=0.9).is_trial


def test_page_shows_stored_results(tmp_path):
    side = {"steps_a_second": 100.0}
    case = {"ratio": Ratio(1.25, 0.01).record(), "sides": {"stretto": side, "other": side}}
    save("ddp", {"question": "which?", "wanted": 0.97, "cases": {"0.8 M": case}}, folder=tmp_path)
    page = tmp_path / "figures.md"
    page.write_text(f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n")
    figures.write(page, tmp_path)
    written = page.read_text()
    assert "1.250 ± 0.010" in written
    assert "not taken yet" in written
    assert "old" not in written
    assert written.startswith("before\n")
    assert written.endswith("after\n")


def test_contest_names_are_those_of_its_sides_and_module():
    from benchmarks import averaging, ddp, line

    for module in (averaging, ddp, line):
        assert isinstance(module.CONTEST, Contest)
        assert tuple(module.SIDES) == tuple(module.CONTEST.sides)
        assert module.__name__ == f"benchmarks.{module.CONTEST.name}"
