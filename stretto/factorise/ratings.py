"""Ratings from a text file: a row, a column and a value on each line.

Such files come from many programs, few of which quote as RFC 4180 says. A line that is a rating is read as one,
whatever its names hold: a quote opens a field only if it is closed before a separator, and a quoted field continues on
the next line only if one of both lines alone is no rating. So an odd quote never makes later lines part of a name.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import tempfile
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from stretto.errors import LaunchError, explain

EXAMPLE = "stretto factorise ratings.csv --columns user,item,rating"
SEPARATORS = ("\t", "::", ";", ",", "|")
"""Separators of fields; the first of several that fit is taken."""
LARGEST = float(np.finfo(np.float32).max)
"""Largest value of a rating."""
SAMPLE = 100
"""Number of lines that show the separator and a heading, and largest number of lines of a rating."""
MISSING = ("na", "n/a", "nan", "null", "none", "nil", "-", "--", "?", ".", "\\n")
"""Words that stand for a missing value, in small letters: no headings."""
INDEX_NAMES = ("", "index", "unnamed: 0")
"""Headings of a first column that numbers the lines, in small letters."""
MOST_BY_CHANCE = 20
"""Number of lines from which on a first column that counts them is no column of users."""
USERS = re.compile(r"(user|customer|reviewer|member)s?[ _-]?(id|name|no|nr)?", re.IGNORECASE)
ITEMS = re.compile(r"(item|movie|film|book|song|track|artist|product)s?[ _-]?(id|name|no|nr)?", re.IGNORECASE)
VALUES = re.compile(r"(rating|score|star|value)s?", re.IGNORECASE)
"""Headings by which columns are found in any order, if a file has one of each."""
PACKED = {b"PK\x03\x04": "unzip -p", b"BZh": "bzcat", b"\xfd7zXZ": "xzcat", b"\x28\xb5\x2f\xfd": "zstdcat"}
"""First bytes of packed files, and the command that unpacks each."""


@dataclass(frozen=True)
class Ratings:
    """The known values of a matrix, and the names of its rows and columns in the order of their numbers."""

    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: NDArray[np.float32]
    row_names: Sequence[str]
    column_names: Sequence[str]
    taken: tuple[str, str, str]
    """The columns of the file with the names of rows and columns, and with the values."""
    encoding: str

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        row, column, value = self.taken
        counts = (
            f"{len(self.row_names):,} rows (users) by {row}, {len(self.column_names):,} columns (items) by {column}"
        )
        return f"{len(self):,} ratings: {counts}, values by {value}; {self.encoding}"


def read(path: Path, columns: str | None) -> Ratings:
    """Return the ratings of a file. Raise LaunchError for a file without ratings, or with lines that are none.

    `columns` names the three columns, in the order row, column, value; by default they are those of users, items and
    ratings by their headings, or else the first three, or those after a column that numbers the lines. Blanks around a
    field do not count. The file is in UTF-8 or UTF-16, in Latin-1 if it is neither, and may be packed by gzip.
    """
    try:
        with ExitStack() as stack:
            file: BinaryIO = stack.enter_context(path.open("rb"))
            if not file.seekable():  # a pipe can be read once
                with file as pipe:
                    file = cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile()))
                    shutil.copyfileobj(pipe, file)
                    file.seek(0)
            if file.read(2) == b"\x1f\x8b":
                file.seek(0)
                file = cast(BinaryIO, stack.enter_context(gzip.open(file)))
            encodings, line_end = _form(path, file)
            for encoding in encodings:
                file.seek(0)
                text = io.TextIOWrapper(file, encoding=encoding, newline=line_end)
                try:
                    return _ratings(path, text, columns, encoding)
                except UnicodeDecodeError as error:
                    problem = error
                    text.detach()
        raise _refused(f"{path} is no text", f"{problem}", "a CSV file in UTF-8", EXAMPLE)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise _refused(f"{path} cannot be read", f"{reason}", "a file with ratings", EXAMPLE) from None


def _form(path: Path, file: BinaryIO) -> tuple[Sequence[str], str]:
    """Return the encodings that a file may be in, likeliest first, and its line end. Raise LaunchError for no text."""
    file.seek(0)
    start = file.read(1 << 16)
    unpack = next((command for magic, command in PACKED.items() if start.startswith(magic)), None)
    if unpack is not None:
        to_type = f"{unpack} {path.name} > ratings.csv"
        raise _refused(
            f"{path} is packed", "an archive, or a spreadsheet", "a text file, or one packed by gzip", to_type
        )
    encodings: Sequence[str] = ("utf-8-sig", "latin-1")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        encodings = ("utf-16",)
    elif b"\0" in start:
        encodings = ("utf-16-le",) if b"\0" in start[1::2] else ("utf-16-be",)
        if b"\0" in start[1::2] and b"\0" in start[::2]:
            raise _refused(f"{path} is no text", "zeros", "a CSV file in UTF-8", EXAMPLE)
    return encodings, "\r" if b"\r" in start and b"\n" not in start else "\n"


def _ratings(path: Path, text: io.TextIOWrapper, columns: str | None, encoding: str) -> Ratings:
    """Return the ratings of an open file."""
    lines = ((number, line.rstrip("\r\n")) for number, line in enumerate(text, 1))
    sample = list(islice(lines, SAMPLE))
    while sample and not sample[0][1].strip():
        del sample[0]
    if not sample:
        raise _refused(f"{path} is empty", "no line", "a line for each rating: row, column, value", EXAMPLE)
    records = _Records(path, [line for _, line in sample if line.strip()], columns)
    rows, columns_of, values = array("i"), array("i"), array("f")
    row_of, column_of = dict[str, int](), dict[str, int]()
    for row, column, value in records.parsed(chain(sample, lines)):
        rows.append(row_of.setdefault(row, len(row_of)))
        columns_of.append(column_of.setdefault(column, len(column_of)))
        values.append(value)
    if not values:
        raise _refused(f"{path} has no ratings", "a heading alone", "a line for each rating", EXAMPLE)
    numbers = np.array(rows, np.int32), np.array(columns_of, np.int32), np.array(values, np.float32)
    spelled = encoding.removesuffix("-sig").upper().replace("LATIN-1", "Latin-1, since it is not UTF-8")
    return Ratings(*numbers, [*row_of], [*column_of], records.taken, spelled)


class _Records:
    """The lines of one file as ratings."""

    def __init__(self, path: Path, sample: Sequence[str], columns: str | None) -> None:
        self._path = path
        self._separator = _separator(sample)
        if "\r" in sample[0] and '"' not in sample[0]:
            got, to_type = (
                f"carriage returns in the first line: {sample[0]:.80}",
                f"tr '\\r' '\\n' < {path.name} > lines.csv",
            )
            raise _refused(f"{path} has two kinds of line ends", got, "one kind", to_type)
        separator = re.escape(self._separator)
        self._field = re.compile(rf' *"((?:[^"]|"")*)" *(?={separator}|\Z)|(.*?)(?={separator}|\Z)', re.DOTALL)
        first = [field.strip() for field in self._split(sample[0])]
        below = [self._split(line) for line in sample[1:]]
        longer = [fields[0] for fields in below if len(fields) == len(first) + 1 and fields[-1].strip()]
        if len(longer) == len(below) and _is_count(longer):
            first = ["", *first]  # R writes no heading above the numbers of the lines
        self._width = len(first)
        self._places, self.has_heading = self._placed(first, below, columns)
        row, column, value = ((first[i] if self.has_heading else f"column {i + 1}") or "''" for i in self._places)
        self.taken = (row, column, value)

    def _placed(
        self, first: Sequence[str], below: Sequence[Sequence[str]], columns: str | None
    ) -> tuple[tuple[int, int, int], bool]:
        """Return the places of row, column and value in a line, and True if the first line is a heading."""
        path = self._path
        if columns is None:
            if len(first) < 3:
                got = f"{len(first)} columns: {','.join(first):.80}"
                blanks = f'tr -s " " , < {path.name} > commas.csv' if len(" ".join(first).split()) > 2 else EXAMPLE
                raise _refused(f"{path} has fewer than three columns", got, "row, column and value", blanks)
            start = 1 if len(first) > 3 and _numbers_lines(first[0], [fields[0] for fields in below]) else 0
            places = (start, start + 1, start + 2)
            if not self._is_heading(first, below, places):
                self._check_commas(first, below, places)
                return places, False
            found = [[i for i, name in enumerate(first) if kind.fullmatch(name)] for kind in (USERS, ITEMS, VALUES)]
            return ((found[0][0], found[1][0], found[2][0]) if all(found) else places), True
        names = [name.strip() for name in columns.split(",")]
        if len(names) != 3:
            raise _refused("--columns names three columns", f"--columns {columns}", "row, column and value", EXAMPLE)
        missing = [name for name in names if name not in first]
        if missing:
            expected, to_type = f"of {', '.join(first)}", f"--columns {','.join(first[:3])}"
            raise _refused(f"{path} has no column {missing[0]}", f"--columns {columns}", expected, to_type)
        row, column, value = (first.index(name) for name in names)
        return (row, column, value), True

    def _is_heading(self, first: Sequence[str], below: Sequence[Sequence[str]], places: tuple[int, int, int]) -> bool:
        """Return True for a line of names above a column of values, or of names above columns of numbers."""
        row, column, value = places
        if not re.match(r"\W*\d", first[value]):
            return not (first[value] == "" or first[value].lower() in MISSING or _is_number(first[value]))
        if USERS.fullmatch(first[row]) and ITEMS.fullmatch(first[column]):
            return True
        below = [fields for fields in below if len(fields) == len(first)]
        if row == 1 and first[0] == "" and below and all(fields[0].strip() for fields in below):
            return True  # pandas numbers columns without a name, and the lines, without a heading for these
        are_numbers = [bool(below) and all(_is_number(fields[i]) for fields in below) for i in (row, column)]
        if below and first == [str(number) for number in range(len(first))]:
            if not any(are_numbers):
                return True
            raise _refused(
                f"{self._path} begins with {','.join(first)}",
                "numbers of columns, or a rating",
                "a line of names above the ratings",
                f"sed '1i user,item,rating' {self._path.name} > named.csv; with 1c if its first line is no rating",
            )
        return any(
            is_number and not _is_number(first[i]) for is_number, i in zip(are_numbers, (row, column), strict=True)
        )

    def _check_commas(self, first: Sequence[str], below: Sequence[Sequence[str]], places: tuple[int, int, int]) -> None:
        """Raise LaunchError if values may have decimal commas, which then stand as two columns."""
        value = places[2]
        if self._separator != "," or len(first) != value + 2:
            return
        if all(re.fullmatch(r"\d{1,2}", fields[-1].strip()) for fields in (first, *below) if len(fields) == len(first)):
            raise _refused(
                f"{self._path} has values that may have decimal commas",
                f"the first line: {','.join(first):.80}",
                "a decimal point, or a line of names above the ratings",
                "4.5 in place of 4,5, or a first line such as user,item,rating,other",
            )

    def _split(self, line: str) -> list[str]:
        """Return the fields of a line; a quote that is not closed before a separator is text."""
        if '"' not in line:
            return line.split(self._separator)
        fields, at = [], 0
        while at <= len(line):
            found = self._field.match(line, at)
            assert found is not None
            quoted, plain = found.groups()
            fields.append(plain if quoted is None else quoted.replace('""', '"'))
            at = found.end() + len(self._separator)
        return fields

    def parsed(self, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[str, str, float]]:
        """Yield the rating of each line. Raise LaunchError for the first one that is none."""
        if self.has_heading:
            next(lines)
        ahead = deque[tuple[int, str]]()  # lines that were read to see whether a quoted field continues on them
        while (found := ahead.popleft() if ahead else next(lines, None)) is not None:
            number, line = found
            if not line or line.isspace():
                continue
            rating = self._rating(self._split(line))
            if '"' in line and line.count('"') % 2:
                ahead.extend(islice(lines, SAMPLE - len(ahead)))
                whole = line
                for passed, (_, more) in enumerate(ahead, 1):
                    if passed == 1 and rating is not None and (not more or self._rating(self._split(more)) is not None):
                        break  # lines that are ratings alone are not joined
                    whole += "\n" + more
                    if (joined := self._rating(self._split(whole))) is not None and whole.count('"') % 2 == 0:
                        rating = joined
                        ahead = deque(islice(ahead, passed, None))
                        break
            if rating is None:
                self._refuse(number, line)
            yield rating

    def _rating(self, fields: Sequence[str]) -> tuple[str, str, float] | None:
        """Return the rating of a line's fields; None for a line that is none."""
        row, column, value = self._places
        try:
            rating = float(fields[value])
            names = fields[row].strip(), fields[column].strip()
        except (IndexError, ValueError):
            return None
        is_rating = abs(rating) <= LARGEST and all(names) and "_" not in fields[value]  # NaN is not, either
        return (*names, rating) if is_rating and not any(fields[self._width :]) else None

    def _refuse(self, number: int, line: str) -> NoReturn:
        fields = self._split(line)
        row, column, value = self._places
        expected = f"a row, a column and a number in columns {row + 1}, {column + 1} and {value + 1}"
        to_type = EXAMPLE
        text = fields[value].strip() if len(fields) > value else ""
        more = ",".join(field.strip() for field in fields[value : self._width + 1])
        if re.fullmatch(r"[-+]?\d+,\d+", text) or (self._separator == "," and re.fullmatch(r"[-+]?\d+,\d{1,2}", more)):
            expected = "a decimal point"
            to_type = f"tr , . < {self._path.name} > points.csv" if self._separator != "," else "4.5 in place of 4,5"
        elif any(fields[self._width :]):
            expected += f", of {self._width} columns as in the first line"
            to_type = 'quotes around names with a separator: ann,"Earth, Wind & Fire",3'
        elif not text or text.lower() in MISSING:
            expected += "; there is no value"
            to_type = "a file without the lines that have no value"
        raise _refused(f"{self._path} has a line that is no rating", f"line {number}: {line:.80}", expected, to_type)


def _separator(sample: Sequence[str]) -> str:
    """Return the separator of the fields: the one that most lines have in the same number, if they have two."""
    first = sample[0]
    counts = {one: first.count(one) for one in SEPARATORS}
    steady = {one: sum(line.count(one) == counts[one] for line in sample) for one in SEPARATORS if counts[one] >= 2}
    return max(steady, key=lambda one: steady[one], default=max(SEPARATORS, key=lambda one: counts[one]))


def _numbers_lines(name: str, below: Sequence[str]) -> bool:
    """Return True for a first column that numbers the lines, from its first field and those below."""
    if name.lower() in INDEX_NAMES:
        return True
    is_count = _is_count(below) or _is_count([name, *below])
    return is_count and len(below) >= MOST_BY_CHANCE and not USERS.fullmatch(name)


def _is_count(texts: Sequence[str]) -> bool:
    """Return True for the numbers from 0 or 1 on."""
    return bool(texts) and any([*texts] == [str(n + start) for n in range(len(texts))] for start in (0, 1))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _refused(problem: str, got: str, expected: str, to_type: str) -> LaunchError:
    return LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
