"""The page is one file that stands alone, the same for the same log, and trusts no text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.synthetic_runs import training, write_comparison, write_run

from stretto.errors import LogError
from stretto.report.html_report import write

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Well(HTMLParser):
    """Fails on tags that do not close in order; keeps ids, references and tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("page") / "comparison")


@pytest.fixture(scope="module")
def page(comparison: Path) -> str:
    return write(comparison).read_text()


def test_pages_are_self_contained(page: str, tmp_path: Path) -> None:
    alone = write(write_run(tmp_path / "run", recipe="allreduce()", workers=2)).read_text()
    for text in (page, alone):
        well = Well(text)
        assert "script" not in well.tags
        assert all(address.startswith("#") for address in well.addresses)
        assert "@import" not in text
        assert not re.search(r"url\((?!#)", text)
        assert "http://" not in text
        assert "https://" not in text
        assert "svg" in well.tags


def test_ids_are_unique_and_every_reference_resolves(page: str) -> None:
    well = Well(page)
    assert len(well.ids) == len(set(well.ids))
    wanted = {address[1:] for address in well.addresses} | set(re.findall(r"url\(#([^)]*)\)", page))
    assert wanted <= set(well.ids)


def test_the_same_log_gives_the_same_bytes(comparison: Path, page: str) -> None:
    assert write(comparison).read_text() == page


def test_the_verdict_comes_first_and_all_sections_are_present(page: str) -> None:
    order = ["<h1>", "Loss and metrics", "Model distance", "Speed", "Bytes and rounds", "Time breakdown"]
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    for text in ("stretto compare -n 2 train.py", "torch 2.13.0", "Imaginary CPU", "one seed", "samples, all workers"):
        assert text in page


def test_text_from_the_user_is_escaped_everywhere(tmp_path: Path) -> None:
    evil = "<script>alert('$x^2$')</script>&\"'"
    folder = write_comparison(tmp_path / "comparison", recipes=(evil,))
    kept = json.loads((folder / "compare.json").read_text())
    kept["question"] |= {"script": evil, "args": [evil], "command": [evil]}
    for one in kept["runs"]:
        one["metrics"] = {evil: 0.5}
    kept["runs"][-1]["failed"] = evil
    (folder / "compare.json").write_text(json.dumps(kept))
    events = training(2, 0.02, 1, 1, 0.9)
    events.append({"event": "warning", "t": 1.0, "worker": 0, "text": evil})
    for event in events:
        if event["event"] == "evaluation":
            event["metrics"] = {evil: 0.5}
    last = folder / kept["runs"][-1]["folder"] / "events.jsonl"
    last.write_text("".join(json.dumps(event) + "\n" for event in events))
    text = write(folder).read_text()
    assert "<script" not in text
    assert "script" not in Well(text).tags
    assert "&lt;script&gt;" in text


def test_recipes_keep_their_colours(page: str) -> None:
    for recipe in ("allreduce", "local_sgd"):
        swatches = set(re.findall(rf'<i style="background:(#\w+)"></i>{recipe}', page))
        labels = set(re.findall(rf"fill: (#\w+)[^>]*>{recipe}", page))
        assert len(swatches) == 1
        assert swatches == labels


def test_four_runs_stay_well_below_a_megabyte(page: str) -> None:
    assert len(page.encode()) < 400_000


@pytest.mark.parametrize("keep", [0, 1, 5, 100])
def test_a_failed_run_has_a_page(tmp_path: Path, keep: int) -> None:
    events = training(2, 0.02, 1000, 1, 0.9)[:keep]
    text = write(write_run(tmp_path / "run", recipe="allreduce()", workers=2, events=events)).read_text()
    assert "did not finish" in text


def test_a_run_without_evaluation_or_with_values_that_are_not_finite_has_a_page(tmp_path: Path) -> None:
    events = [event for event in training(1, 0.02, 0, 0, 0.9) if event["event"] != "evaluation"]
    assert "not evaluated" in write(write_run(tmp_path / "silent", events=events)).read_text()
    wild = training(1, 0.02, 0, 0, 0.9)
    for number, event in enumerate(wild):
        if event["event"] == "log":
            event["values"] = {"loss": None if number % 3 else 10.0**number}
        if event["event"] == "evaluation":
            event["metrics"] = {"test_accuracy": None}
    assert "were not finite" in write(write_run(tmp_path / "wild", events=wild)).read_text()


def test_a_comparison_without_finished_runs_has_a_page(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "comparison")
    kept = json.loads((folder / "compare.json").read_text())
    for runs in ([], kept["runs"][:1], kept["runs"][:2]):
        (folder / "compare.json").write_text(json.dumps(kept | {"runs": runs}))
        Well(write(folder).read_text())


def test_a_comparison_without_names_of_processes_has_a_page(tmp_path: Path) -> None:
    """Records of earlier versions have an entry for each worker in each list, and no names."""
    folder = write_comparison(tmp_path / "comparison")
    kept = json.loads((folder / "compare.json").read_text())
    for one in kept["runs"]:
        del one["processes"]
    (folder / "compare.json").write_text(json.dumps(kept))
    assert "worker 1" in write(folder).read_text()


def test_the_page_omits_a_run_with_a_damaged_log(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "comparison")
    (folder / "recipe0-0" / "events.jsonl").write_text('{"event": {"event"\n{"event": "end", "worker": 0}\n')
    assert "local_sgd(every=16)" in write(folder).read_text()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="run folder"):
        write(tmp_path)


def test_the_page_of_a_run_without_evaluations_or_a_loss_names_what_to_add(tmp_path: Path) -> None:
    calls = {"evaluation": "evaluate=lambda model", "log": "<code>stretto.log(loss=loss)</code>"}
    for lacking in (set(), {"evaluation"}, {"log"}, {"evaluation", "log"}):
        events = [event for event in training(1, 0.02, 0, 0, 0.9) if event["event"] not in lacking]
        text = write(write_run(tmp_path / "-".join(["run", *lacking]), events=events)).read_text()
        assert {kind for kind, call in calls.items() if call in text} == lacking


def test_the_page_of_a_comparison_of_counted_steps_names_the_samples(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "comparison", counts_steps=True)
    text = write(folder).read_text()
    headline = text.partition("<h1>")[2].partition("</h1>")[0]
    assert "a single process with the global batch (×2)" in headline
    assert headline.endswith("for the same 2,400 samples.")
    assert "script&#39;s batch trained on 1,200 samples" in text
    assert "no times are compared" in text
    assert "training time</th>" not in text
    assert "seconds for 1,000 samples of all workers" in text
    assert ", if it trained on as many samples as the others" in text
    assert "<dd>training time for equal samples at equal quality</dd>" in text
