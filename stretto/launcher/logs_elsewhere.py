"""Log files of workers on other machines, which the coordinator writes in the run directory, as they grow."""

from __future__ import annotations

import codecs
import contextlib
import re
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

from stretto.membership.output_lines import plain

NAME = re.compile(r"worker-(\d+)(?:-rank-(\d+))?\.log")
CHUNK_BYTES = 1 << 16


class LogsElsewhere:
    """Reader of the whole lines that were added to the log files since the last call, except those of some workers."""

    def __init__(self, folder: Path, without: Container[int]) -> None:
        self._folder, self._without = folder, without
        self._read: Counter[Path] = Counter()

    def read(self) -> Iterator[tuple[tuple[int, int], bytes]]:
        """Yield new lines, with their worker and rank; a line that is longer than a chunk in parts."""
        for path in sorted(self._folder.glob("worker-*.log")):
            match = NAME.fullmatch(path.name)
            if match is not None and int(match[1]) not in self._without:
                while lines := self._lines(path):
                    yield (int(match[1]), int(match[2] or 0)), plain(lines)

    def _lines(self, path: Path) -> bytes:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(self._read[path])
            data = file.read(CHUNK_BYTES)
            is_part = len(data) == CHUNK_BYTES and b"\n" not in data
            whole = data[: codecs.utf_8_decode(data, "replace")[1] if is_part else data.rfind(b"\n") + 1]
            self._read[path] += len(whole)
            return whole
        return b""
