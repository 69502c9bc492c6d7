"""Properties of the write-ahead log: flushed records are read back up to the first damaged one."""

from __future__ import annotations

import os
import resource
from itertools import pairwise
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import LogError
from stretto.membership.write_ahead_log import WriteAheadLog, read

RECORDS = [b"one", b"", b"\x00" * 40, bytes(range(64))]


def written(path: Path, records: list[bytes]) -> list[int]:
    """Write a log; return the offset of the end of each record."""
    journal, ends = WriteAheadLog(path), []
    for record in records:
        journal.append(record)
        journal.flush()
        ends.append(path.stat().st_size)
    journal.close()
    return ends


@given(batches=st.lists(st.lists(st.binary(max_size=200), max_size=4), max_size=5))
@settings(max_examples=examples(60))
def test_appended_records_are_read_back_after_any_number_of_openings(tmp_path_factory, batches) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    for batch in batches:
        journal = WriteAheadLog(path)
        for record in batch:
            journal.append(record)
        journal.close()
    assert read(path) == [record for batch in batches for record in batch]


def test_only_flushed_records_are_in_the_file(tmp_path) -> None:
    journal = WriteAheadLog(tmp_path / "journal")
    journal.append(b"flushed")
    journal.flush()
    journal.append(b"not yet")
    assert read(tmp_path / "journal") == [b"flushed"]
    journal.close()
    assert read(tmp_path / "journal") == [b"flushed", b"not yet"]


def test_flush_syncs_only_if_there_is_something_to_write(tmp_path, monkeypatch) -> None:
    journal = WriteAheadLog(tmp_path / "journal")
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    journal.flush()
    assert not synced
    journal.append(b"one")
    journal.flush()
    journal.flush()
    assert len(synced) == 1


def test_a_missing_log_has_no_records(tmp_path) -> None:
    assert read(tmp_path / "none") == []


def test_a_truncated_log_is_read_up_to_its_last_whole_record(tmp_path) -> None:
    path = tmp_path / "journal"
    ends = written(path, RECORDS)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert read(path) == RECORDS[: sum(end <= size for end in ends)]
        assert path.stat().st_size == size


def test_records_before_a_flipped_bit_are_read(tmp_path) -> None:
    path = tmp_path / "journal"
    ends = written(path, RECORDS)
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            assert read(path) == RECORDS[: sum(end <= at for end in ends)]


def test_a_missing_duplicated_or_moved_record_is_detected(tmp_path) -> None:
    path = tmp_path / "journal"
    ends = [0, *written(path, RECORDS)]
    whole = path.read_bytes()
    one, two, three, four = (whole[a:b] for a, b in pairwise(ends))
    for order, good in ((one + three + four, 1), (one + one + two, 1), (two + one, 0), (one + two + four + three, 2)):
        path.write_bytes(order)
        assert read(path) == RECORDS[:good]


def test_a_truncated_log_continues_after_its_last_whole_record(tmp_path) -> None:
    path = tmp_path / "journal"
    ends = written(path, RECORDS)
    whole = path.read_bytes()
    for size in range(0, len(whole) + 1, 3):
        path.write_bytes(whole[:size])
        journal = WriteAheadLog(path)
        journal.append(b"after")
        journal.close()
        assert read(path) == [*RECORDS[: sum(end <= size for end in ends)], b"after"]


def test_a_failed_write_raises_and_succeeds_once_there_is_room(tmp_path) -> None:
    path = tmp_path / "journal"
    journal = WriteAheadLog(path)
    journal.append(b"fits")
    journal.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal.append(bytes(200))
    journal.append(b"behind")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        with pytest.raises(LogError, match="cannot be written: File too large"):
            journal.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == 100  # a partial record
    assert read(path) == [b"fits"]
    journal.close()
    assert read(path) == [b"fits", bytes(200), b"behind"]


def test_a_missing_folder_is_named(tmp_path) -> None:
    with pytest.raises(LogError, match="cannot be opened: No such file"):
        WriteAheadLog(tmp_path / "none" / "journal")
