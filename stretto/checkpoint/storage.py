"""Checkpoint storage: the state of a run as the files of a checkpoint (`folder.py`), written and read.

One process writes to a directory of checkpoints at a time; others may read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stretto.checkpoint.folder import (
    COMMON,
    FORMAT,
    FROZEN,
    MANIFEST,
    TEMPORARY,
    CheckpointFolder,
    DamagedError,
    Manifest,
    Seal,
    checked,
    new_digest,
    order,
    sealed,
    worker_file,
)
from stretto.transport.tensor_bytes import octets
from stretto.whole_files import sync

Notice = Callable[[str], object]
FilePart = tuple[str, memoryview]
"""Name of a file, and the bytes that come next in it."""
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
    frozen: frozenset[str] = frozenset()
    """Names of tensors that nothing trains, which are stored beside the others."""


def _ignore(text: str) -> None:
    """Do nothing."""


class Checkpoints(CheckpointFolder):
    """Checkpoints in a directory that this process writes to, or reads."""

    def write(self, state: State, number: int) -> Path:
        """Write the state of a round and return its directory once it is synced to the disk. Raises OSError.

        Raises TypeError for facts or tensors that could not be read back unchanged.
        """
        self.folder.mkdir(exist_ok=True)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = self.temporary()
        try:
            temporary.mkdir()
            _fill(temporary, state_parts(state, number, lambda seal: self.links_frozen(seal, temporary)))
            return self.publish(temporary, number)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def newest(self, notice: Notice = _ignore) -> tuple[int, State] | None:
        """Return round and state of the newest complete checkpoint. Damaged ones are skipped with a notice."""
        found = self.find(notice)
        return (order(found[0])[0], found[1]) if found is not None else None

    def find(self, notice: Notice = _ignore) -> tuple[Path, State] | None:
        """Return path and state of the newest complete checkpoint. Damaged ones are skipped with a notice."""
        skipped: set[Path] = set()
        while remaining := [path for path in self.paths() if path not in skipped]:
            skipped.add(remaining[0])
            try:
                return remaining[0], read_checkpoint(remaining[0], checked(remaining[0]))
            except DamagedError as damage:
                if remaining[0].exists():  # not removed by the run that writes here
                    notice(f"{damage}; the checkpoint {remaining[0].name} is skipped")
        return None


# --- writing ---------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a safetensors file and sync it; tensors that share memory are written separately.

    Contiguous tensors on the CPU are not copied. Raises OSError with its errno, which the writer of the safetensors
    package hides, and TypeError for a tensor that the format cannot hold.
    """
    write_synced(path, tensor_chunks(tensors))


def write_synced(path: Path, chunks: Iterable[memoryview]) -> None:
    """Write a new file and sync it. Raises OSError."""
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            _write_all(file, chunk)
        os.fsync(file.fileno())


def tensor_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, room: int = 0
) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file: length of the header, header, tensors one after another.

    `room` is the number of bytes by which the header may grow later, in place.
    """
    head: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in KINDS or tensor.layout != torch.strided or name in head:
            raise TypeError(f"the tensor {name!r} ({tensor.dtype}, {tensor.layout}) has no safetensors type")
        stop = offset + tensor.numel() * tensor.element_size()
        head[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(head).encode()
    text += b" " * (room + -(len(text) + room) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        data = octets(tensor.reshape(()) if tensor.numel() == 1 else tensor).data  # one number: any stride
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def _write_all(file: BinaryIO, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[file.write(chunk) :]


def state_parts(state: State, number: int, is_stored: Callable[[Seal], bool]) -> Iterator[FilePart]:
    """Yield the files of a checkpoint part by part, the manifest last, without frozen tensors that are stored.

    Raises TypeError for facts or tensors that could not be read back unchanged.
    """
    own = {worker: facts for worker, (facts, _) in state.own.items()}
    for facts in (state.facts, *own.values()):
        _check_plain(facts, "facts")
    seals: dict[str, Seal] = {}
    frozen = {name: one for name, one in state.tensors.items() if name in state.frozen}
    files = {COMMON: {name: one for name, one in state.tensors.items() if name not in frozen}}
    files |= {worker_file(worker): tensors for worker, (_, tensors) in state.own.items()}
    if frozen:
        for _ in _sealing(FROZEN, frozen, seals):
            pass
        if not is_stored(seals[FROZEN]):
            yield from _sealing(FROZEN, frozen, seals)
    for name, tensors in files.items():
        yield from _sealing(name, tensors, seals)
    manifest = Manifest(FORMAT, number, state.facts, own, seals)
    yield MANIFEST, memoryview(sealed(json.dumps(msgspec.to_builtins(manifest, str_keys=True)).encode()))


def _sealing(name: str, tensors: Mapping[str, Tensor], seals: dict[str, Seal]) -> Iterator[FilePart]:
    """Yield a file part by part, and note its size and checksum at its end."""
    digest, size = new_digest(), 0
    for chunk in tensor_chunks(tensors):
        digest.update(chunk)
        size += len(chunk)
        yield name, chunk
    seals[name] = Seal(size, digest.hexdigest())


def _fill(folder: Path, parts: Iterable[FilePart]) -> None:
    """Write all files of a checkpoint, and sync the directory."""
    for name, of_file in groupby(parts, key=lambda part: part[0]):
        write_synced(folder / name, (chunk for _, chunk in of_file))
    sync(folder)


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


# --- reading ---------------------------------------------------------------------------------------------------------


def read_checkpoint(path: Path, manifest: Manifest) -> State:
    """Return the state of a checkpoint, whose tensors are in memory-mapped files. Raises DamagedError."""
    try:
        own = {worker: (facts, load_file(path / worker_file(worker))) for worker, facts in manifest.own.items()}
        frozen = load_file(path / FROZEN) if FROZEN in manifest.files else {}
        return State(manifest.facts, load_file(path / COMMON) | frozen, own, frozenset(frozen))
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError for a removed file
        raise DamagedError(f"the tensors in {path} cannot be read: {error}") from error
