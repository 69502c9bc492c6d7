"""A checkpoint is complete or absent after truncation, bit flips, kills and on a full disk."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from own_disk import own_disk
from torch import Tensor

from stretto.checkpoint import folder as folder_format
from stretto.checkpoint import state_transfer, storage
from stretto.checkpoint.background_writer import BackgroundWriter, Snapshots
from stretto.checkpoint.storage import Checkpoints, State, write_tensors
from stretto.errors import LaunchError
from stretto.interval import Interval, every
from stretto.strategies.optimizers import Optimizers
from stretto.transport.tensor_bytes import octets

LIMIT_S = 240
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Folder in memory, where syncing files takes no time; None if there is none."""
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda one: one,
    "transposed": lambda one: one.t() if one.dim() == 2 else one,
    "every other": lambda one: one[::2] if one.dim() else one,
    "expanded": lambda one: one[:1].expand(3, *one.shape[1:]) if one.dim() and len(one) else one,
}


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """Fail a test that takes longer than `LIMIT_S` seconds."""

    def raise_timeout(_number: int, _frame: object) -> None:
        raise TimeoutError(f"the test took more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def fingerprint(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """Return the parts of tensors that must survive: dtype, shape and bytes."""
    return {
        name: (one.dtype, one.shape, octets(one.clone(memory_format=torch.contiguous_format)).tobytes())
        for name, one in tensors.items()
    }


def state_fingerprint(state: State) -> tuple[Any, ...]:
    own = {worker: (facts, fingerprint(tensors)) for worker, (facts, tensors) in state.own.items()}
    return state.facts, fingerprint(state.tensors), own


def small_state(number: int) -> State:
    """Return a small state in which every value is its number."""
    own = {3: ({"number": number}, {"residual": torch.full((3,), number)})}
    tensors = {"model/w": torch.full((2, 2), float(number)), "model/base": torch.full((3,), number)}
    return State({"number": number}, tensors, own, frozenset({"model/base"}))


def check_state_is(state: State, number: int) -> None:
    assert state_fingerprint(state) == state_fingerprint(small_state(number))


def checked_round(checkpoint: tuple[int, State] | None) -> int | None:
    """Return the round of the checkpoint that was found, after a check that all its contents are of that round."""
    if checkpoint is None:
        return None
    check_state_is(checkpoint[1], checkpoint[0])
    return checkpoint[0]


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob(".*"))


# --- writing and reading back ----------------------------------------------------------------------------------------

texts = st.text(max_size=5)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
deep = st.recursive(
    plain, lambda one: st.lists(one, max_size=3) | st.dictionaries(texts, one, max_size=3), max_leaves=5
)
facts = st.dictionaries(texts, deep, max_size=3)
layouts, dtypes = st.sampled_from(list(LAYOUTS)), st.sampled_from(list(storage.KINDS))
shapes = st.lists(st.integers(0, 3), max_size=3)
drawn = st.lists(st.tuples(layouts, dtypes, shapes, st.booleans(), texts), max_size=4)


def any_bits(dtype: torch.dtype, shape: list[int], bits: random.Random) -> Tensor:
    """Return a tensor of random bits, which may include NaNs."""
    raw = bits.randbytes(torch.Size(shape).numel() * dtype.itemsize)
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return (torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)).view(shape)


def some_tensors(drawn: list[tuple[str, torch.dtype, list[int], bool, str]]) -> dict[str, Tensor]:
    """Return tensors of any dtype, shape and layout, some of which share memory with the previous tensor."""
    found: list[Tensor] = []
    bits = random.Random(len(drawn))
    for layout, dtype, shape, shares, _ in drawn:
        found.append(LAYOUTS[layout](found[-1] if shares and found else any_bits(dtype, shape, bits)))
    return {f"{index}/{name}": one for index, (one, (*_, name)) in enumerate(zip(found, drawn, strict=True))}


tensors = drawn.map(some_tensors)
own_of_workers = st.dictionaries(st.integers(0, 10**6), st.tuples(facts, tensors), max_size=2)


@settings(max_examples=examples(100))
@given(facts, tensors, own_of_workers, st.integers(0, 10**12))
def test_states_are_read_back_bit_for_bit(
    facts: dict[str, Any], tensors: dict[str, Tensor], own: dict[int, Any], number: int
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints")
        state = State(facts, tensors, own)
        checkpoints.write(state, number)
        found = Checkpoints(checkpoints.folder).newest(pytest.fail)
        assert found is not None and found[0] == number
        assert state_fingerprint(found[1]) == state_fingerprint(state)


def test_facts_that_are_not_finite_are_read_back(tmp_path: Path) -> None:
    Checkpoints(tmp_path).write(State({"loss": [float("nan"), float("inf")]}, {}), 1)
    found = Checkpoints(tmp_path).newest(pytest.fail)
    assert found is not None and repr(found[1].facts) == "{'loss': [nan, inf]}"


@pytest.mark.parametrize("fact", [(1, 2), b"bytes", {1: "one"}, {"deep": [{"set": {1}}]}, torch.zeros(1)])
def test_facts_that_json_would_change_are_refused(tmp_path: Path, fact: object) -> None:
    for state in (State({"fact": fact}, {}), State({}, {}, {0: ({"fact": fact}, {})})):
        with pytest.raises(TypeError, match="fact"):
            Checkpoints(tmp_path).write(state, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tensors",
    [
        {"wide": torch.zeros(1, dtype=torch.complex128)},
        {"sparse": torch.eye(2).to_sparse()},
        {"__metadata__": torch.zeros(1)},
    ],
)
def test_tensors_that_the_format_cannot_hold_are_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(TypeError, match=next(iter(tensors))):
        Checkpoints(tmp_path).write(State({}, tensors), 1)
    assert not list(tmp_path.iterdir())


def test_tensors_larger_than_a_chunk_are_read_back(tmp_path: Path) -> None:
    state = State({}, {"large": torch.randn(storage.CHUNK_BYTES // 4 * 3 + 5), "small": torch.randn(3)})
    Checkpoints(tmp_path).write(state, 1)
    found = Checkpoints(tmp_path).newest(pytest.fail)
    assert found is not None and state_fingerprint(found[1]) == state_fingerprint(state)


def test_writing_a_round_again_loses_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for value in range(12):
        checkpoints.write(State({"value": value}, {}), 7)
        found = Checkpoints(tmp_path).newest(pytest.fail)
        assert found is not None and (found[0], found[1].facts) == (7, {"value": value})


def test_all_files_are_synced_before_a_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    renamed: list[Path] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        renamed.append(path)
        assert {*path.iterdir(), path} <= {*synced}
        synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    Checkpoints(tmp_path / "checkpoints").write(small_state(1), 1)
    assert len(renamed) == 1 and synced == [tmp_path / "checkpoints", tmp_path]


# --- detection of damage ---------------------------------------------------------------------------------------------


@pytest.fixture
def second_checkpoint() -> Iterator[Path]:
    """Yield the folder of the second of two checkpoints."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        checkpoints = Checkpoints(Path(folder))
        checkpoints.write(small_state(1), 1)
        yield checkpoints.write(small_state(2), 2)


def check_detected(second_checkpoint: Path, file: Path) -> None:
    """Check that a notice names the damaged file and the checksum, and that the first checkpoint is returned."""
    notices: list[str] = []
    assert checked_round(Checkpoints(second_checkpoint.parent).newest(notices.append)) == 1
    (notice,) = notices
    assert str(file) in notice and second_checkpoint.name in notice and "checksum" in notice


def every_file(second_checkpoint: Path) -> Iterator[tuple[Path, bytes]]:
    files = sorted(second_checkpoint.iterdir())
    names = ["frozen.safetensors", "manifest.json", "state.safetensors", "worker-3.safetensors"]
    assert [file.name for file in files] == names
    for file in files:
        whole = file.read_bytes()
        yield file, whole
        file.write_bytes(whole)
    assert checked_round(Checkpoints(second_checkpoint.parent).newest(pytest.fail)) == 2


def test_truncation_at_any_byte_is_detected(second_checkpoint: Path) -> None:
    for file, whole in every_file(second_checkpoint):
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            check_detected(second_checkpoint, file)
        file.write_bytes(whole + b"\n")
        check_detected(second_checkpoint, file)


def test_a_bit_flip_in_any_byte_is_detected(second_checkpoint: Path) -> None:
    for file, whole in every_file(second_checkpoint):
        for at in range(len(whole)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            check_detected(second_checkpoint, file)


def test_a_missing_file_is_detected(second_checkpoint: Path) -> None:
    notices: list[str] = []
    for file in sorted(second_checkpoint.iterdir()):
        whole = file.read_bytes()
        file.unlink()
        assert checked_round(Checkpoints(second_checkpoint.parent).newest(notices.append)) == 1
        assert str(file) in notices[-1]
        file.write_bytes(whole)
    assert len(notices) == 4


@pytest.mark.parametrize("has_links", [True, False])
def test_frozen_tensors_are_written_once_and_again_when_they_change(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    checkpoints, written = Checkpoints(tmp_path, keep=2), list[Path]()
    for number, base in enumerate((5, 5, 6, 6), 1):
        state = small_state(number)
        state.tensors["model/base"].fill_(base)
        written.append(checkpoints.write(state, number))
        newest = checkpoints.newest(pytest.fail)
        assert newest is not None and state_fingerprint(newest[1]) == state_fingerprint(state)
        assert newest[1].frozen == state.frozen
        if number == 2:
            assert written[0].joinpath("frozen.safetensors").samefile(written[1] / "frozen.safetensors") == has_links
        checkpoints.prune()
    assert {one.name for one in checkpoints.paths()} == {"round-00000003", "round-00000004"}
    assert written[2].joinpath("frozen.safetensors").samefile(written[3] / "frozen.safetensors") == has_links


def test_files_of_another_complete_checkpoint_are_detected(second_checkpoint: Path) -> None:
    for file, _ in every_file(second_checkpoint):
        if file.name != "manifest.json":
            shutil.copy(second_checkpoint.with_name("round-00000001") / file.name, file)
            check_detected(second_checkpoint, file)


def test_without_a_complete_checkpoint_none_is_found(second_checkpoint: Path) -> None:
    notices: list[str] = []
    for folder in second_checkpoint.parent.iterdir():
        (folder / "manifest.json").write_bytes(b"")
    assert Checkpoints(second_checkpoint.parent).newest(notices.append) is None
    assert len(notices) == 2
    assert Checkpoints(second_checkpoint.parent).last() is None
    assert Checkpoints(second_checkpoint / "nowhere").newest(pytest.fail) is None


def test_what_all_checkpoints_lack_is_found_without_reading_tensors(second_checkpoint: Path) -> None:
    checkpoints = Checkpoints(second_checkpoint.parent)
    assert Checkpoints(second_checkpoint / "nowhere").missing() == "no checkpoint"
    for file, whole in every_file(second_checkpoint):
        for damage in (file.unlink, lambda file=file, whole=whole: file.write_bytes(whole[:-1])):
            damage()
            assert checkpoints.missing() is None, "the first one is whole"
            first = second_checkpoint.with_name("round-00000001").rename(second_checkpoint.parent / "away")
            assert str(file) in (checkpoints.missing() or "")
            first.rename(second_checkpoint.with_name("round-00000001"))


def test_checkpoint_of_a_later_format_is_skipped_and_kept(second_checkpoint: Path) -> None:
    manifest = second_checkpoint / "manifest.json"
    body = json.dumps(json.loads(manifest.read_bytes())["checkpoint"] | {"format": folder_format.FORMAT + 1}).encode()
    manifest.write_bytes(folder_format.sealed(body))
    notices: list[str] = []
    checkpoints = Checkpoints(second_checkpoint.parent, keep=1)
    assert checked_round(checkpoints.newest(notices.append)) == 1
    assert f"format {folder_format.FORMAT + 1}" in notices[0]
    checkpoints.prune()
    assert second_checkpoint.exists()


def test_folders_of_other_names_are_not_pruned(second_checkpoint: Path) -> None:
    checkpoints = Checkpoints(second_checkpoint.parent, keep=1)
    mine = [second_checkpoint.parent / name for name in (".git", "notes", "round-1", "round-00000001.kept")]
    for folder in mine:
        folder.mkdir()
    checkpoints.write(small_state(3), 3)
    checkpoints.prune()
    assert sorted(second_checkpoint.parent.iterdir()) == sorted([*mine, second_checkpoint.with_name("round-00000003")])


# --- retention -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=7), st.integers(1, 3), st.booleans())
def test_the_newest_complete_checkpoints_are_kept(made: list[tuple[int, bool]], keep: int, known: bool) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        checkpoints = Checkpoints(Path(folder), keep)
        whole = {}
        for number, damage in made:
            path = Checkpoints(Path(folder)).write(small_state(number), number)
            whole[path] = not damage
            if damage:
                (path / "state.safetensors").write_bytes(b"")
        if known:
            checkpoints.last()
        ordered = sorted(whole, key=folder_format.order)
        good = [path for path in ordered if whole[path]]
        kept = ordered[ordered.index(good[-keep]) :] if len(good) >= keep else ordered
        checkpoints.prune()
        assert sorted(Path(folder).iterdir(), key=folder_format.order) == kept
        last = folder_format.order(good[-1])[0] if good else None
        assert checked_round(checkpoints.newest()) == checkpoints.last() == last


# --- killed processes ------------------------------------------------------------------------------------------------


def forked(work: Callable[[], None]) -> int:
    """Run `work` in another process, and return its process number."""
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(1)
    return process


def write_rounds(folder: Path, done: int, keep: int = 2) -> None:
    """Write one round after another, and send its number through a pipe when a round is on the disk."""
    checkpoints = Checkpoints(folder, keep)
    number = checkpoints.last() or 0
    while True:
        number += 1
        checkpoints.write(small_state(number), number)
        os.write(done, f"{number}\n".encode())
        checkpoints.prune()


def test_a_writer_killed_at_random_points_leaves_complete_checkpoints(tmp_path: Path) -> None:
    points, written = random.Random(5), 0
    for _ in range(40):
        pipe, done = os.pipe()
        process = forked(partial(write_rounds, tmp_path, done))
        os.close(done)
        with os.fdopen(pipe) as lines:
            reported = [lines.readline() for _ in range(points.randrange(3))]
            threading.Event().wait(points.uniform(0, 0.01))
            os.kill(process, signal.SIGKILL)
            assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
            reported += lines.readlines()
        written += len(reported)
        found = checked_round(Checkpoints(tmp_path).newest(pytest.fail)) or 0
        assert [int(line) for line in reported] == list(range(written - len(reported) + 1, written + 1))
        assert found in (written, written + 1)
        written = found


STEPS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")


def test_a_writer_killed_before_any_system_call_leaves_complete_checkpoints(tmp_path: Path) -> None:
    """A process is killed before each system call that changes the file system."""
    steps, left = 0, 0
    while True:
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
        checkpoints.write(small_state(1), 1)
        process = forked(partial(write_until, checkpoints, steps))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert code in (0, -signal.SIGKILL)
        left += bool(leftovers(checkpoints.folder))
        assert checked_round(Checkpoints(checkpoints.folder).newest(pytest.fail)) in ((1, 2) if code else (2,))
        checkpoints.write(small_state(3), 3)
        assert leftovers(checkpoints.folder) == []
        assert checked_round(checkpoints.newest(pytest.fail)) == 3
        if code == 0:
            break
        steps += 1
    assert steps > 25 and left > 20


def write_until(checkpoints: Checkpoints, steps: int) -> None:
    """Write a checkpoint, and be killed before system call number `steps`, or exit with 0."""
    left = steps

    def kill_at_step(_frame: object, event: str, called: Any) -> None:
        nonlocal left
        if event == "c_call" and called.__name__ in STEPS:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.setprofile(kill_at_step)
    checkpoints.write(small_state(2), 2)
    checkpoints.prune()
    sys.setprofile(None)
    os._exit(0)


def test_concurrent_reads_find_ever_newer_complete_checkpoints() -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        checkpoints = Checkpoints(Path(folder))
        checkpoints.write(small_state(0), 0)
        pipe, done = os.pipe()
        process = forked(partial(write_rounds, checkpoints.folder, done, keep=1))
        os.close(done)
        try:
            reads = before = 0
            while reads < 400 or before < 50:
                now = checked_round(checkpoints.newest(pytest.fail))
                assert now is not None and now >= before
                before, reads = now, reads + 1
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(pipe)


# --- background writer -----------------------------------------------------------------------------------------------


class Gated(Checkpoints):
    """Checkpoints whose writes wait at a gate, and fail if `error` is set."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        super().__init__(folder, keep)
        self.began, self.gate, self.tried = threading.Semaphore(0), threading.Semaphore(0), list[int]()
        self.error: Exception | None = None

    def write(self, state: State, number: int) -> Path:
        self.tried.append(number)
        self.began.release()
        assert self.gate.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        return super().write(state, number)


def test_a_newer_state_replaces_the_state_that_waits_to_be_written(tmp_path: Path) -> None:
    gated = Gated(tmp_path)
    writer = BackgroundWriter(gated, pytest.fail, time.perf_counter)
    writer.submit(small_state(1), 1)
    assert gated.began.acquire(timeout=60)
    for number in (2, 3, 4):
        writer.submit(small_state(number), number)
    assert not writer.close(0)
    gated.gate.release(2)
    assert writer.close(60)
    assert gated.tried == [1, 4]
    assert checked_round(Checkpoints(tmp_path).newest(pytest.fail)) == 4
    with pytest.raises(RuntimeError, match="closed"):
        writer.submit(small_state(5), 5)


FAILURES = {"no room": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file"), "a bug": TypeError("no such thing")}


@settings(max_examples=examples(30))
@given(st.lists(st.sampled_from([None, *FAILURES])), st.integers(1, 3))
def test_failures_are_reported_once_and_so_is_their_end(plan: list[str | None], keep: int) -> None:
    notices: list[str] = []
    expected: list[str] = []
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        gated = Gated(Path(folder), keep)
        writer = BackgroundWriter(gated, notices.append, time.perf_counter)
        gated.gate.release(len(plan) + 1)
        for number, failure in enumerate(plan):
            with_it = small_state(number)
            before = plan[number - 1] if number else None
            whole = [one for one in range(number) if plan[one] is None]
            if failure and not before:
                why = "No space left on device" if failure == "no room" else "no such thing"
                last = f"the last complete one is round {whole[-1]}" if whole else "there is no complete one yet"
                expected.append(f"the checkpoint could not be written: {why}; training continues; {last}")
            if before and not failure:
                expected.append(f"checkpoints are written again: that of round {number} is complete")
            assert writer.settle(60)
            gated.error = FAILURES[failure] if failure else None
            writer.submit(with_it, number)
            assert gated.began.acquire(timeout=60)
        assert writer.close(60)
        assert notices == expected
        whole = [number for number, failure in enumerate(plan) if failure is None]
        assert checked_round(Checkpoints(Path(folder)).newest(pytest.fail)) == (whole[-1] if whole else None)
        assert len(list(Path(folder).iterdir())) == min(len(whole), keep)


def test_a_notice_that_failed_is_repeated_at_the_next_failure(tmp_path: Path) -> None:
    notices: list[str] = []

    def full(text: str) -> None:
        notices.append(text)
        if len(notices) < 3:
            raise OSError(errno.ENOSPC, "the log is on the same disk")

    gated = Gated(tmp_path)
    gated.error = FAILURES["no room"]
    writer = BackgroundWriter(gated, full, time.perf_counter)
    gated.gate.release(5)
    for number in range(5):
        writer.submit(small_state(number), number)
        assert gated.began.acquire(timeout=60)
        assert writer.settle(60)
    assert writer.close(60)
    assert len(notices) == 3


def test_a_written_state_is_released(tmp_path: Path) -> None:
    """Otherwise the memory of snapshots would never be free."""
    snapshots, tensor = Snapshots(), torch.randn(100)
    writer = BackgroundWriter(Checkpoints(tmp_path), pytest.fail, time.perf_counter)
    places = set()
    for number in range(6):
        copies = snapshots.copied({"model/w": tensor})
        places.add(copies["model/w"].data_ptr())
        writer.submit(State({}, copies), number)
        del copies
        assert writer.settle(60)
    assert writer.close(60)
    assert len(places) == 1


class Copies(RuleBasedStateMachine):
    """Comparison of snapshots with plain copies."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshots, self.made = Snapshots(), 0.0
        self.tensors = {"a": torch.zeros(2, 3).t(), "b": torch.zeros((), dtype=torch.int64), "e": torch.empty(0)}
        self.held: list[tuple[dict[str, Tensor], dict[str, Any]]] = []
        self.places: set[int] = set()

    @rule()
    def train(self) -> None:
        self.made += 1
        self.tensors["a"].fill_(self.made)
        self.tensors["b"].fill_(self.made)

    @rule(length=st.integers(1, 4))
    def change_shape(self, length: int) -> None:
        self.tensors["a"] = torch.full((length,), self.made)

    @rule()
    def copy(self) -> None:
        copied = self.snapshots.copied(self.tensors)
        assert fingerprint(copied) == fingerprint(self.tensors)
        self.held.append((copied, fingerprint(copied)))

    @rule(index=st.integers(0, 5))
    def release(self, index: int) -> None:
        if index < len(self.held):
            del self.held[index]

    @invariant()
    def held_copies_do_not_change(self) -> None:
        for copied, was in self.held:
            assert fingerprint(copied) == was

    @invariant()
    def at_most_two_buffers_are_kept(self) -> None:
        assert all(len(kept) <= 2 for kept in self.snapshots._kept.values())


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=examples(60))


def test_free_memory_is_reused() -> None:
    snapshots, tensors = Snapshots(), {"w": torch.randn(1000)}
    first, second = snapshots.copied(tensors), snapshots.copied(tensors)
    places = {first["w"].data_ptr(), second["w"].data_ptr()}
    assert len(places) == 2
    third = snapshots.copied(tensors)
    assert third["w"].data_ptr() not in places
    del first
    assert snapshots.copied(tensors)["w"].data_ptr() in places - {second["w"].data_ptr()}


# --- full disk -------------------------------------------------------------------------------------------------------

FULL = """
import json, subprocess, sys, time
from pathlib import Path
import torch
from stretto.checkpoint.background_writer import BackgroundWriter
from stretto.checkpoint.storage import Checkpoints, State

disk = Path(sys.argv[1])
checkpoints, notices, found = Checkpoints(disk / "checkpoints", keep=1), [], []
writer = BackgroundWriter(checkpoints, notices.append, time.perf_counter)

def go_on(number):
    writer.submit(State({}, {"model/w": torch.full((50_000,), float(number))}), number)
    assert writer.settle(60)
    newest = checkpoints.newest(notices.append)
    found.append(newest and newest[0])
    assert newest is None or newest[1].tensors["model/w"].eq(newest[0]).all()

go_on(1)
try:
    (disk / "junk").write_bytes(bytes(1 << 20))
except OSError:
    pass
go_on(2)
go_on(3)
(disk / "junk").unlink()
go_on(4)
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
go_on(5)
go_on(6)
subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
go_on(7)
assert writer.close(60)
print(json.dumps([found, notices, sorted(one.name for one in checkpoints.folder.iterdir())]))
"""


def test_a_full_disk_is_reported_and_training_continues(tmp_path: Path) -> None:
    line = [*own_disk("1m", tmp_path), sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found, notices, left = json.loads(done.stdout)
    assert found == [1, 1, 1, 4, 4, 4, 7]
    failed = "the checkpoint could not be written"
    assert notices == [
        f"{failed}: No space left on device; training continues; the last complete one is round 1",
        "checkpoints are written again: that of round 4 is complete",
        f"{failed}: Read-only file system; training continues; the last complete one is round 4",
        "checkpoints are written again: that of round 7 is complete",
    ]
    assert left == ["round-00000007"]


# --- checkpoint interval ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("5m", Interval(seconds=300)),
        ("30s", Interval(seconds=30)),
        ("500ms", Interval(seconds=0.5)),
        ("20 rounds", Interval(rounds=20)),
        ("1 round", Interval(rounds=1)),
        (" 20r ", Interval(rounds=20)),
    ],
)
def test_intervals_are_parsed_and_printed(text: str, meant: Interval) -> None:
    assert every(text) == meant
    assert every(str(meant)) == meant


@pytest.mark.parametrize("text", ["", "5", "m", "0s", "0 rounds", "-5m", "five m", "5 m 3", "nan s", "infs", "1e999s"])
def test_text_that_is_neither_a_time_nor_rounds_is_refused(text: str) -> None:
    with pytest.raises(LaunchError) as error:
        every(text)
    assert all(word in str(error.value) for word in ("got: ", "expected: ", 'try: --checkpoint-every "5m"'))


@given(st.integers(1, 20), st.lists(st.integers(0, 30), max_size=30), st.booleans())
def test_a_checkpoint_is_due_once_per_interval(wanted: int, increments: list[int], rounds: bool) -> None:
    how_often = Interval(rounds=wanted) if rounds else Interval(seconds=wanted)
    now, last = 7, 7
    assert not how_often.due(*((0.0, now) if rounds else (now, 0)))
    for increment in increments:
        now += increment
        due = how_often.due(*((0.0, now) if rounds else (now, 0)))
        assert due == (now - last >= wanted)
        last = now if due else last


def test_tensors_do_not_overwrite_a_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "there", {})
    assert (tmp_path / "there").read_text() == "mine"


def test_optimizer_state_in_lists_is_not_saved_and_is_named() -> None:
    """A partial state would be worse than none: L-BFGS fails on it."""

    def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (net(torch.ones(3, 2)) ** 2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    for _ in range(2):
        step(net, optimizer)
    assert {"old_dirs", "old_stps", "ro"} <= set(state_transfer.unsaved(Optimizers([optimizer])))
    again = torch.optim.LBFGS(net.parameters(), max_iter=3)
    state_transfer.load_optimizers(Optimizers([again]), state_transfer.optimizer_tensors(Optimizers([optimizer])))
    step(net, again)
    adam = torch.optim.Adam(net.parameters())
    step(net, adam)
    assert state_transfer.unsaved(Optimizers([adam])) == []
