"""Data is found in the order promised, is what it should be, or ends the script with one clear error."""

import gzip
import hashlib
import threading
from pathlib import Path

import datasets
import pytest
import torch
from datasets import DataError, File

CONTENT = b"To be, or not to be"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder and an empty cache."""
    monkeypatch.setenv("STRETTO_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def put(path: Path, raw: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def file(*addresses: str, name: str = "play/hamlet.txt") -> File:
    return File(name, hashlib.sha256(CONTENT).hexdigest(), addresses)


def idx(values: torch.Tensor) -> bytes:
    head = bytes([0, 0, 8, values.dim()]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return head + bytes(values.flatten().tolist())


@pytest.mark.parametrize("shape", [(5,), (3, 2), (2, 3, 4), (0, 28, 28)])
def test_idx_reads_back_what_was_written(shape):
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).view(shape)
    assert torch.equal(datasets.read_idx(idx(values)), values)


@pytest.mark.parametrize("cut", [0, 3, 6, 11, -1])
def test_a_cut_idx_file_is_refused(cut):
    whole = idx(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(DataError, match="this"):
        datasets.read_idx(whole[:cut])


def test_the_given_folder_goes_before_the_cache(places):
    put(places / "data/play/hamlet.txt", CONTENT)
    put(places / "cache/stretto/play/hamlet.txt", b"another")
    assert datasets.content(file()) == CONTENT


def test_the_cache_is_read_without_a_given_folder(places, monkeypatch):
    monkeypatch.delenv("STRETTO_DATA")
    put(places / "cache/stretto/play/hamlet.txt", CONTENT)
    assert datasets.content(file()) == CONTENT


@pytest.mark.parametrize("level", [1, 9])
def test_packed_content_counts_not_the_packing(places, level):
    put(places / "data/play/hamlet.gz", gzip.compress(CONTENT, level, mtime=0))
    assert datasets.content(file(name="play/hamlet.gz")) == CONTENT


@pytest.mark.parametrize("raw", [b"", CONTENT, gzip.compress(CONTENT, mtime=0)[:-9], gzip.compress(b"other", mtime=0)])
def test_damaged_data_is_refused_by_name(places, raw):
    path = put(places / "data/play/hamlet.gz", raw)
    with pytest.raises(DataError) as refusal:
        datasets.content(file(name="play/hamlet.gz"))
    assert str(path) in str(refusal.value)
    assert file().sha256 in str(refusal.value)


def test_a_download_is_checked_kept_and_not_repeated(places, capsys):
    origin = put(places / "public/hamlet.txt", CONTENT)
    assert datasets.content(file(origin.as_uri())) == CONTENT
    assert capsys.readouterr().err == "downloading play/hamlet.txt: 0.0 of 0.0 MB\n"
    origin.unlink()
    assert datasets.content(file(origin.as_uri())) == CONTENT
    kept = [path.name for path in (places / "cache/stretto/play").iterdir()]
    assert sorted(kept) == [".lock", "hamlet.txt"]


def test_a_mirror_with_other_content_is_passed_over(places):
    wrong = put(places / "wrong.txt", b"To do is to be")
    right = put(places / "right.txt", CONTENT)
    assert datasets.content(file(wrong.as_uri(), right.as_uri())) == CONTENT


def test_without_data_and_network_one_error_says_where_it_looked(places):
    missing = (places / "nowhere.txt").as_uri()
    wrong = put(places / "wrong.txt", b"To do is to be").as_uri()
    with pytest.raises(DataError) as refusal:
        datasets.content(file(missing, wrong))
    said = str(refusal.value)
    for place in (str(places / "data"), str(places / "cache"), missing, wrong, "try: STRETTO_DATA="):
        assert place in said
    assert not (places / "cache/stretto/play/hamlet.txt").exists()


def test_of_several_at_once_one_downloads(places, monkeypatch):
    origin = put(places / "public/hamlet.txt", CONTENT).as_uri()
    begun, read, calls = threading.Event(), datasets._read, []

    def slow(address: str, name: str) -> bytes:
        calls.append(address)
        begun.wait(60)
        return read(address, name)

    monkeypatch.setattr(datasets, "_read", slow)
    found: list[bytes] = []
    crowd = [threading.Thread(target=lambda: found.append(datasets.content(file(origin)))) for _ in range(3)]
    for one in crowd:
        one.start()
    begun.set()
    for one in crowd:
        one.join(60)
    assert found == [CONTENT] * 3
    assert len(calls) == 1


@pytest.mark.parametrize(
    "known",
    [datasets.TRAIN_IMAGES, datasets.TRAIN_LABELS, datasets.TEST_IMAGES, datasets.TEST_LABELS, datasets.SHAKESPEARE],
    ids=lambda known: known.name,
)
def test_addresses_are_public_and_encrypted(known):
    assert len(known.sha256) == 64
    assert known.addresses
    assert all(address.startswith("https://") for address in known.addresses)
