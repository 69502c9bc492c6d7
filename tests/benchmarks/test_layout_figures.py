"""The figures page's tables of layouts, from records as the benchmarks store them."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from benchmarks import factorise, figures, hybrid, pipeline
from benchmarks.measure import save


def page_of(folder: Path) -> str:
    page = folder / "figures.md"
    page.write_text(f"{figures.BEGIN}{figures.END}")
    figures.write(page, folder)
    return page.read_text()


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which the benchmarks store their records."""
    for module in (factorise, hybrid, pipeline):
        monkeypatch.setattr(module, "save", functools.partial(save, folder=tmp_path))
    return tmp_path


def test_page_shows_a_pipeline_beside_the_schedules_of_torch(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"stretto": 0.08, "ScheduleGPipe": 0.1, "Schedule1F1B": 0.06}
    monkeypatch.setattr(pipeline, "seconds_a_step", times.__getitem__)
    monkeypatch.setattr(pipeline, "predicted", lambda: 0.93)
    pipeline.run()
    page = page_of(stored)
    assert "| stretto | 80.0 |  |  |" in page
    assert "| ScheduleGPipe | 100.0 | 1.250 ± 0.000 | at least 0.95 |" in page
    assert "| Schedule1F1B | 60.0 | 0.750 ± 0.000 | at least 0.80 |" in page
    assert "0.93, 0.93, 0.93, 0.93, 0.93 in each start; wanted\nwithin 10%." in page


def test_page_shows_a_hybrid_beside_fsdp(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unlimited:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(hybrid, "Laboratory", Unlimited)
    monkeypatch.setattr(hybrid, "measure", lambda _, side: 0.5 if side == hybrid.OURS else 15.0)
    hybrid.run()
    page = page_of(stored)
    assert "| stretto | 0.500, 0.500, 0.500 | 30.000 ± 0.000 | at least 20 |" in page
    assert "| FSDP | 15.000, 15.000, 15.000 |  |  |" in page


def test_page_shows_a_factorisation(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = itertools.count(start=1)
    monkeypatch.setattr(factorise, "write_values", lambda path: None)
    monkeypatch.setattr(factorise, "kernel_rates", lambda *_: {factorise.OURS: [5e7], factorise.THEIRS: [3e7]})
    monkeypatch.setattr(factorise, "seconds", lambda _, processes: 1.0 if processes == 1 else 0.625)
    monkeypatch.setattr(factorise, "REAL_RATINGS", Path(__file__))
    monkeypatch.setattr(factorise, "factorised", lambda *_: {"rmse": 0.88 + next(errors) / 1000})
    factorise.run()
    page = page_of(stored)
    assert "| kernel: M values a second of one core | 50.0 | at least 35 |" in page
    assert "| LIBMF: M values a second of one core | 30.0 |  |" in page
    assert "| 2 processes: times the speed of one | 1.600 ± 0.000 | at least 1.5 |" in page
    assert "| error on MovieLens, 2 processes | 0.8850, worst 0.8860 | at most 0.89 |" in page
