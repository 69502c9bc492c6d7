"""Ratings from CSV files: which files are read, and the error of each that is not."""

from __future__ import annotations

import csv
import gzip
import os
import re
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stretto.errors import LaunchError
from stretto.factorise.ratings import read


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "ratings.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("user,item,rating,time\nann,7,3.5,1\nbob,7,4,2\nann,9,1,3\nann,7,5,4\n", None),
        ("ann,7,3.5\nbob,7,4\n\nann,9,1\nann,7,5\n", None),
        ("\ufeffann\t7\t3.5\r\nbob\t7\t4\r\nann\t9\t1\r\nann\t7\t5", None),
        ("\n\nann, 7, 3.5\nbob,7,4\n ann, 9,1\nann,7, 5\n", None),
        ("user\titem, film or book\trating\nann\t7\t3.5\nbob\t7\t4\nann\t9\t1\nann\t7\t5\n", None),
        ("stars;who;what\n3.5;ann;7\n4;bob;7\n1;ann;9\n5;ann;7\n", "who,what,stars"),
        ('user,item,rating\n"ann",7,3.5\nbob,7,4\nann,"9",1\nann,7,5\n', "user, item, rating"),
    ],
)
def test_rows_and_columns_are_numbered_in_the_order_of_their_names(
    tmp_path: Path, text: str, columns: str | None
) -> None:
    found = read(written(tmp_path, text), columns)
    assert (found.row_names, found.column_names) == (["ann", "bob"], ["7", "9"])
    assert [*zip(found.rows.tolist(), found.columns.tolist(), found.values.tolist(), strict=True)] == [
        (0, 0, 3.5),
        (1, 0, 4.0),
        (0, 1, 1.0),
        (0, 0, 5.0),
    ]


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("", None, "is empty"),
        ("user,item,rating\n", None, "has no ratings"),
        ("user,item\nann,7\n", None, "got: 2 columns: user,item"),
        ("user,item,rating\nann,7,3\n", "user,film,rating", "has no column film"),
        ("user,item,rating\nann,7,3\n", "user,film,rating", "try: --columns user,item,rating"),
        ("user,item,rating\nann,7,3\n", "user,rating", "--columns names three columns"),
        ("user,item,rating\nann,7,3\nbob,7,good\n", None, "got: line 3: bob,7,good"),
        ("ann,7,3\nbob,7\n", None, "got: line 2: bob,7"),
        ("ann,7,3\n\nbob,7,nan\n", None, "got: line 3: bob,7,nan"),
        ("ann,7,3\nbob,7,1e999\n", None, "got: line 2: bob,7,1e999"),
        ("\nann,7,3\nbob,7,1e39\n", None, "got: line 3: bob,7,1e39"),
        ("\n\n", None, "is empty"),
        (b"\x93NUMPY\x01\0\0\0v\0", None, "is no text"),
        (b"PK\x03\x04\0\0", None, "try: unzip -p ratings.csv > ratings.csv"),
        (b"\x1f\x8b\x08\0\0", None, "cannot be read"),
        ("1,10,\n1,11,4\n2,10,3\n", None, "got: line 1: 1,10,"),
        ("1;10;4,5\n1;11;4\n2;10;3\n", None, "try: tr , . < ratings.csv > points.csv"),
        ("ann,10,000,3\n".join(["ann,7,3\n"] * 2), None, "got: line 2: ann,10,000,3"),
        ("ann,7,3\n,8,4\n", None, "got: line 2: ,8,4"),
        ("ann,7,1_0\n", None, "got: line 1: ann,7,1_0"),
        ('ann,"7,3\nbob,8\ncid,9,3\n', None, "got: line 2: bob,8"),
        ("ann,10,4,5\nbob,10,3,0\n", None, "got: the first line: ann,10,4,5"),
        ("ann,10,4,5\nbob,10,3\n", None, "try: 4.5 in place of 4,5"),
        ("user,item,rating\nann,10,4,5\n", None, "try: 4.5 in place of 4,5"),
        ("user,item,rating,time\rann,7,3,1\rann,8,3,1\nbob,7,4,1\n", None, "two kinds of line ends"),
        ("ann,7,3,1\rann,8,3,1\nbob,7,4,1\n", None, "try: tr '\\r' '\\n' < ratings.csv > lines.csv"),
        ("0,1,2\n4,2,2\n3,3,1\n", None, "begins with 0,1,2"),
        ("1,10,NA\n1,11,4\n2,10,3\n", None, "got: line 1: 1,10,NA"),
        ("1,10,?\n1,11,4\n2,10,3\n", None, "got: line 1: 1,10,?"),
        ("ann,x,null\nbob,y,4\n", None, "got: line 1: ann,x,null"),
        ("1 10 3\n1 11 4\n", None, 'try: tr -s " " , < ratings.csv > commas.csv'),
        ("%%MatrixMarket matrix coordinate real general\n2 2 1\n", None, "got: 1 columns"),
    ],
)
def test_files_that_are_no_ratings_get_one_error(
    tmp_path: Path, text: str | bytes, columns: str | None, expected: str
) -> None:
    with pytest.raises(LaunchError) as raised:
        read(written(tmp_path, text), columns)
    assert expected in str(raised.value)
    assert "try: " in str(raised.value)


def test_a_file_that_is_not_there_gets_one_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="got: No such file or directory"):
        read(tmp_path / "none.csv", None)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_pipe_is_read_once_and_loses_no_line(tmp_path: Path, is_packed: bool) -> None:
    lines = [f"ü{i},i{i % 7},{i % 5}" for i in range(20_000)]
    content = "\n".join(lines).encode("latin-1")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(gzip.compress(content) if is_packed else content,))
    writer.start()
    found = read(pipe, None)
    writer.join(60)
    assert (len(found), found.row_names[0], found.row_names[-1]) == (20_000, "ü0", "ü19999")


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5).filter(str.strip)
TRIPLES = st.tuples(NAMES, NAMES, st.integers(-9, 9))


@given(
    st.lists(TRIPLES, min_size=2, max_size=6),
    st.sampled_from([",", "\t", ";", "::", "|"]),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le"]),
    st.booleans(),
)
def test_every_line_is_one_rating_whatever_its_names_hold(
    triples: list[tuple[str, str, int]], separator: str, line_end: str, encoding: str, is_packed: bool
) -> None:
    """Names that hold neither separators nor line ends are read as written; each odd quote is text."""
    clean = str.maketrans(dict.fromkeys(",;:|\t\r\n", "."))
    named = [(row.translate(clean).strip(), column.translate(clean).strip(), value) for row, column, value in triples]
    quoted = re.compile(r'".*"', re.DOTALL)
    assume(all(row and column and not quoted.search(row + column) for row, column, _ in named))
    text = line_end.join(separator.join([row, column, str(value)]) for row, column, value in named)
    assume(encoding in ("utf-8", "utf-8-sig", "utf-16") or all(ord(character) < 128 for character in text))
    with TemporaryDirectory() as folder:
        path = Path(folder, "ratings.csv")
        content = f"row{separator}column{separator}value{line_end}{text}".encode(encoding)
        path.write_bytes(gzip.compress(content) if is_packed else content)
        found = read(path, "row,column,value")
    numbers = zip(found.rows.tolist(), found.columns.tolist(), found.values.tolist(), strict=True)
    assert [(found.row_names[r], found.column_names[c], v) for r, c, v in numbers] == named


@given(st.lists(TRIPLES, min_size=1, max_size=6), st.sampled_from([",", "\t", ";", "|"]))
def test_names_that_a_csv_writer_has_quoted_are_read_as_they_were(
    triples: list[tuple[str, str, int]], separator: str
) -> None:
    """Quoted names hold separators, quotes and line ends."""
    named = [(row.replace("\r", ""), column.replace("\r", ""), value) for row, column, value in triples]
    assume(all(row.strip() and column.strip() for row, column, _ in named))
    with TemporaryDirectory() as folder:
        path = Path(folder, "ratings.csv")
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=separator, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n").writerows(
                [("row", "column", "value"), *named]
            )
        found = read(path, "row,column,value")
    numbers = zip(found.rows.tolist(), found.columns.tolist(), found.values.tolist(), strict=True)
    expected = [(row.strip(), column.strip(), value) for row, column, value in named]
    assert [(found.row_names[r], found.column_names[c], v) for r, c, v in numbers] == expected


@pytest.mark.parametrize(
    ("text", "rows", "columns", "taken"),
    [
        ('user\tartist\tplays\na\t"Weird Al\t3\nb\tx\t4\nc\t"Weird Al\t1\n', "abc", ['"Weird Al', "x"], "artist"),
        ('a,"Earth, Wind & Fire",3\nb,"Weird Al,4\nc,The "Boss",5\n', "abc", None, "column 2"),
        ('u,i,r\na,"The\n\nBand",3\nb,x,4\n', "ab", ["The\n\nBand", "x"], "i"),
        ('a,x,3,"good\nsong"\nb,y,4,"so, so"\n', "ab", ["x", "y"], "column 2"),
        (",userId,movieId,rating\n0,4,2,2\n1,3,3,1\n", "43", ["2", "3"], "movieId"),
        (",0,1,2\n0,4,2,2\n1,3,3,1\n", "43", ["2", "3"], "1"),
        ('"userId" "movieId" "rating"\n"1" 4 2 2\n"2" 3 3 1\n'.replace(" ", ","), "43", ["2", "3"], "movieId"),
        ("u,i,r\n4,2,2,\n3,3,1,\n", "43", ["2", "3"], "i"),
        ("user,item,2020\n4,2,2\n3,3,1\n", "43", ["2", "3"], "item"),
        ("userId,Movie ID,2020\nann,x,2\nbob,y,1\n", ["ann", "bob"], ["x", "y"], "Movie ID"),
        ("user,item,rating1\nann,x,2\nbob,y,1\n", ["ann", "bob"], ["x", "y"], "item"),
        ("0,1,2\nann,x,2\nbob,y,1\n", ["ann", "bob"], ["x", "y"], "1"),
        ("Index,user,item,rating\n1,4,2,2\n2,3,3,1\n", "43", ["2", "3"], "item"),
        ("id,user,item,rating\n7,4,2,2\n9,3,3,1\n", "43", ["2", "3"], "item"),
        ("id,item,rating,time\n7,2,2,90\n8,3,1,91\n", "78", ["2", "3"], "item"),
        ("".join(f"{i},u{i % 2},i{i % 3},4\n" for i in range(30)), ["u0", "u1"], ["i0", "i1", "i2"], "column 3"),
        ("user,item,timestamp,Rating\nann,x,970000000,2\nbob,y,970000001,1\n", ["ann", "bob"], ["x", "y"], "item"),
        ("rating,user,item\n2,4,7\n1,3,8\n", "43", ["7", "8"], "item"),
        ("u1,i1,4\nu1 ,i1,3\n", ["u1"], ["i1"], "column 2"),
        ("u  1,i1,4\nu 1,i1,3\n", ["u  1", "u 1"], ["i1"], "column 2"),
        ("1::1193::5::97\n2::66::3::97\n", "12", ["1193", "66"], "column 2"),
        ("1;10,5;4\n2;10,5;3\n", "12", ["10,5"], "column 2"),
        ("Zoë,é,4\n".encode("latin-1"), ["Zoë"], ["é"], "column 2"),
    ],
)
def test_files_of_other_programs_are_read(
    tmp_path: Path, text: str | bytes, rows: list[str], columns: list[str] | None, taken: str
) -> None:
    found = read(written(tmp_path, text), None)
    assert found.row_names == [*rows]
    assert columns is None or found.column_names == columns
    assert found.taken[1] == taken
    assert str(found).startswith(f"{len(found.values)} ratings: {len(rows)} rows (users) by {found.taken[0]}, ")
