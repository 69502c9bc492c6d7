"""Choice of kernels for a tensor, and the notice when native kernels are missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stretto import kernels
from stretto.errors import StrettoError
from stretto.kernels import reference

NATIVE = pytest.mark.skipif(kernels.why_not_native() is not None, reason="no native kernels")
FLAT = torch.ones(8)


@NATIVE
def test_float32_on_the_cpu_uses_the_native_kernels():
    from stretto.kernels import native

    assert kernels.on(FLAT) is kernels.on(torch.empty(0)) is native


@pytest.mark.parametrize("tensor", [FLAT.double(), FLAT.bfloat16(), FLAT[::2], FLAT.to("meta")])
def test_other_tensors_use_the_reference(tensor: torch.Tensor):
    assert kernels.on(tensor) is reference


def test_the_reference_can_be_selected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STRETTO_KERNELS", "reference")
    assert kernels.on(FLAT) is reference


def test_other_kernels_can_not_be_selected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STRETTO_KERNELS", "fast")
    with pytest.raises(StrettoError, match="got: fast"):
        kernels.on(FLAT)


@NATIVE
def test_all_kernels_have_the_same_functions():
    from stretto.kernels import native

    assert {name for name in reference.__all__ if name != "noise"} <= set(vars(native))


def sources(folder: Path) -> Path:
    for one in [*kernels.HOUSE.glob("*.cpp"), *kernels.HOUSE.glob("*.hpp")]:
        shutil.copy(one, folder)
    return folder


@NATIVE
def test_kernels_are_known_by_their_source(tmp_path: Path):
    assert kernels.why_not_native(sources(tmp_path)) is None
    (tmp_path / "select.cpp").write_text("// changed\n")
    assert "older than their source" in (kernels.why_not_native(tmp_path) or "")


@NATIVE
def test_without_sources_nothing_is_compared(tmp_path: Path):
    assert kernels.digest(tmp_path) is None
    assert kernels.why_not_native(tmp_path) is None


def test_kernels_that_can_not_be_loaded_are_reported(monkeypatch: pytest.MonkeyPatch):
    def broken(name: str) -> SimpleNamespace:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(kernels, "import_module", broken)
    assert kernels.why_not_native() == "they can't be loaded (undefined symbol)"


USED_TWICE = """
import sys
sys.modules["stretto.kernels._native"] = None
import torch
from stretto import kernels
print([kernels.on(torch.ones(2)).__name__ for _ in range(2)])
"""


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_without_native_kernels_the_reference_is_used_with_a_notice(rank: str, lines: int):
    run = [sys.executable, "-W", "error", "-c", USED_TWICE]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=150, env={"RANK": rank})
    assert ended.stdout.strip() == "['stretto.kernels.reference', 'stretto.kernels.reference']"
    assert ended.stderr.count("stretto: without native kernels: they are not built.") == lines
    assert len(ended.stderr.splitlines()) == lines
