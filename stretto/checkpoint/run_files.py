"""The files that a worker writes to the folder of a section: on a disk that it sees, or through the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stretto.checkpoint.file_client import FileClient
from stretto.checkpoint.file_messages import (
    CONTENT,
    PATHS,
    BeginSection,
    CheckpointOf,
    FileOf,
    HighestRound,
    Kind,
    RemoveOlder,
)
from stretto.checkpoint.folder import KEPT_CHECKPOINTS
from stretto.checkpoint.storage import Checkpoints, State, state_parts, write_synced
from stretto.errors import LogError
from stretto.run_dir import CHECKPOINTS, section_folder, write_section
from stretto.whole_files import written_whole

HIGHEST_S = 5.0
"""Time in seconds that asynchronous workers wait for the number of the newest checkpoint."""
Chunks = Callable[[], Iterable[memoryview]]
"""Returns the content of a file; called once more where it has to be written again."""


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
        """Return the round of the newest complete checkpoint, as far as it is known here."""
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

    def write(self, kind: Kind, content: Chunks) -> None:
        """Write a file, whole or not at all. Raises OSError."""
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

    def write(self, kind: Kind, content: Chunks) -> None:
        """Write a file, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with written_whole(self.folder / PATHS[kind]) as part:
            write_synced(part, content())

    def checkpoints(self, keep: int = KEPT_CHECKPOINTS) -> CheckpointStore:
        """Return the checkpoints in this folder."""
        return Checkpoints(self.folder / CHECKPOINTS, keep)

    def begin_section(self, section: int, data: str, absent: list[int]) -> None:
        """Make the folder of a further section."""
        facts = {"section": section, "data": data, "absent": absent}
        write_section(self.folder, section_folder(self.folder, section), facts)


@dataclass(frozen=True)
class RemoteFiles:
    """Files of a section in the run directory of the launcher, which this process does not see."""

    client: FileClient
    section: int
    name: str
    exists = True

    @property
    def place(self) -> str:
        """The folder, for notices."""
        return str(section_folder(Path(f"the run folder of the launcher at {self.client.address}"), self.section))

    def write(self, kind: Kind, content: Chunks) -> None:
        """Send a file to the coordinator, which writes it whole or not at all."""
        self.client.upload(FileOf(self.section, kind), lambda: ((CONTENT, chunk) for chunk in content()))

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

    def write(self, state: State, number: int) -> None:
        """Send a state to the coordinator."""
        self._client.upload(CheckpointOf(self._section, number), lambda: state_parts(state, number))
        self._last = number

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
