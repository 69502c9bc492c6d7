"""Random numbers follow from the run's seed and from the script's own seed."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from run_place import Place

from stretto.launcher.seeding import after_import

DRAWS = """
import json, random, sys
assert "torch" not in sys.modules and "numpy" not in sys.modules, "imported before the script could set anything"
import numpy as np
import torch
def draw():
    return [random.random(), np.random.rand(), torch.rand(1).item()]
draws = [draw()]
random.seed(40), np.random.seed(seed=40), torch.manual_seed(40)
draws.append(draw())
json.dump(draws, open("draws.json", "w"))
"""


def expected(seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return [
        random.Random(seed).random(),
        float(np.random.RandomState(seed).rand()),
        torch.rand(1, generator=generator).item(),
    ]


def test_unseeded_generators_are_seeded_and_seeds_of_the_script_are_shifted(place: Place) -> None:
    place.run(DRAWS, seed=2)
    assert json.loads(Path("draws.json").read_text()) == [expected(2), expected(42)]


def test_seed_0_keeps_the_seeds_of_the_script(place: Place) -> None:
    text = "import random; print(random.random()); random.seed(40); print(random.random(), random.seed.__module__)"
    log = (place.run(text) / "worker-0.log").read_text().split()
    assert log == [str(random.Random(0).random()), str(random.Random(40).random()), str(random.seed.__module__)]


@pytest.mark.parametrize("given", ["text", b"bytes", 0.5])
def test_seed_that_is_not_a_number_is_shifted_too(given: object) -> None:
    from stretto.launcher.seeding import _shifted_any

    draws = [random.Random(_shifted_any(given, seed)).random() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert _shifted_any(None, 3) is None


def test_several_hooks_run_after_a_later_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "comes_later.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    for number in range(3):
        after_import("comes_later", lambda module, number=number: seen.append((number, module.value)))
    assert importlib.import_module("comes_later").value == 3
    assert sorted(seen) == [(0, 3), (1, 3), (2, 3)]
    after_import("comes_later", lambda module: seen.append(module.value))
    assert seen[3:] == [3]
