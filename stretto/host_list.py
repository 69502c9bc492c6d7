"""Hosts of a run, with the number of workers or shards on each, from the texts of options or from a host file."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from stretto.call_syntax import Words
from stretto.errors import LaunchError, explain

NAME = re.compile(r"[A-Za-z0-9_][\w.@+%-]*", re.ASCII)
MAX_WORKERS = 4096
"""Largest number of workers of one host."""
COUNTS = range(1, MAX_WORKERS + 1)
EXPECTED = "a host's name, or user@name, and its number of workers"
EXAMPLE = "a:2,user@b:4"
EXPECTED_SERVERS = "a number of shards, or numbers with their hosts, such as 2@b"


@dataclass(frozen=True)
class Host:
    """Host as ssh knows it, and the number of workers, or of shards, to start there."""

    name: str
    workers: int

    def __str__(self) -> str:
        return f"{self.name}:{self.workers}"


def parse(text: str) -> tuple[Host, ...]:
    """Return the hosts of a text for `--hosts`; a repeated host has the sum of its workers.

    >>> [str(host) for host in parse("a:2, user@b, a")]
    ['a:3', 'user@b:1']

    Raise LaunchError for any other text.
    """
    workers: Counter[str] = Counter()
    words = Words(text, "--hosts", EXAMPLE, EXPECTED)
    for _ in words.listed(",") if text else ():
        workers[_name(words)] += _count(words) if words.skip(":") else 1
    return tuple(Host(name, count) for name, count in workers.items())


def from_file(path: Path) -> str:
    """Return the hosts of a file as a text for `--hosts`. Raises LaunchError for a file without hosts."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or "it is no text") from error
    hosts = [_line(line, path, number) for number, line in enumerate(lines, 1) if line.partition("#")[0].strip()]
    if not hosts:
        raise _unreadable(path, "it names no host")
    return ",".join(hosts)


def server_hosts(text: str) -> str:
    """Return the hosts of the shards in a text for `--servers`, as a text for `--hosts`.

    >>> server_hosts("2@b, 1@user@c")
    'b:2,user@c:1'

    Raise LaunchError for any other text.
    """
    words = Words(text, "--servers", "2@b", EXPECTED_SERVERS)
    hosts = []
    for _ in words.listed(","):
        count, _, name = words.next.partition("@")
        if NAME.fullmatch(name) is None or not (count.isascii() and count.isdigit() and int(count) in COUNTS):
            raise words.refused()
        words.at += 1
        hosts.append(f"{name}:{int(count)}")
    return ",".join(hosts)


def _line(line: str, path: Path, number: int) -> str:
    """Return the host of a line, `name`, `name:workers` or `name slots=workers`."""
    words = Words(line.partition("#")[0].strip(), f"line {number} of {path}", "a slots=2", EXPECTED)
    name = _name(words)
    count = 1
    if words.skip(":"):
        count = _count(words)
    elif words.skip("slots"):
        words.take("=")
        count = _count(words)
    words.end("the end, :N or slots=N")
    return f"{name}:{count}"


def _name(words: Words) -> str:
    name = words.next
    if NAME.fullmatch(name) is None:
        raise words.refused()
    words.at += 1
    return name


def _count(words: Words) -> int:
    return words.whole(1, MAX_WORKERS, f"a number of workers from 1 to {MAX_WORKERS}")


def _unreadable(path: Path, why: str) -> LaunchError:
    expected = "a file with a host a line, such as: a slots=2"
    return LaunchError(
        explain(f"{path} cannot be read: {why}", got=f"--hostfile {path}", expected=expected, to_type="--hosts a:2,b:4")
    )
