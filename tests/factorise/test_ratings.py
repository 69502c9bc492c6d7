"""Ratings from CSV files: which files are read, and the error of each that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

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
        (b"ann,7,3\n\xff\xfe,7,3\n", None, "is no text"),
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
