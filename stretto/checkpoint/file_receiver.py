"""The coordinator's side of files that workers send: whole files, and whole checkpoints, in the run directory.

Parts are written when they arrive, so the coordinator keeps none in memory. Whatever takes longer is done in threads:
the replies to members do not wait for a disk that is synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from stretto.checkpoint.file_messages import (
    CHECKPOINTS_FOUND,
    CONTENT,
    READ_BYTES,
    UNKNOWN,
    Answer,
    BeginSection,
    Call,
    CheckpointFile,
    CheckpointOf,
    DataOf,
    FileOf,
    HighestRound,
    ListCheckpoints,
    Part,
    Publish,
    ReadFile,
    Received,
    RemoveOlder,
    RemoveResidual,
    Request,
    Sender,
    checkpoint_folder,
    sender_of,
)
from stretto.checkpoint.folder import FROZEN, MANIFEST, CheckpointFolder, checked, name_of, order, read_manifest
from stretto.errors import LogError
from stretto.run_dir import read_run, section_folder, section_folders, write_section
from stretto.whole_files import RESERVE_BYTES, free_bytes, sync

INCOMING = ".incoming"
"""Name of the folder of incomplete uploads in the run directory."""
LARGEST_BYTES = {MANIFEST: 1 << 28}
"""Largest size of a file by its name; of others it is `LARGEST`."""
LARGEST = 1 << 40
MAX_FILES = 10_000
"""Largest number of files in an upload."""
UPLOADS_EACH, UPLOADS = 3, 256
"""Largest number of uploads at a time: of a worker, which may save a checkpoint and its model, and of all.

The third may be an upload that the worker has given up.
"""
CALLS = 256
"""Number of connections whose last request is remembered."""
LARGE_ANSWERS = 16
"""Number of connections whose last answer has a part of a file and is kept; a part is read again if it is lost."""
THREADS = 2

_MESSAGE = msgspec.msgpack.Decoder(Part | Call)
_ENCODER = msgspec.msgpack.Encoder()


class UploadError(Exception):
    """An upload that is refused; the text is for the user of the sending worker."""


class _Upload:
    """Files that are received, in a folder of their own."""

    def __init__(self, folder: Path, sender: Sender) -> None:
        self.folder, self.sender = folder, sender
        self.next = 0
        """Number of the part that is expected next."""
        self.failure: Received | None = None
        """The reply to all further parts, once the upload has failed."""
        self._name, self._file, self._size, self._files = "", -1, 0, 0

    def take(self, part: Part, reserve_bytes: int) -> None:
        """Write the next part. Raises OSError or UploadError."""
        if part.name != self._name:
            self._open(part.name)
        self._size += len(part.data)
        if self._size > (limit := LARGEST_BYTES.get(part.name, LARGEST)):
            raise UploadError(f"{part.name} has more than {limit} bytes")
        if free_bytes(self._file) - len(part.data) < reserve_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = memoryview(part.data)
        while left:
            left = left[os.write(self._file, left) :]
        self.next += 1

    def _open(self, name: str) -> None:
        self.close()
        self._files += 1
        if self._files > MAX_FILES:
            raise UploadError(f"more than {MAX_FILES} files")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._name, self._size = name, 0

    def close(self) -> None:
        """Close the open file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def discard(self) -> None:
        """Remove the files, and the folder of all uploads if this was the last one."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()


class FileReceiver:
    """Service of the coordinator that writes the files of workers to the run directory.

    `accepts` returns True for an incarnation of a worker that has not failed; a late one must not write. `keep` is the
    number of checkpoints that are kept, `resumed` the directory of the run that is resumed. The names of all files are
    fixed.
    """

    needs_log = False

    def __init__(
        self,
        run: Path,
        keep: int,
        accepts: Callable[[int, int], bool],
        resumed: Path | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self._run, self._keep, self._accepts, self._reserve_bytes = run, keep, accepts, reserve_bytes
        self._resumed = resumed
        self._uploads: dict[str, _Upload] = {}
        self._calls: dict[str, tuple[int, Future[bytes]]] = {}
        self._large: dict[str, None] = {}
        """Connections whose last answer is kept and has a part of a file, the oldest first."""
        self._threads = ThreadPoolExecutor(THREADS, "files")
        self._folders: dict[int, CheckpointFolder] = {}
        self._folders_lock = threading.Lock()
        shutil.rmtree(run / INCOMING, ignore_errors=True)  # of a coordinator that was killed

    def reply(self, name: bytes, message: bytes) -> bytes | None:
        """Return the reply to a message; None if the connection is not one for files. Raises ValueError."""
        sender = sender_of(name)
        if sender is None:
            return None
        received = _MESSAGE.decode(message)
        reply = self.take(sender, received) if isinstance(received, Part) else self.call(sender, received)
        return _ENCODER.encode(reply) if reply is not None else b""

    # --- parts ------------------------------------------------------------------------------------------------------

    def take(self, sender: Sender, part: Part) -> Received:
        """Write a part of an upload if it is the next one, and return the reply."""
        upload = self._uploads.get(sender.connection)
        if upload is None:
            if part.number:
                return Received(UNKNOWN)
            upload = self._begin(sender)
        if upload.sender != sender:
            raise ValueError("got a part of another worker's upload")
        if upload.failure is None and not self._accepts(sender.worker, sender.incarnation):
            upload.failure = Received(UNKNOWN, f"worker {sender.worker} was declared failed")
        if upload.failure is None and part.number == upload.next:
            self._write(upload, part)
        return upload.failure or Received(upload.next)

    def _begin(self, sender: Sender) -> _Upload:
        """Begin an upload. Those of failed workers, and the oldest of this worker, are given up for it."""
        own = [one for one in self._uploads.values() if one.sender.worker == sender.worker]
        failed = [one for one in self._uploads.values() if not self._accepts(one.sender.worker, one.sender.incarnation)]
        for upload in {id(one): one for one in [*own[: len(own) + 1 - UPLOADS_EACH], *failed]}.values():
            self._end(upload)
        upload = _Upload(self._run / INCOMING / sender.connection, sender)
        if len(self._uploads) >= UPLOADS:
            upload.failure = Received(UNKNOWN, f"{UPLOADS} other uploads are under way", errno.EBUSY)
            return upload
        self._uploads[sender.connection] = upload
        return upload

    def _write(self, upload: _Upload, part: Part) -> None:
        try:
            upload.take(part, self._reserve_bytes)
        except (OSError, UploadError) as error:
            upload.failure = Received(UNKNOWN, _text(error), getattr(error, "errno", None) or 0)
            upload.discard()

    def _end(self, upload: _Upload) -> None:
        """Forget an upload and remove its files."""
        self._uploads.pop(upload.sender.connection, None)
        upload.discard()

    # --- requests ---------------------------------------------------------------------------------------------------

    def call(self, sender: Sender, call: Call) -> Answer | None:
        """Begin a request, or return its result; None while it is being processed. Each number is processed once."""
        number, future = self._calls.get(sender.connection, (0, None))
        if call.number < number:
            return None
        if call.number > number or future is None:
            while len(self._calls) >= CALLS:
                del self._calls[next(iter(self._calls))]
            future = self._threads.submit(self._processed, sender, call.request)
            self._calls[sender.connection] = call.number, future
        if not future.done():
            return None
        if isinstance(call.request, Publish) and (upload := self._uploads.get(sender.connection)) is not None:
            self._end(upload)
        if (error := future.exception()) is None:
            if future.result():
                self._keep_few(sender.connection)
            return Answer(call.number, future.result())
        return Answer(call.number, b"", _text(error), getattr(error, "errno", None) or 0)

    def _keep_few(self, newest: str) -> None:
        """Forget the oldest of too many answers with parts of files: a part that is asked for again is read again."""
        self._large.pop(newest, None)
        self._large[newest] = None
        if len(self._large) > LARGE_ANSWERS:
            oldest = next(iter(self._large))
            del self._large[oldest]
            self._calls.pop(oldest, None)

    def _processed(self, sender: Sender, request: Request) -> bytes:
        """Process a request, in a thread; return its result."""
        if not self._accepts(sender.worker, sender.incarnation):
            raise UploadError(f"worker {sender.worker} was declared failed")
        match request:
            case Publish():
                self._publish(sender, request)
            case HighestRound(section):
                return str(self._checkpoints(section).highest()).encode()
            case RemoveOlder(section):
                with self._folders_lock:
                    removed = next(self._checkpoints(section).older(), None)
                return removed.name.encode() if removed is not None else b""
            case BeginSection(section, data, absent):
                facts = {"section": section, "data": data, "absent": absent}
                write_section(self._run, section_folder(self._run, section), facts)
            case RemoveResidual(section, worker):
                FileOf(section, "residual", worker).path(self._run).unlink(missing_ok=True)
            case ListCheckpoints(resumed):
                return _ENCODER.encode(_checkpoints_in(self._folder(resumed)))
            case ReadFile(resumed, file, offset):
                return _read(_path_of(file, self._folder(resumed)), offset)
            case DataOf(resumed, section):
                return str(read_run(section_folder(self._folder(resumed), section)).get("data", "")).encode()
        return b""

    def _folder(self, resumed: bool) -> Path:
        """Return the directory of the run that is resumed, or of this run."""
        if not resumed:
            return self._run
        if self._resumed is None:
            raise UploadError("this run resumes no other one")
        return self._resumed

    def _publish(self, sender: Sender, request: Publish) -> None:
        """Put the files of an upload in their place, after they were synced and checked."""
        upload = self._uploads.get(sender.connection)
        if upload is None or upload.failure is not None or upload.next != request.parts:
            raise ConnectionResetError(errno.ECONNRESET, "the coordinator was restarted and lost the upload")
        target = request.target
        if isinstance(target, FileOf) and target.kind == "residual" and target.number != sender.worker:
            raise UploadError(f"worker {sender.worker} has sent the residual of worker {target.number}")
        upload.close()
        for path in upload.folder.iterdir():
            sync(path)
        sync(upload.folder)
        if isinstance(target, FileOf):
            path = target.path(self._run)
            if target.kind == "residual":
                path.parent.mkdir(exist_ok=True)
            (upload.folder / CONTENT).replace(path)
            target.published(self._run)
            sync(path.parent)
        else:
            self._publish_checkpoint(upload.folder, target)

    def _publish_checkpoint(self, filled: Path, target: CheckpointOf) -> None:
        checkpoints = self._checkpoints(target.section)
        frozen = read_manifest(filled / MANIFEST).files.get(FROZEN)
        if frozen is not None and not (filled / FROZEN).exists() and not checkpoints.links_frozen(frozen, filled):
            raise ConnectionResetError(errno.ECONNRESET, "no checkpoint has these frozen tensors any more")
        manifest = checked(filled)
        if manifest.number != target.round or {*manifest.files, MANIFEST} != {one.name for one in filled.iterdir()}:
            raise UploadError("the files are not those of its manifest")
        with self._folders_lock:
            checkpoints.folder.mkdir(exist_ok=True)
            checkpoints.publish(filled, target.round)
            checkpoints.prune()

    def _checkpoints(self, section: int) -> CheckpointFolder:
        if section not in self._folders:
            self._folders[section] = CheckpointFolder(checkpoint_folder(self._run, section), self._keep)
        return self._folders[section]


def _path_of(file: CheckpointFile | FileOf, run: Path) -> Path:
    if isinstance(file, FileOf):
        return file.path(run)
    return checkpoint_folder(run, file.section) / name_of(file.round, file.occurrence) / file.name


def _checkpoints_in(run: Path) -> CHECKPOINTS_FOUND:
    """Return the checkpoints of all sections, the newest first."""
    numbers = range(len(section_folders(run)) + 1, 0, -1)
    folders = [(number, CheckpointFolder(checkpoint_folder(run, number))) for number in numbers]
    return [(number, *order(path)) for number, folder in folders for path in folder.paths()]


def _read(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), READ_BYTES, offset)


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, UploadError | LogError) else f"{type(error).__name__}: {error}"
