"""Finds the data of the examples: in $STRETTO_DATA, else in the user's cache, else at its public address."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.client
import os
import shlex
import struct
import sys
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 16
TIMEOUT_S = 20.0
"""Seconds without data after which a download is given up."""


class DataError(SystemExit):
    """The data is missing or damaged: ends a script with its text, which is written for the user, and no traceback."""


@dataclass(frozen=True)
class File:
    """A file below a data folder. `sha256` is the hash of its unpacked content, since mirrors pack it differently."""

    name: str
    sha256: str
    addresses: tuple[str, ...]


def _mnist_file(name: str, sha256: str) -> File:
    mirrors = (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    )
    return File(f"mnist/{name}.gz", sha256, tuple(f"{mirror}/{name}.gz" for mirror in mirrors))


TRAIN_IMAGES = _mnist_file(
    "train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
)
TRAIN_LABELS = _mnist_file(
    "train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
)
TEST_IMAGES = _mnist_file("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7")
TEST_LABELS = _mnist_file("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2")
SHAKESPEARE = File(
    "tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)


def mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images (60000, 1, 28, 28) from 0 to 1 and labels (60000,), then 10000 of each for the test."""
    train_x, train_y, test_x, test_y = (
        read_idx(content(file)) for file in (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
    )
    return _scaled(train_x), train_y.long(), _scaled(test_x), test_y.long()


def shakespeare() -> str:
    """Return the text of tiny shakespeare: 1,115,394 characters, 65 distinct."""
    return content(SHAKESPEARE).decode()


def _scaled(images: Tensor) -> Tensor:
    return images.unsqueeze(1).float().div_(255)


def read_idx(raw: bytes) -> Tensor:
    """Return the values of an idx file: 00 00, 08 for bytes, the number of dimensions, each in 32 bits, the values."""
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise DataError(f"this is no idx file of bytes: it begins with {raw[:4].hex(' ')}, expected 00 00 08")
    start = 4 + 4 * raw[3]
    if len(raw) < start:
        raise DataError(f"this idx file is cut off in its head: {len(raw)} bytes")
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[start:]
    if values.numel() != torch.Size(shape).numel():
        raise DataError(f"this idx file holds {values.numel()} values, its head says {shape}")
    return values.view(shape)


def content(file: File) -> bytes:
    """Return the content of a file, unpacked and checked, from the first place that has it.

    Raise DataError if no place has it, or if its content differs from the expected one.
    """
    for path in (folder / file.name for folder in folders()):
        if path.is_file():
            return _of_path(file, path)
    return _fetched(file)


def folders() -> list[Path]:
    """Return the folders that may hold data: $STRETTO_DATA, then the user's cache."""
    given = os.environ.get("STRETTO_DATA")
    return [*([Path(given)] if given else []), cache()]


def cache() -> Path:
    """Return the folder of downloads: $XDG_CACHE_HOME/stretto, or ~/.cache/stretto."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stretto"


def _of_path(file: File, path: Path) -> bytes:
    try:
        return _checked(file, path.read_bytes())
    except ValueError as error:
        raise DataError(
            f"{path} is not what it should be\n"
            f"  got: {error}\n"
            f"  expected: content of sha256 {file.sha256}\n"
            f"  try: remove it, so that it is downloaded again"
        ) from error


def _checked(file: File, raw: bytes) -> bytes:
    """Return the unpacked content; raise ValueError with a description of the actual content if the hash differs."""
    try:
        content = gzip.decompress(raw) if file.name.endswith(".gz") else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{len(raw)} bytes that can't be unpacked ({error})") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise ValueError(f"{len(content)} bytes of sha256 {digest}")
    return content


def _fetched(file: File) -> bytes:
    """Download into the cache; of several processes that need the same file, only one downloads it."""
    path = cache() / file.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            return _of_path(file, path) if path.is_file() else _downloaded(file, path)
    except OSError as error:
        problem = f"{file.name} is not here and can't be kept in {path.parent}: {error.strerror}"
        raise DataError(problem) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _downloaded(file: File, path: Path) -> bytes:
    reasons = []
    for address in file.addresses:
        try:
            raw = _read(address, file.name)
            found = _checked(file, raw)
        except (OSError, ValueError, http.client.HTTPException) as error:
            reasons.append(f"{address} ({getattr(error, 'reason', error)})")
            continue
        _store(path, raw)
        return found
    raise DataError(_not_found(file, reasons))


def _read(address: str, name: str) -> bytes:
    with urllib.request.urlopen(address, timeout=TIMEOUT_S) as response:
        total = int(response.headers.get("Content-Length") or 0)
        raw = bytearray()
        while chunk := response.read(CHUNK_BYTES):
            raw += chunk
            _show(name, len(raw), total, end=False)
    _show(name, len(raw), total, end=True)
    return bytes(raw)


def _show(name: str, done: int, total: int, *, end: bool) -> None:
    """Print the progress: one growing line on a terminal, elsewhere one line at the end."""
    if sys.stderr.isatty() or end:
        of = f" of {total / 1e6:.1f}" if total else ""
        before, after = ("\r", "\n" if end else "") if sys.stderr.isatty() else ("", "\n")
        print(f"{before}downloading {name}: {done / 1e6:.1f}{of} MB", end=after, file=sys.stderr, flush=True)


def _store(path: Path, raw: bytes) -> None:
    """Write a file completely or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(raw)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _not_found(file: File, reasons: list[str]) -> str:
    folder = os.environ.get("STRETTO_DATA")
    places = [f"$STRETTO_DATA ({folder or 'not set'})", str(cache() / file.name), *reasons]
    looked = "\n".join(f"    {place}" for place in places)
    command = f"STRETTO_DATA=FOLDER python {shlex.join(sys.argv)}"
    return (
        f"the data {file.name} is not here and could not be downloaded\n"
        f"  looked in:\n{looked}\n"
        f"  try: {command}    where FOLDER/{file.name} is the file"
    )
