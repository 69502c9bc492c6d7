"""Directory of checkpoints, without tensors: names, manifests with checksums, and removal of old checkpoints.

A checkpoint is a directory `round-00000120` with `state.safetensors` (the tensors that all workers share),
`frozen.safetensors` (those of them that nothing trains, if there are any), `worker-0.safetensors` and so on (the
tensors of one worker) and `manifest.json`: the facts, and size and checksum of every file. The manifest carries its
own checksum. The directory is filled under a temporary name, synced to the disk and then renamed. A file of frozen
tensors with the checksum of the previous one is another name (a hard link) of it, which takes neither time nor room.
A reader verifies all checksums first and falls back to the previous checkpoint if a file is damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import LogError
from stretto.whole_files import sync

FORMAT = 3
MANIFEST, COMMON, FROZEN = "manifest.json", "state.safetensors", "frozen.safetensors"
NAME = re.compile(r"round-([0-9]{8,})(?:-([0-9]+))?", re.ASCII)
"""Name of a checkpoint: its round, and its number among several of the same round."""
TEMPORARY = ".unfinished-"
"""Prefix of directories that are not yet, or no longer, checkpoints."""
OPENING, CLOSING = b'{"blake2b": "%s", "checkpoint": ', b"}\n"
"""Text around the body of a manifest."""
CHECKSUM = 32
"""Length of a checksum in hexadecimal digits."""


KEPT_CHECKPOINTS = 3
"""Default number of checkpoints that are kept."""


class Seal(msgspec.Struct, frozen=True):
    """Size and checksum of a file."""

    bytes: int
    blake2b: str


class Manifest(msgspec.Struct):
    """Content of `manifest.json`."""

    format: int
    number: int
    facts: dict[str, Any]
    own: dict[int, dict[str, Any]]
    files: dict[str, Seal]


msgspec.json.Decoder(Manifest)  # describes the record before any thread converts to it


class DamagedError(Exception):
    """Damaged checkpoint; the text names the file."""


class CheckpointFolder:
    """Checkpoints in a directory, of which the newest `keep` complete ones are kept."""

    def __init__(self, folder: Path, keep: int = KEPT_CHECKPOINTS) -> None:
        self.folder, self.keep = folder, keep
        self._complete: set[Path] = set()

    def publish(self, filled: Path, number: int) -> Path:
        """Make a filled and synced directory the checkpoint of a round, and return its path. Raises OSError."""
        written = self._unused(number)
        filled.rename(written)
        sync(self.folder)
        sync(self.folder.parent)
        self._complete.add(written)
        return written

    def links_frozen(self, seal: Seal, filled: Path) -> bool:
        """Give the file of frozen tensors in a checkpoint another name, in the directory that is being filled.

        Return False if no checkpoint has one with this checksum, or the disk knows no such names.
        """
        for path in self.paths():
            with contextlib.suppress(OSError, DamagedError):
                if read_manifest(path / MANIFEST).files.get(FROZEN) == seal:
                    (filled / FROZEN).hardlink_to(path / FROZEN)
                    return True
        return False

    def highest(self) -> int:
        """Return the round of the newest checkpoint, complete or not; 0 without any."""
        try:
            return max((order(path)[0] for path in self.paths()), default=0)
        except LogError:  # the writer reports it
            return 0

    def last(self) -> int | None:
        """Return the round of the newest complete checkpoint. Checkpoints that this object wrote count as complete."""
        return next((order(path)[0] for path in self.paths() if self._is_complete(path)), None)

    def prune(self) -> None:
        """Remove all that are older than the newest `keep` complete ones. Newer damaged ones stay."""
        complete_count = 0
        for path in self.paths():
            if complete_count < self.keep:
                complete_count += self._is_complete(path)
                continue
            self._complete.discard(path)
            with contextlib.suppress(OSError):
                removed = path.rename(self.temporary())  # renamed first, so that no reader finds a part of it
                shutil.rmtree(removed, ignore_errors=True)

    def older(self) -> Iterator[Path]:
        """Remove those older than the newest complete one, the oldest first, and yield the former path of each."""
        paths = self.paths()
        newest = next((index for index, path in enumerate(paths) if self._is_complete(path)), len(paths))
        for path in reversed(paths[newest + 1 :]):
            self._complete.discard(path)
            with contextlib.suppress(OSError):
                shutil.rmtree(path.rename(self.temporary()))
                yield path

    def paths(self) -> list[Path]:
        """Return the paths with the name of a checkpoint, the newest first."""
        try:
            paths = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LogError(f"the checkpoints in {self.folder} cannot be read: {error.strerror}") from error
        return sorted(paths, key=order, reverse=True)

    def _is_complete(self, path: Path) -> bool:
        if path not in self._complete:
            try:
                checked(path)
            except DamagedError:
                return False
            self._complete.add(path)
        return True

    def missing(self) -> str | None:
        """Return what the newest checkpoint lacks, if all lack something; None if one has all of its bytes.

        Checksums of tensors are not computed.
        """
        lacks = list[str]()
        for path in self.paths():
            try:
                for name, seal in read_manifest(path / MANIFEST).files.items():
                    if (size := (path / name).stat().st_size) != seal.bytes:
                        raise DamagedError(f"{path / name} has {size} bytes of {seal.bytes}")
            except DamagedError as damage:
                lacks.append(str(damage))
            except OSError as error:
                lacks.append(f"{error.filename} cannot be read: {error.strerror}")
            else:
                return None
        return next(iter(lacks), "no checkpoint")

    def temporary(self) -> Path:
        """Return a new path for a directory that is not yet, or no longer, a checkpoint."""
        return self.folder / f"{TEMPORARY}{os.urandom(8).hex()}"

    def _unused(self, number: int) -> Path:
        """Return an unused path for a checkpoint of this round: a second one of the same round ends in -2."""
        occurrence = max((order(path)[1] for path in self.paths() if order(path)[0] == number), default=0) + 1
        return self.folder / name_of(number, occurrence)


def order(path: Path) -> tuple[int, int]:
    """Return the round of a checkpoint, and its number among those of the same round."""
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def name_of(number: int, occurrence: int = 1) -> str:
    """Return the name of a checkpoint.

    >>> name_of(120), name_of(120, 2)
    ('round-00000120', 'round-00000120-2')
    """
    return f"round-{number:08d}" + (f"-{occurrence}" if occurrence > 1 else "")


def worker_file(worker: int) -> str:
    """Return the name of the file with the tensors of a worker."""
    return f"worker-{worker}.safetensors"


def new_digest() -> hashlib.blake2b:
    """Return the digest that checksums are made with."""
    return hashlib.blake2b(digest_size=CHECKSUM // 2)


def sealed(body: bytes) -> bytes:
    """Return the text of a manifest with the checksum of its body."""
    checksum = new_digest()
    checksum.update(body)
    return OPENING % checksum.hexdigest().encode() + body + CLOSING


def checked(path: Path) -> Manifest:
    """Return the manifest of a checkpoint after every byte was verified."""
    manifest = read_manifest(path / MANIFEST)
    for name in (COMMON, *map(worker_file, manifest.own), *({FROZEN} & manifest.files.keys())):
        _check(path / name, manifest.files[name])
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in a file. Raises DamagedError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    body = text[len(OPENING % (b"0" * CHECKSUM)) : -len(CLOSING)]
    intact = sealed(body)
    if text != intact:
        checksum, expected = (
            manifest[OPENING.index(b"%s") :][:CHECKSUM].decode(errors="replace") for manifest in (intact, text)
        )
        raise DamagedError(_differs(path, checksum, expected))
    paths = json.loads(body)
    if paths["format"] != FORMAT:
        raise DamagedError(f"{path} is of format {paths['format']}, and this version reads format {FORMAT}")
    return msgspec.convert(paths, Manifest, strict=False)  # facts may be NaN, which msgspec's JSON has not


def _check(path: Path, seal: Seal) -> None:
    try:
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, new_digest).hexdigest()
            size = file.tell()
    except OSError as error:
        raise DamagedError(f"{path}, whose checksum was {seal.blake2b}, cannot be read: {error.strerror}") from error
    if Seal(size, checksum) != seal:
        sizes = f" ({size} bytes instead of {seal.bytes})" if size != seal.bytes else ""
        raise DamagedError(_differs(path, checksum, seal.blake2b) + sizes)


def _differs(path: Path, paths: str, expected: str) -> str:
    return f"{path} is damaged: its checksum is {paths}, expected {expected or 'one'}"
