"""Checkpoint storage: the state of a run as a directory that exists completely or not at all.

A checkpoint is a directory `round-00000120` with `state.safetensors` (the tensors that all workers share),
`worker-0.safetensors` and so on (the tensors of one worker) and `manifest.json`: the facts, and size and checksum of
every file. The manifest carries its own checksum. The directory is filled under a temporary name, synced to the disk
and then renamed. A reader verifies all checksums first and falls back to the previous checkpoint if a file is damaged.
One process writes to a directory of checkpoints; others may read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stretto.errors import LogError
from stretto.transport.tensor_bytes import octets
from stretto.whole_files import sync

Notice = Callable[[str], object]
FORMAT = 3
MANIFEST, COMMON = "manifest.json", "state.safetensors"
NAME = re.compile(r"round-([0-9]{8,})(?:-([0-9]+))?", re.ASCII)
"""Name of a checkpoint: its round, and its number among several of the same round."""
TEMPORARY = ".unfinished-"
"""Prefix of directories that are not yet, or no longer, checkpoints."""
OPENING, CLOSING = b'{"blake2b": "%s", "checkpoint": ', b"}\n"
"""Text around the body of a manifest."""
CHECKSUM = 32
"""Length of a checksum in hexadecimal digits."""
CHUNK_BYTES = 1 << 20
KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the dtypes in safetensors files."""


@dataclass(eq=False)
class State:
    """State that a checkpoint holds. Facts are JSON values: dicts with text as keys, lists, text, numbers, None."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]
    own: dict[int, tuple[dict[str, Any], dict[str, Tensor]]] = field(default_factory=dict)
    """Facts and tensors of each worker."""


class Seal(msgspec.Struct, frozen=True):
    """Size and checksum of a file."""

    bytes: int
    blake2b: str


class _Manifest(msgspec.Struct):
    format: int
    number: int
    facts: dict[str, Any]
    own: dict[int, dict[str, Any]]
    files: dict[str, Seal]


class _DamagedError(Exception):
    """Damaged checkpoint; the text names the file."""


def _ignore(text: str) -> None:
    """Do nothing."""


class Checkpoints:
    """Checkpoints in a directory, of which the newest `keep` complete ones are kept."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep
        self._complete: set[Path] = set()

    def write(self, state: State, number: int) -> Path:
        """Write the state of a round and return its directory once it is synced to the disk. Raises OSError.

        Raises TypeError for facts or tensors that could not be read back unchanged.
        """
        self.folder.mkdir(exist_ok=True)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = self._temporary()
        try:
            temporary.mkdir()
            _fill(temporary, state, number)
            written = self._unused(number)
            temporary.rename(written)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(self.folder)
        sync(self.folder.parent)
        self._complete.add(written)
        return written

    def newest(self, notice: Notice = _ignore) -> tuple[int, State] | None:
        """Return round and state of the newest complete checkpoint. Damaged ones are skipped with a notice."""
        skipped: set[Path] = set()
        while remaining := [path for path in self._paths() if path not in skipped]:
            skipped.add(remaining[0])
            try:
                return _read(remaining[0])
            except _DamagedError as damage:
                if remaining[0].exists():  # not removed by the run that writes here
                    notice(f"{damage}; the checkpoint {remaining[0].name} is skipped")
        return None

    def highest(self) -> int:
        """Return the round of the newest checkpoint, complete or not; 0 without any."""
        try:
            return max((_order(path)[0] for path in self._paths()), default=0)
        except LogError:  # the writer reports it
            return 0

    def last(self) -> int | None:
        """Return the round of the newest complete checkpoint. Those that this object wrote are taken as complete."""
        return next((_order(path)[0] for path in self._paths() if self._is_complete(path)), None)

    def prune(self) -> None:
        """Remove all that are older than the newest `keep` complete ones. Newer damaged ones stay."""
        complete_count = 0
        for path in self._paths():
            if complete_count < self.keep:
                complete_count += self._is_complete(path)
                continue
            self._complete.discard(path)
            with contextlib.suppress(OSError):
                removed = path.rename(self._temporary())  # renamed first, so that no reader finds a part of it
                shutil.rmtree(removed, ignore_errors=True)

    def older(self) -> Iterator[Path]:
        """Remove those older than the newest complete one, the oldest first, and yield the former path of each."""
        paths = self._paths()
        newest = next((index for index, path in enumerate(paths) if self._is_complete(path)), len(paths))
        for path in reversed(paths[newest + 1 :]):
            self._complete.discard(path)
            with contextlib.suppress(OSError):
                shutil.rmtree(path.rename(self._temporary()))
                yield path

    def _paths(self) -> list[Path]:
        """Return the paths with the name of a checkpoint, the newest first."""
        try:
            paths = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LogError(f"the checkpoints in {self.folder} cannot be read: {error.strerror}") from error
        return sorted(paths, key=_order, reverse=True)

    def _is_complete(self, path: Path) -> bool:
        if path not in self._complete:
            try:
                _checked(path)
            except _DamagedError:
                return False
            self._complete.add(path)
        return True

    def _temporary(self) -> Path:
        return self.folder / f"{TEMPORARY}{os.urandom(8).hex()}"

    def _unused(self, number: int) -> Path:
        """Return an unused path for a checkpoint of this round: a second one of the same round ends in -2."""
        occurrence = max((_order(path)[1] for path in self._paths() if _order(path)[0] == number), default=0) + 1
        return self.folder / (f"round-{number:08d}" + (f"-{occurrence}" if occurrence > 1 else ""))


def _order(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Seal:
    """Write tensors as a safetensors file and sync it; tensors that share memory are written separately.

    One pass hashes and writes, without a copy of contiguous tensors on the CPU. Raises OSError with its errno, which
    the writer of the safetensors package hides, and TypeError for a tensor that the format cannot hold.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    digest, size = _digest(), 0
    with path.open("xb", buffering=0) as file:
        for chunk in _chunks(dict(ordered)):
            digest.update(chunk)
            _write_all(file, chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    return Seal(size, digest.hexdigest())


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file: length of the header, header, tensors one after another."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in KINDS or tensor.layout != torch.strided or name in head:
            raise TypeError(f"the tensor {name!r} ({tensor.dtype}, {tensor.layout}) has no safetensors type")
        stop = offset + tensor.numel() * tensor.element_size()
        head[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        data = octets(tensor.reshape(()) if tensor.numel() == 1 else tensor).data  # one number: any stride
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def _write_all(file: BinaryIO, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[file.write(chunk) :]


def _fill(folder: Path, state: State, number: int) -> None:
    """Write all files of a checkpoint, the manifest last, and sync the directory."""
    own = {worker: facts for worker, (facts, _) in state.own.items()}
    for facts in (state.facts, *own.values()):
        _check_plain(facts, "facts")
    files = {COMMON: write_tensors(folder / COMMON, state.tensors)}
    for worker, (_, tensors) in state.own.items():
        files[_worker_file(worker)] = write_tensors(folder / _worker_file(worker), tensors)
    manifest = _Manifest(FORMAT, number, state.facts, own, files)
    body = json.dumps(msgspec.to_builtins(manifest, str_keys=True)).encode()
    with (folder / MANIFEST).open("xb", buffering=0) as file:
        _write_all(file, memoryview(_sealed(body)))
        os.fsync(file.fileno())
    sync(folder)


def _worker_file(worker: int) -> str:
    return f"worker-{worker}.safetensors"


def _check_plain(fact: object, path: str) -> None:
    """Raise TypeError for values that JSON would not return unchanged."""
    if isinstance(fact, dict) and all(isinstance(key, str) for key in fact):
        for key, value in fact.items():
            _check_plain(value, f"{path}/{key}")
    elif isinstance(fact, list):
        for value in fact:
            _check_plain(value, path)
    elif not (fact is None or isinstance(fact, str | int | float)):
        raise TypeError(
            f"{path} of a checkpoint cannot be {fact!r}: a {type(fact).__name__} cannot be read back as such"
        )


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=CHECKSUM // 2)


def _sealed(body: bytes) -> bytes:
    """Return the text of a manifest with the checksum of its body."""
    checksum = _digest()
    checksum.update(body)
    return OPENING % checksum.hexdigest().encode() + body + CLOSING


# --- reading ---------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[int, State]:
    """Return round and state of a checkpoint. Raises _DamagedError if it is damaged."""
    manifest = _checked(path)
    try:
        own = {worker: (facts, load_file(path / _worker_file(worker))) for worker, facts in manifest.own.items()}
        return manifest.number, State(manifest.facts, load_file(path / COMMON), own)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError for a removed file
        raise _DamagedError(f"the tensors in {path} cannot be read: {error}") from error


def _checked(path: Path) -> _Manifest:
    """Return the manifest of a checkpoint after every byte was verified."""
    manifest = _manifest(path / MANIFEST)
    for name in (COMMON, *map(_worker_file, manifest.own)):
        _check(path / name, manifest.files[name])
    return manifest


def _manifest(path: Path) -> _Manifest:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise _DamagedError(f"{path} cannot be read: {error.strerror}") from error
    body = text[len(OPENING % (b"0" * CHECKSUM)) : -len(CLOSING)]
    sealed = _sealed(body)
    if text != sealed:
        checksum, expected = (
            manifest[OPENING.index(b"%s") :][:CHECKSUM].decode(errors="replace") for manifest in (sealed, text)
        )
        raise _DamagedError(_differs(path, checksum, expected))
    paths = json.loads(body)
    if paths["format"] != FORMAT:
        raise _DamagedError(f"{path} is of format {paths['format']}, and this version reads format {FORMAT}")
    return msgspec.convert(paths, _Manifest, strict=False)


def _check(path: Path, seal: Seal) -> None:
    try:
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, _digest).hexdigest()
            size = file.tell()
    except OSError as error:
        raise _DamagedError(f"{path}, whose checksum was {seal.blake2b}, cannot be read: {error.strerror}") from error
    if Seal(size, checksum) != seal:
        sizes = f" ({size} bytes instead of {seal.bytes})" if size != seal.bytes else ""
        raise _DamagedError(_differs(path, checksum, seal.blake2b) + sizes)


def _differs(path: Path, paths: str, expected: str) -> str:
    return f"{path} is damaged: its checksum is {paths}, expected {expected or 'one'}"
