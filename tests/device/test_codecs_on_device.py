"""Every codec on the second device: means and residuals have the bits of the CPU's reference, and are on the device."""

from __future__ import annotations

import pytest
from child_process import call
from training.test_fewer_bytes import CODECS


def test_codecs_have_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_KERNELS", "reference")
    assert call("device_codecs", "differing", ["exact()", *CODECS]) == []
