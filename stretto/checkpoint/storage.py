"""Checkpoints: the state of a run as a folder of files that is there as a whole or not at all.

A checkpoint is a folder `round-00000120` with `state.safetensors` (the tensors that all workers share),
`worker-0.safetensors` and so on (what each has for itself) and `manifest.json`: the facts, and size and checksum of
every file. The manifest carries its own checksum. It is filled under another name, brought to the disk and then
renamed; whoever reads it checks all checksums first and goes back to the previous one when something is damaged.
One process writes to a folder of checkpoints; others may read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import weakref
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
from stretto.strategies.tensor_sync import octets

Notice = Callable[[str], object]
FORMAT = 2
MANIFEST, COMMON = "manifest.json", "state.safetensors"
NAME = re.compile(r"round-([0-9]{8,})(?:-([0-9]+))?", re.ASCII)
"""Of which round, and which of several of the same round."""
TEMPORARY = ".unfinished-"
"""How the names of folders begin that are not checkpoints yet, or no more."""
OPENING, CLOSING = b'{"blake2b": "%s", "checkpoint": ', b"}\n"
"""What stands in a manifest around its body."""
CHECKSUM = 32
"""Letters of a checksum."""
CHUNK_BYTES = 1 << 20
NICENESS = 10
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
"""What safetensors calls the dtypes."""


@dataclass(eq=False)
class State:
    """What a checkpoint holds. Facts are what JSON can hold: dicts with text as keys, lists, text, numbers, None."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]
    own: dict[int, tuple[dict[str, Any], dict[str, Tensor]]] = field(default_factory=dict)
    """What each worker has for itself: its facts and its tensors."""


class Seal(msgspec.Struct, frozen=True):
    """By which a file is known again: its size and its checksum."""

    bytes: int
    blake2b: str


class _Manifest(msgspec.Struct):
    format: int
    number: int
    facts: dict[str, Any]
    own: dict[int, dict[str, Any]]
    files: dict[str, Seal]


class _DamagedError(Exception):
    """A checkpoint that is not whole; the text names the file."""


def _ignore(text: str) -> None:
    """Tell nobody."""


class Checkpoints:
    """The checkpoints in a folder, of which the newest `keep` whole ones are kept."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep
        self._whole: set[Path] = set()

    def write(self, state: State, number: int) -> Path:
        """Write the state of a round, and return its folder once it is safe on the disk. Raises OSError.

        Raises TypeError for facts or tensors that could not be read back as they are.
        """
        self.folder.mkdir(exist_ok=True)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = self._temporary()
        try:
            temporary.mkdir()
            _fill(temporary, state, number)
            written = self._free(number)
            temporary.rename(written)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync(self.folder)
        _sync(self.folder.parent)
        self._whole.add(written)
        return written

    def newest(self, notice: Notice = _ignore) -> tuple[int, State] | None:
        """The newest whole checkpoint: its round and its state. Damaged ones are passed over, and told."""
        passed: set[Path] = set()
        while left := [path for path in self._found() if path not in passed]:
            passed.add(left[0])
            try:
                return _read(left[0])
            except _DamagedError as damage:
                if left[0].exists():  # and was not removed meanwhile by the run that writes here
                    notice(f"{damage}; the checkpoint {left[0].name} is passed over")
        return None

    def highest(self) -> int:
        """The round of the newest, whole or not; 0 when there is none."""
        try:
            return max((_place(path)[0] for path in self._found()), default=0)
        except LogError:  # whoever writes there will say so
            return 0

    def last(self) -> int | None:
        """The round of the newest whole checkpoint. What this object wrote is taken to be whole."""
        return next((_place(path)[0] for path in self._found() if self._is_whole(path)), None)

    def prune(self) -> None:
        """Remove all that are older than the newest `keep` whole ones. Newer ones that are damaged stay."""
        kept = 0
        for path in self._found():
            if kept < self.keep:
                kept += self._is_whole(path)
                continue
            self._whole.discard(path)
            with contextlib.suppress(OSError):
                away = path.rename(self._temporary())  # at once, so that nobody ever finds half of it
                shutil.rmtree(away, ignore_errors=True)

    def older(self) -> Iterator[Path]:
        """Remove those older than the newest whole one, the oldest first, and yield the former path of each."""
        found = self._found()
        newest = next((index for index, path in enumerate(found) if self._is_whole(path)), len(found))
        for path in reversed(found[newest + 1 :]):
            self._whole.discard(path)
            with contextlib.suppress(OSError):
                shutil.rmtree(path.rename(self._temporary()))
                yield path

    def _found(self) -> list[Path]:
        """All that look like checkpoints, the newest first."""
        try:
            found = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LogError(f"the checkpoints in {self.folder} cannot be read: {error.strerror}") from error
        return sorted(found, key=_place, reverse=True)

    def _is_whole(self, path: Path) -> bool:
        if path not in self._whole:
            try:
                _checked(path)
            except _DamagedError:
                return False
            self._whole.add(path)
        return True

    def _temporary(self) -> Path:
        return self.folder / f"{TEMPORARY}{os.urandom(8).hex()}"

    def _free(self, number: int) -> Path:
        """The name for a checkpoint of this round: nothing is written over, the same round comes again as -2, -3."""
        again = max((_place(path)[1] for path in self._found() if _place(path)[0] == number), default=0) + 1
        return self.folder / (f"round-{number:08d}" + (f"-{again}" if again > 1 else ""))


def _place(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Seal:
    """Write tensors as a safetensors file that is safe on the disk, each as if it shared its memory with none.

    One pass that checks, hashes and writes, and no copy of tensors that are on the CPU and contiguous. Raises OSError
    (the package's own writer hides its number), and TypeError for a tensor that the format cannot hold.
    """
    ordered = sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0]))
    digest, size = _digest(), 0
    with path.open("xb", buffering=0) as file:
        for chunk in _chunks(dict(ordered)):
            digest.update(chunk)
            _write_all(file, chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    return Seal(size, digest.hexdigest())


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file: the length of the head, the head, the numbers of one tensor after another."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in KINDS or tensor.layout != torch.strided or name in head:
            raise TypeError(f"the tensor {name!r} ({tensor.dtype}, {tensor.layout}) fits no safetensors file")
        stop = at + tensor.numel() * tensor.element_size()
        head[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        whole = octets(tensor.reshape(()) if tensor.numel() == 1 else tensor).data  # one number may have any stride
        for start in range(0, len(whole), CHUNK_BYTES):
            yield whole[start : start + CHUNK_BYTES]


def _write_all(file: BinaryIO, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[file.write(chunk) :]


def _fill(folder: Path, state: State, number: int) -> None:
    """Write all files of a checkpoint, the manifest last, and bring the folder to the disk."""
    own = {worker: facts for worker, (facts, _) in state.own.items()}
    for facts in (state.facts, *own.values()):
        _check_plain(facts, "facts")
    files = {COMMON: write_tensors(folder / COMMON, state.tensors)}
    for worker, (_, tensors) in state.own.items():
        files[_own(worker)] = write_tensors(folder / _own(worker), tensors)
    manifest = _Manifest(FORMAT, number, state.facts, own, files)
    body = json.dumps(msgspec.to_builtins(manifest, str_keys=True)).encode()
    with (folder / MANIFEST).open("xb", buffering=0) as file:
        _write_all(file, memoryview(_sealed(body)))
        os.fsync(file.fileno())
    _sync(folder)


def _own(worker: int) -> str:
    return f"worker-{worker}.safetensors"


def _check_plain(fact: object, where: str) -> None:
    """Raise TypeError for what JSON would not give back as it was."""
    if isinstance(fact, dict) and all(isinstance(key, str) for key in fact):
        for key, value in fact.items():
            _check_plain(value, f"{where}/{key}")
    elif isinstance(fact, list):
        for value in fact:
            _check_plain(value, where)
    elif not (fact is None or isinstance(fact, str | int | float)):
        raise TypeError(
            f"{where} of a checkpoint cannot be {fact!r}: a {type(fact).__name__} does not come back as such"
        )


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=CHECKSUM // 2)


def _sealed(body: bytes) -> bytes:
    """The text of a manifest with the checksum of its body."""
    checksum = _digest()
    checksum.update(body)
    return OPENING % checksum.hexdigest().encode() + body + CLOSING


# --- reading ---------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[int, State]:
    """A checkpoint's round and state. Raises _DamagedError unless it is whole."""
    manifest = _checked(path)
    try:
        own = {worker: (facts, load_file(path / _own(worker))) for worker, facts in manifest.own.items()}
        return manifest.number, State(manifest.facts, load_file(path / COMMON), own)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch says so when a file is not there any more
        raise _DamagedError(f"the tensors in {path} cannot be read: {error}") from error


def _checked(path: Path) -> _Manifest:
    """The manifest of a checkpoint of which every byte was checked."""
    manifest = _manifest(path / MANIFEST)
    for name in (COMMON, *map(_own, manifest.own)):
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
        checksum, told = (one[OPENING.index(b"%s") :][:CHECKSUM].decode(errors="replace") for one in (sealed, text))
        raise _DamagedError(_differs(path, checksum, told))
    found = json.loads(body)
    if found["format"] != FORMAT:
        raise _DamagedError(f"{path} is of format {found['format']}, and this version reads format {FORMAT}")
    return msgspec.convert(found, _Manifest, strict=False)


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


def _differs(path: Path, found: str, told: str) -> str:
    return f"{path} is damaged: its checksum is {found}, and it should be {told or 'there'}"


# --- in the background -----------------------------------------------------------------------------------------------


class Snapshots:
    """Copies of tensors in memory that is used again, so that a snapshot is one copy and no allocation.

    Two copies of each tensor are kept. A copy that was handed out stays as it is for as long as somebody holds that
    very tensor (a view of it is not enough); with both in use a snapshot takes new memory, which is not kept.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[Tensor, weakref.ref[Tensor]]]] = {}

    @torch.no_grad()
    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, on the CPU."""
        return {name: self._place(name, one).copy_(one) for name, one in tensors.items()}

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        """Memory for a tensor that nobody is looking at."""
        kept = [one for one in self._kept.get(name, ()) if _alike(one[0], tensor)]
        free = next((one for one in kept if one[1]() is None), None)
        memory = free[0] if free is not None else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        handed = memory.detach()
        kept = [one for one in kept if one is not free]
        self._kept[name] = [*kept, (memory, weakref.ref(handed))] if len(kept) < 2 else kept
        return handed


def _alike(memory: Tensor, tensor: Tensor) -> bool:
    return memory.shape == tensor.shape and memory.dtype == tensor.dtype


class BackgroundWriter:
    """Writes checkpoints in a thread: one is under way, one waits, and a newer one replaces the one that waits.

    A disk that does not take a checkpoint never stops training: that is told once, and once more when it works again.
    `notice` is called in the writer's thread; when it raises, the same is told again at the next failure.
    """

    def __init__(self, checkpoints: Checkpoints, notice: Notice) -> None:
        self._checkpoints, self._notice = checkpoints, notice
        self._turn = threading.Condition()
        self._waiting: tuple[State, int] | None = None
        self._busy = self._closed = self._failing = False
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, state: State, number: int) -> None:
        """Have the state of a round written. It is not copied: nobody may change it any more."""
        with self._turn:
            if self._closed:
                raise RuntimeError("the writer of checkpoints is closed")
            self._waiting = state, number
            self._turn.notify_all()

    def settle(self, limit_s: float) -> bool:
        """Wait for what was submitted. Returns whether all of it was gone through in time."""
        with self._turn:
            return self._turn.wait_for(lambda: self._waiting is None and not self._busy, limit_s)

    def close(self, limit_s: float) -> bool:
        """Take no more, and settle."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        return self.settle(limit_s)

    def _work(self) -> None:
        _step_back()
        while self._wanted():
            self._write()
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _wanted(self) -> bool:
        """Wait for a state; False when none will come any more."""
        with self._turn:
            self._turn.wait_for(lambda: self._waiting is not None or self._closed)
            self._busy = self._waiting is not None
            return self._busy

    def _write(self) -> None:
        """Write what waits. Nothing of it is held afterwards."""
        with self._turn:
            assert self._waiting is not None
            (state, number), self._waiting = self._waiting, None
        try:
            self._checkpoints.write(state, number)
            self._checkpoints.prune()
        except Exception as error:
            self._failed(error)
        else:
            self._worked(number)

    def _failed(self, error: Exception) -> None:
        if self._failing:
            return
        why = (error.strerror if isinstance(error, OSError) else None) or error
        self._failing = self._told(f"the checkpoint could not be written: {why}; training goes on; {self._last()}")

    def _worked(self, number: int) -> None:
        if self._failing:
            self._failing = not self._told(f"checkpoints are written again: that of round {number} is whole")

    def _last(self) -> str:
        try:
            last = self._checkpoints.last()
        except LogError as error:
            return str(error)
        return f"the last whole one is round {last}" if last is not None else "there is no whole one yet"

    def _told(self, text: str) -> bool:
        """Whether the notice was taken; a log on the same full disk may not take it."""
        with contextlib.suppress(Exception):
            self._notice(text)
            return True
        return False


def _step_back() -> None:
    """Let training go first: on Linux each thread has its own niceness."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
