"""Measuring under contention: the load is as simulated, no process is left, all gradient scalers are listed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.amp.grad_scaler import GradScaler

from stretto.runtime.runtime import Runtime
from stretto.simulator.compute import contention


@pytest.mark.parametrize(
    ("workers", "processors", "expected"), [(4, 2.0, 3), (1000, 2.0, 3), (3, 2.0, 2), (2, 2.0, 1), (1, 8.0, 0)]
)
def test_contention_matches_the_simulated_load(workers, processors, expected, monkeypatch):
    """On two processors; four busy processes are the highest load."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert contention.copies(workers, processors) == expected


def test_copies_repeat_and_are_gone_afterwards(tmp_path: Path):
    def act() -> None:
        with (tmp_path / str(os.getpid())).open("a") as file:
            file.write("x")
        time.sleep(0.001)

    limit = time.monotonic() + 60
    with suppress(ZeroDivisionError), contention.beside(2, act):
        while len(found := list(tmp_path.iterdir())) < 2 or min(one.stat().st_size for one in found) < 3:
            assert time.monotonic() < limit
            time.sleep(0.005)
        raise ZeroDivisionError
    copies = [int(one.name) for one in tmp_path.iterdir()]
    assert len(copies) == 2 and os.getpid() not in copies
    assert not any(Path(f"/proc/{one}").exists() for one in copies)


def test_failing_copy_ends_alone_and_silently(capfd):
    ready, told = os.pipe()

    def act() -> None:
        os.write(1, b"in a copy")
        os.write(2, b"in a copy")
        os.write(told, b"x")
        raise ValueError("in a copy")

    with contention.beside(1, act):
        assert os.read(ready, 1) == b"x"
    said = capfd.readouterr()
    assert said.out == said.err == ""


def test_scalers_made_before_and_after_the_first_query_are_listed_in_order():
    first = GradScaler("cpu")
    around = Runtime(own_process=True)
    before = around.scalers()
    second, third = GradScaler("cpu", init_scale=4.0), GradScaler("cpu")
    assert any(one is first for one in before)
    assert [one for one in around.scalers() if one in (first, second, third)] == [first, second, third]
    assert second.get_scale() == 4.0
    del second
    assert [one for one in around.scalers() if one in (first, third)] == [first, third]
    assert Runtime().scalers() == []
