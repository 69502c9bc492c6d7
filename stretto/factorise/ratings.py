"""Ratings from a CSV file: a row, a column and a value on each line."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.errors import LaunchError, explain

EXAMPLE = "stretto factorise ratings.csv --columns user,item,rating"
SEPARATORS = ",\t;"
LARGEST = float(np.finfo(np.float32).max)
"""Largest value of a rating."""


@dataclass(frozen=True)
class Ratings:
    """The known values of a matrix, and the names of its rows and columns in the order of their numbers."""

    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: NDArray[np.float32]
    row_names: Sequence[str]
    column_names: Sequence[str]

    def __len__(self) -> int:
        return len(self.values)


def read(path: Path, columns: str | None) -> Ratings:
    """Return the ratings of a file. Raise LaunchError for a file without ratings, or with lines that are none.

    `columns` names the three columns, in the order row, column, value; by default they are the first three. A first
    line without a number in its third column is a heading. The separator is the most frequent one in this line.
    """
    with _opened(path) as lines:
        numbered = ((number, line) for number, line in enumerate(lines, 1) if line)
        place, first = next(numbered, (0, []))
        if not first:
            raise _refused(f"{path} is empty", "no line", "a line for each rating: row, column, value", EXAMPLE)
        places, is_heading = _places(path, first, columns)
        found = _Reader(path, places)
        if not is_heading:
            found.add(first, place)
        for number, line in numbered:
            found.add(line, number)
    if not found.values:
        raise _refused(f"{path} has no ratings", "a heading alone", "a line for each rating", EXAMPLE)
    return found.ratings()


class _Reader:
    """The ratings read so far."""

    def __init__(self, path: Path, places: tuple[int, int, int]) -> None:
        self._path, self._places = path, places
        self._rows, self._columns, self.values = array("i"), array("i"), array("f")
        self._row_of: dict[str, int] = {}
        self._column_of: dict[str, int] = {}

    def add(self, line: Sequence[str], number: int) -> None:
        """Add the rating of a line."""
        row, column, value = self._places
        try:
            rating = float(line[value])
            names = line[row], line[column]
        except (IndexError, ValueError):
            rating, names = float("nan"), ("", "")
        if not abs(rating) <= LARGEST:  # NaN is not, either
            got = f"line {number}: {','.join(line):.80}"
            expected = f"a row, a column and a number in columns {row + 1}, {column + 1} and {value + 1}"
            raise _refused(f"{self._path} has a line that is no rating", got, expected, EXAMPLE)
        self._rows.append(self._row_of.setdefault(names[0], len(self._row_of)))
        self._columns.append(self._column_of.setdefault(names[1], len(self._column_of)))
        self.values.append(rating)

    def ratings(self) -> Ratings:
        """Return the ratings."""
        rows, columns = (np.array(one, np.int32) for one in (self._rows, self._columns))
        return Ratings(rows, columns, np.array(self.values, np.float32), [*self._row_of], [*self._column_of])


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[list[str]]]:
    """Yield the lines of a file, each as its fields. Raise LaunchError for a file that is no text."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            separator = max(SEPARATORS, key=first.count)
            yield csv.reader(file, delimiter=separator, skipinitialspace=True)
    except OSError as error:
        reason = error.strerror or error
        raise _refused(f"{path} cannot be read", f"{reason}", "a file with ratings", EXAMPLE) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise _refused(f"{path} is no text", f"{error}", "a CSV file in UTF-8", EXAMPLE) from None


def _places(path: Path, first: Sequence[str], columns: str | None) -> tuple[tuple[int, int, int], bool]:
    """Return the places of row, column and value in a line, and True if the first line is a heading."""
    heading = [name.strip() for name in first]
    if columns is None:
        if len(first) < 3:
            got = f"{len(first)} columns: {','.join(heading):.80}"
            raise _refused(f"{path} has fewer than three columns", got, "row, column and value", EXAMPLE)
        return (0, 1, 2), not _is_number(first[2])
    names = [name.strip() for name in columns.split(",")]
    if len(names) != 3:
        raise _refused("--columns names three columns", f"--columns {columns}", "row, column and value", EXAMPLE)
    missing = [name for name in names if name not in heading]
    if missing:
        to_type = f"--columns {','.join(heading[:3])}"
        raise _refused(
            f"{path} has no column {missing[0]}", f"--columns {columns}", f"of {', '.join(heading)}", to_type
        )
    row, column, value = (heading.index(name) for name in names)
    return (row, column, value), True


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _refused(problem: str, got: str, expected: str, to_type: str) -> LaunchError:
    return LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
