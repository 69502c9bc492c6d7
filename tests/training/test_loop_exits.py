"""Ways out of loops, found in their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.training.loop_exits import has_way_out, is_repeated_by_range

WHOLE = [
    "for x, y in loader:\n    train(x, y)",
    "for i, (x, y) in enumerate(self.loader, 1):\n    train(x, y)",
    "for x in loader:\n    for y in x:\n        if y: break\n    while True: break",
    "for x in loader:\n    if x: continue\n    def inner():\n        return 1",
    "for x in loader:\n    train(x)\nelse:\n    raise ValueError",
]
LEFT = [
    "for x, y in loader:\n    if step >= limit: break",
    "for x in enumerate(loader):\n    with a:\n        if x: return",
    "for x in loader:\n    yield x",
    "for x in loader:\n    raise ValueError",
    "for x in loader:\n    if x: sys.exit(0)",
    "for x in loader:\n    for y in x:\n        pass\n    else:\n        break",
    "for x in zip(range(10), loader):\n    train(x)",
    "for x in islice(loader, 10):\n    train(x)",
    "try:\n    for x in loader: train(x)\nexcept Done: pass",
    "x = [one for one in loader]",
    "x = next(iter(loader))",
    "for x in loader: print(y for y in loader)\nfor",
]


@pytest.mark.parametrize(("source", "leaves"), [*((one, False) for one in WHOLE), *((one, True) for one in LEFT)])
def test_loops_that_may_end_before_their_last_batch_are_known_by_their_source(
    source: str, leaves: bool, tmp_path: Path
) -> None:
    (file := tmp_path / "script.py").write_text(source)
    line = next(number for number, one in enumerate(source.splitlines(), 1) if "loader" in one)
    assert has_way_out((str(file), line)) is leaves


def test_a_loop_without_a_source_may_end_anywhere() -> None:
    assert has_way_out(None)
    assert has_way_out(("<string>", 1))


@pytest.mark.parametrize(
    ("around", "ends"),
    [
        ("for epoch in range(3):\n", True),
        ("for epoch in tqdm(range(3)):\n", True),
        ("while step < limit:\n", False),
        ("for epoch in count():\n", False),
        ("for epoch in range(3):\n  while step < limit:\n", False),
        ("if True:\n", False),
    ],
)
def test_a_loop_over_epochs_that_ends_without_a_batch_is_known_by_its_range(
    around: str, ends: bool, tmp_path: Path
) -> None:
    (file := tmp_path / "script.py").write_text(f"{around}    for x in loader:\n        train(x)")
    assert is_repeated_by_range((str(file), 1 + around.count("\n"))) is ends
