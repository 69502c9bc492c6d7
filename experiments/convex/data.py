"""Readers of data sets: text files in the LIBSVM format, and MNIST's idx files of images and labels."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Literal, cast

import torch
from torch import Tensor

from stretto.errors import LaunchError, mistyped

Labels = Literal["even"]
LARGEST_GIB = 4
BYTES_A_NUMBER = 8
PACKED: dict[str, Callable[..., object]] = {".gz": gzip.open, ".bz2": bz2.open}
IDX_OF_BYTES = b"\0\0\x08"
IMAGES, LABELS = ("images", "idx3"), ("labels", "idx1")
DAMAGED = (OSError, EOFError, zlib.error)


@dataclass(frozen=True, eq=False)
class Data:
    """Name of a data set, its examples `x` (n, d) and labels `y` (n,), in float64."""

    name: str
    x: Tensor
    y: Tensor


def read(path: Path, rows: int | None = None) -> Data:
    """Return the first `rows` examples of a file, or all of them, in the order of the file.

    A LIBSVM text file (a line is `label index:value ...`, indices ascending from 1; `.gz` and `.bz2` are unpacked), or
    MNIST's idx files: their folder, or the file of images, with the labels beside it. Pixels are divided
    by 255. There are as many features as the largest index in those rows. Raises LaunchError with the line's number.
    """
    if rows is not None and rows < 1:
        raise mistyped(f"the number of rows can't be {rows}", rows, "a whole number, at least 1", "--rows 5000")
    images = _images(path)
    return _idx(images, rows) if images else _libsvm(path, rows)


def _images(path: Path) -> Path | None:
    """Return the file of images that a path names, or None for a LIBSVM file."""
    if not path.exists():
        raise mistyped(
            f"there is no {path}",
            path,
            "a LIBSVM text file, or MNIST's idx files",
            "python -m experiments convex path/to/a9a",
        )
    if path.is_file():
        return path if _head(path) == IDX_OF_BYTES else None
    found = [one for one in sorted(path.iterdir()) if all(word in one.name for word in IMAGES)]
    if not found:
        problem, expected = f"the folder {path} holds no idx file of images", "train-images-idx3-ubyte, or its .gz"
        raise mistyped(
            problem, path, expected, "python -m experiments convex path/to/a9a, or a folder with MNIST's files"
        )
    return next((one for one in found if "train" in one.name), found[0])


def _head(path: Path) -> bytes:
    with _opened(path) as file:
        return file.read(3)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with _unpacked(path) as file:
            yield file
    except DAMAGED as error:
        text = getattr(error, "strerror", None) or error
        raise LaunchError(f"{path} can't be read: {text}") from error


def _unpacked(path: Path) -> IO[bytes]:
    if path.suffix in PACKED:
        return cast("IO[bytes]", PACKED[path.suffix](path, "rb"))
    return path.open("rb")


# LIBSVM's text


def _libsvm(path: Path, rows: int | None) -> Data:
    labels: list[float] = []
    rows_at: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    with _opened(path) as file:
        for number, line in islice(_examples(path, file), rows):
            (_, label), *entries = _fields(path, number, line)
            rows_at += [len(labels)] * len(entries)
            columns += [index - 1 for index, _ in entries]
            values += [value for _, value in entries]
            labels.append(label)
    features = max(columns, default=-1) + 1
    if not labels or not features:
        what = "example" if not labels else "feature"
        raise mistyped(f"{path} holds no {what}", path, LINE, "python -m experiments convex path/to/a9a")
    _check_size(len(labels), features)
    x = torch.zeros(len(labels), features, dtype=torch.float64)
    x[rows_at, columns] = torch.tensor(values, dtype=torch.float64)
    return Data(path.name, x, torch.tensor(labels, dtype=torch.float64))


LINE = "lines as `-1 3:1 11:0.5`: a label, then index:value with indices ascending from 1"


def _examples(path: Path, file: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    """Yield the lines that hold an example, with their numbers."""
    for number, raw in enumerate(file, start=1):
        try:
            line = raw.decode().partition("#")[0].strip()
        except UnicodeDecodeError:
            raise mistyped(
                f"{path} is not text, in line {number}",
                repr(raw[:20]),
                LINE,
                "python -m experiments convex path/to/a9a",
            ) from None
        if line:
            yield number, line


def _fields(path: Path, number: int, line: str) -> list[tuple[int, float]]:
    """Return the label, with index 0, and the entries of a line."""
    fields: list[tuple[int, float]] = []
    before = -1
    for word in line.split():
        index, colon, value = word.rpartition(":")
        with contextlib.suppress(ValueError):
            found = (int(index) if colon else 0, float(value))
            if found[0] > before and bool(colon) == bool(fields) and math.isfinite(found[1]):
                fields.append(found)
                before = found[0]
                continue
        problem = f"line {number} of {path} is not in the LIBSVM format"
        raise mistyped(problem, f"{word[:40]!r} in {line[:60]!r}", LINE, f"sed -n {number}p {path}")
    return fields


def _check_size(rows: int, features: int) -> None:
    size = rows * features * BYTES_A_NUMBER / 2**30
    if size > LARGEST_GIB:
        fewer = max(1, int(rows * LARGEST_GIB / size))
        problem = f"{rows} rows of {features} features take {size:.1f} GiB of memory"
        raise mistyped(problem, f"{rows} x {features}", f"at most {LARGEST_GIB} GiB", f"--rows {fewer}")


# MNIST's idx files


def _idx(images: Path, rows: int | None) -> Data:
    for one in IMAGES:
        if one not in images.name:
            problem, expected = f"{images} is not named like MNIST's files", "a name with images-idx3"
            raise mistyped(problem, images.name, expected, "python -m experiments convex train-images-idx3-ubyte.gz")
    labels = images.with_name(images.name.replace(IMAGES[0], LABELS[0]).replace(IMAGES[1], LABELS[1]))
    if not labels.exists():
        plain = labels.with_suffix("") if labels.suffix in PACKED else labels.with_name(f"{labels.name}.gz")
        if not plain.exists():
            raise mistyped(
                f"the labels of {images.name} are missing", f"no {labels}", "a file beside it", f"ls {images.parent}"
            )
        labels = plain
    x, y = _values(images, rows), _values(labels, rows)
    if len(x) != len(y):
        raise LaunchError(f"{images} has {len(x)} images and {labels} {len(y)} labels")
    _check_size(len(x), x[0].numel())
    return Data(images.parent.name or images.name, x.flatten(1).double().div_(255), y.double())


def _values(path: Path, rows: int | None) -> Tensor:
    """Return the first rows of an idx file: 00 00, 08 for bytes, dimensions (32 bits each), values."""
    with _opened(path) as file:
        head = file.read(4)
        dimensions = head[3] if len(head) == 4 and head[:3] == IDX_OF_BYTES else 0
        sizes = file.read(4 * dimensions)
        if not dimensions or len(sizes) < 4 * dimensions:
            raise LaunchError(f"{path} is not an idx file of bytes: it starts with {head.hex(' ')}")
        first, *others = struct.unpack(f">{dimensions}I", sizes)
        count = first if rows is None else min(rows, first)
        wanted = count * math.prod(others)
        _check_size(count, math.prod(others))
        raw = file.read(wanted)
    if len(raw) < wanted or not wanted:
        raise LaunchError(f"{path} holds {len(raw)} values, its header says {wanted} for {count} rows")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(count, *others)


# Labels


def signs(data: Data, labels: Labels | None) -> Tensor:
    """Return the labels as +1 and -1: +1 for the larger of two labels, or with "even" for even ones."""
    y = evened(data.y) if labels else data.y
    found = torch.unique(y)
    if len(found) == 2:
        return torch.where(y == found[1], 1.0, -1.0).double()
    shown = ", ".join(f"{one:g}" for one in found[:10].tolist()) + (", ..." if len(found) > 10 else "")
    problem = f"logistic regression needs two classes, {data.name} has {len(found)}"
    to_type = "--labels even" if len(found) > 2 else "leave --labels away" if labels else "more --rows"
    raise mistyped(problem, f"the labels {shown}", "labels of two kinds", to_type)


def evened(y: Tensor) -> Tensor:
    """Return +1 for even labels and -1 for odd ones."""
    if bool((y != y.round()).any()):
        wrong = float(y[y != y.round()][0])
        raise mistyped(
            "a label that is not a whole number is neither even nor odd", wrong, "whole numbers", "leave --labels away"
        )
    return torch.where(y % 2 == 0, 1.0, -1.0).double()
