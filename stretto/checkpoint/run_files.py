"""The files that a worker writes to the folder of a section: on a disk that it sees, or through the coordinator."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from safetensors.torch import load_file
from torch import Tensor

from stretto.checkpoint.file_client import FileClient
from stretto.checkpoint.file_messages import (
    CHECKPOINTS_FOUND,
    CONTENT,
    BeginSection,
    CheckpointFile,
    CheckpointOf,
    DataOf,
    FileOf,
    HighestRound,
    Kind,
    ListCheckpoints,
    RemoveOlder,
    RemoveResidual,
)
from stretto.checkpoint.folder import (
    KEPT_CHECKPOINTS,
    MANIFEST,
    DamagedError,
    Seal,
    checked,
    name_of,
    order,
    read_manifest,
)
from stretto.checkpoint.storage import Checkpoints, Notice, State, read_checkpoint, state_parts, write_synced
from stretto.errors import LogError
from stretto.run_dir import CHECKPOINTS, read_run, section_folder, section_folders, section_number, write_section
from stretto.whole_files import written_whole

HIGHEST_S = 5.0
"""Time in seconds that asynchronous workers wait for the number of the newest checkpoint."""
Chunks = Callable[[], Iterable[memoryview]]
"""Returns the content of a file; called once more where it has to be written again."""


class CheckpointPlace(NamedTuple):
    """A checkpoint of a run: its section, its round, and its number among those of the same round."""

    section: int
    round: int
    occurrence: int


class Newest(NamedTuple):
    """A checkpoint that was read: which one, its state, and the folder that it is in, for a notice."""

    which: CheckpointPlace
    state: State
    place: str


class CheckpointStore(Protocol):
    """Place of a section's checkpoints."""

    def write(self, state: State, number: int) -> object:
        """Write the state of a round, whole or not at all. Raises OSError, and TypeError for what cannot be stored."""
        ...

    def prune(self) -> None:
        """Remove checkpoints that are older than the newest complete ones."""
        ...

    def highest(self) -> int:
        """Return the round of the newest checkpoint; 0 without any."""
        ...

    def last(self) -> int | None:
        """Return the round of the newest complete checkpoint that this process knows of."""
        ...

    def older(self) -> Iterator[Path]:
        """Remove those older than the newest complete one, the oldest first, and yield the former path of each."""
        ...


class RunFiles(Protocol):
    """Files in the folder of a section."""

    @property
    def place(self) -> str:
        """The folder, for notices."""
        ...

    @property
    def name(self) -> str:
        """Name for files that are written elsewhere, since this folder does not take them."""
        ...

    @property
    def exists(self) -> bool:
        """False if the folder was removed during the run."""
        ...

    def write(self, kind: Kind, content: Chunks, number: int = 0) -> None:
        """Write a file, whole or not at all; `number` is the worker that a residual is of. Raises OSError."""
        ...

    def take_residual(self, worker: int) -> dict[str, Tensor] | None:
        """Return the residual of a worker that left, and remove its file; None while there is none. Raises OSError."""
        ...

    def find(self, kind: Kind, section: int, scratch: Path) -> Path | None:
        """Return the path of a file of a section of this run, or of its copy in the folder `scratch`; None without it.

        Raises OSError.
        """
        ...

    def data_of(self, section: int) -> str:
        """Return the digest of the data of a section of this run; "" if it is not known. Raises LogError."""
        ...

    def newest(self, scratch: Path, notice: Notice) -> Newest | None:
        """Return the newest whole checkpoint of all sections of this run; `scratch` is an empty folder for copies."""
        ...

    def read(self, which: CheckpointPlace, scratch: Path) -> State:
        """Return the state of a checkpoint that another worker has found whole. Raises OSError and DamagedError."""
        ...

    def checkpoints(self, keep: int = KEPT_CHECKPOINTS) -> CheckpointStore:
        """Return the checkpoints, of which the newest `keep` complete ones are kept."""
        ...

    def begin_section(self, section: int, data: str, absent: list[int]) -> None:
        """Make the folder of a further section, in that of the first, which begins without the `absent` workers.

        `data` is a digest of the section's data. Raises LogError.
        """
        ...


class LocalFiles:
    """Files in the folder of a section, on a disk that this process sees."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.place, self.name = folder, str(folder), folder.name

    @property
    def exists(self) -> bool:
        """False if the folder was removed during the run."""
        return self.folder.exists()

    def write(self, kind: Kind, content: Chunks, number: int = 0) -> None:
        """Write a file, whole or not at all."""
        target = FileOf(1, kind, number)
        path = target.path(self.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as part:
            write_synced(part, content())
        target.published(self.folder)

    def take_residual(self, worker: int) -> dict[str, Tensor] | None:
        """Read and remove the residual of a worker that left."""
        path = FileOf(1, "residual", worker).path(self.folder)
        if not path.is_file():
            return None
        residual = load_file(path)
        path.unlink()
        return residual

    def find(self, kind: Kind, section: int, scratch: Path) -> Path | None:
        """Return the path of a file of a section."""
        path = FileOf(section, kind).path(self.folder)
        return path if path.is_file() else None

    def data_of(self, section: int) -> str:
        """Return the digest of the data of a section."""
        return str(read_run(section_folder(self.folder, section)).get("data", ""))

    def newest(self, scratch: Path, notice: Notice) -> Newest | None:
        """Return the newest whole checkpoint of all sections."""
        for folder in (*reversed(section_folders(self.folder)), self.folder):
            if (found := Checkpoints(folder / CHECKPOINTS).find(notice)) is not None:
                path, state = found
                section = section_number(folder) if folder != self.folder else 1
                return Newest(CheckpointPlace(section, *order(path)), state, str(path.parent))
        return None

    def read(self, which: CheckpointPlace, scratch: Path) -> State:
        """Read a checkpoint."""
        path = section_folder(self.folder, which.section) / CHECKPOINTS / name_of(which.round, which.occurrence)
        return read_checkpoint(path, read_manifest(path / MANIFEST))

    def checkpoints(self, keep: int = KEPT_CHECKPOINTS) -> CheckpointStore:
        """Return the checkpoints in this folder."""
        return Checkpoints(self.folder / CHECKPOINTS, keep)

    def begin_section(self, section: int, data: str, absent: list[int]) -> None:
        """Make the folder of a further section."""
        facts = {"section": section, "data": data, "absent": absent}
        write_section(self.folder, section_folder(self.folder, section), facts)


@dataclass(frozen=True)
class RemoteFiles:
    """Files of a section in the run directory of the launcher, which this process does not see.

    `resumed`: in the directory of the run that is resumed.
    """

    client: FileClient
    section: int
    name: str
    resumed: bool = False
    exists = True

    @property
    def place(self) -> str:
        """The folder, for notices."""
        which = "run that is resumed" if self.resumed else "run"
        return str(section_folder(Path(f"the folder of the {which} at {self.client.address}"), self.section))

    def write(self, kind: Kind, content: Chunks, number: int = 0) -> None:
        """Send a file to the coordinator, which writes it whole or not at all."""
        target = FileOf(self.section, kind, number)
        self.client.upload(target, lambda: ((CONTENT, chunk) for chunk in content()))

    def take_residual(self, worker: int) -> dict[str, Tensor] | None:
        """Copy the residual of a worker that left, and let the coordinator remove it."""
        with tempfile.TemporaryDirectory(prefix="stretto-") as scratch:
            path = Path(scratch, "residual")
            try:
                self.client.download(False, FileOf(self.section, "residual", worker), path)
            except FileNotFoundError:
                return None
            residual = load_file(path)
        self.client.request(RemoveResidual(self.section, worker))
        return residual

    def find(self, kind: Kind, section: int, scratch: Path) -> Path | None:
        """Copy a file of a section to the folder `scratch`."""
        path = scratch / kind
        try:
            self.client.download(self.resumed, FileOf(section, kind), path)
        except FileNotFoundError:
            return None
        return path

    def data_of(self, section: int) -> str:
        """Return the digest of the data of a section."""
        try:
            return self.client.request(DataOf(self.resumed, section)).decode()
        except OSError as error:
            raise LogError(f"the data of section {section} are not known: {error.strerror}") from error

    def newest(self, scratch: Path, notice: Notice) -> Newest | None:
        """Copy the newest whole checkpoint of all sections, and read it."""
        found = msgspec.msgpack.decode(self.client.request(ListCheckpoints(self.resumed)), type=CHECKPOINTS_FOUND)
        for which in map(CheckpointPlace._make, found):
            try:
                return Newest(which, self.read(which, scratch), self.place)
            except (OSError, DamagedError) as problem:
                notice(f"{problem}; the checkpoint {name_of(which.round, which.occurrence)} is skipped")
        return None

    def read(self, which: CheckpointPlace, scratch: Path) -> State:
        """Copy a checkpoint to the folder `scratch`, and read it."""
        copy = scratch / f"{which.section}-{name_of(which.round, which.occurrence)}"
        copy.mkdir()

        def fetch(name: str) -> None:
            self.client.download(self.resumed, CheckpointFile(*which, name), copy / name)

        try:
            fetch(MANIFEST)
            for name in read_manifest(copy / MANIFEST).files:
                fetch(name)
            return read_checkpoint(copy, checked(copy))
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def checkpoints(self, keep: int = KEPT_CHECKPOINTS) -> CheckpointStore:
        """Return the checkpoints at the launcher; its coordinator knows how many are kept."""
        return RemoteCheckpoints(self.client, self.section)

    def begin_section(self, section: int, data: str, absent: list[int]) -> None:
        """Let the coordinator make the folder of a further section."""
        try:
            self.client.request(BeginSection(section, data, absent))
        except OSError as error:
            raise LogError(f"the folder of section {section} cannot be created: {error.strerror}") from error


class RemoteCheckpoints:
    """Checkpoints of a section in the run directory of the launcher."""

    def __init__(self, client: FileClient, section: int) -> None:
        self._client, self._section = client, section
        self._last: int | None = None
        self._frozen: Seal | None = None
        """Checksum of the frozen tensors of the last one, which the coordinator has."""

    def write(self, state: State, number: int) -> None:
        """Send a state to the coordinator; frozen tensors that it has are sent where a first attempt has failed."""
        stored, self._frozen, sent = self._frozen, None, list[Seal]()

        def is_stored(seal: Seal) -> bool:
            sent.append(seal)
            return sent == [stored]

        self._client.upload(CheckpointOf(self._section, number), lambda: state_parts(state, number, is_stored))
        self._last, self._frozen = number, sent[-1] if sent else None

    def prune(self) -> None:
        """Do nothing: the coordinator has removed older ones."""

    def highest(self) -> int:
        """Return the round of the newest checkpoint, by any worker; 0 without a reply of the coordinator."""
        with contextlib.suppress(OSError):
            return int(self._client.request(HighestRound(self._section), HIGHEST_S))
        return 0

    def last(self) -> int | None:
        """Return the round of the newest checkpoint that this worker has written."""
        return self._last

    def older(self) -> Iterator[Path]:
        """Let the coordinator remove those older than the newest complete one."""
        while name := self._client.request(RemoveOlder(self._section)).decode():
            yield Path(name)
