"""Readers return what was written, and name the line of a damaged file."""

from __future__ import annotations

import bz2
import gzip
import struct
from pathlib import Path

import pytest
import torch

from experiments.convex.data import evened, read, signs
from stretto.errors import LaunchError

TEXT = """+1 1:0.5 3:-2 # a comment

-1 2:1e-3
+1
-1 4:4
"""
X = [[0.5, 0, -2, 0], [0, 1e-3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 4]]


def write_idx(path: Path, sizes: tuple[int, ...], values: bytes) -> None:
    raw = b"\0\0\x08" + bytes([len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + values
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def test_libsvm_text(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_text(TEXT)
    found = read(path)
    assert found.x.tolist() == X
    assert found.y.tolist() == [1, -1, 1, -1]
    assert found.name == "small"


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_compressed_text(tmp_path: Path, suffix: str, pack: object) -> None:
    path = tmp_path / f"small{suffix}"
    path.write_bytes(pack(TEXT.encode()))  # type: ignore[operator]
    assert read(path).x.tolist() == X


def test_the_first_rows_are_as_features_as_they_need(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_text(TEXT)
    assert read(path, 2).x.shape == (2, 3)
    assert read(path, 100).x.shape == (4, 4)


@pytest.mark.parametrize(
    "line",
    [
        "1 2:1 2:1",
        "1 3:1 2:1",
        "1 0:1",
        "1 -1:1",
        "1 x:1",
        "1 1:",
        "1 1",
        "1:1",
        "one 1:1",
        "1 1:nan",
        "inf 1:1",
        "1 1:2:3",
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "small"
    path.write_text(f"{TEXT}{line}\n")
    with pytest.raises(LaunchError, match=r"line 6 of .*small") as raised:
        read(path)
    assert "expected: lines as" in str(raised.value)


@pytest.mark.parametrize("raw", [b"", b"\n# nothing\n", b"1\n-1\n", b"1 1:1\n\xff\xfe"])
def test_file_without_examples_or_features_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "small"
    path.write_bytes(raw)
    with pytest.raises(LaunchError, match="small"):
        read(path)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="there is no"):
        read(tmp_path / "nothing")
    with pytest.raises(LaunchError, match="holds no idx file"):
        read(tmp_path)
    damaged = tmp_path / "small.gz"
    damaged.write_bytes(gzip.compress(TEXT.encode() * 100)[:-20])
    with pytest.raises(LaunchError, match=r"small.gz can't be read"):
        read(damaged)


def test_data_larger_than_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "features"
    path.write_text("1 2000000000:1\n-1 1:1\n")
    with pytest.raises(LaunchError, match="GiB"):
        read(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files(tmp_path: Path, suffix: str) -> None:
    images = tmp_path / f"train-images-idx3-ubyte{suffix}"
    write_idx(images, (3, 2, 2), bytes(range(0, 120, 10)))
    write_idx(tmp_path / f"train-labels-idx1-ubyte{suffix}", (3,), bytes([7, 0, 4]))
    for path in (images, tmp_path):
        found = read(path, 2)
        assert torch.equal(found.x, torch.tensor([[0, 10, 20, 30], [40, 50, 60, 70]], dtype=torch.float64) / 255)
        assert found.y.tolist() == [7, 0]
    assert signs(read(images), "even").tolist() == [-1, 1, 1]


def test_inconsistent_idx_files_are_refused(tmp_path: Path) -> None:
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    write_idx(images, (3, 2, 2), bytes(12))
    with pytest.raises(LaunchError, match="labels of train-images-idx3-ubyte are missing"):
        read(images)
    write_idx(labels, (2,), bytes(2))
    with pytest.raises(LaunchError, match="3 images and .* 2 labels"):
        read(images)
    write_idx(images, (3, 2, 2), bytes(11))
    with pytest.raises(LaunchError, match="holds 11 values"):
        read(images)
    images.write_bytes(b"\0\0\x08\x03\0")
    with pytest.raises(LaunchError, match="not an idx file"):
        read(images)


def test_two_labels_become_signs(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_text("2 1:1\n5 1:1\n2 1:1\n")
    assert signs(read(path), None).tolist() == [-1, 1, -1]
    with pytest.raises(LaunchError, match="has 1"):
        signs(read(path, 1), None)
    path.write_text("2 1:1\n5 1:1\n3 1:1\n")
    with pytest.raises(LaunchError, match="--labels even"):
        signs(read(path), None)
    with pytest.raises(LaunchError, match="neither even nor odd"):
        evened(torch.tensor([1.5]))
