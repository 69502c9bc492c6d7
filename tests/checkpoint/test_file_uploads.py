"""Properties of files that workers send to the coordinator, without sockets: whole or not at all, and nowhere else."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from own_disk import own_disk

from stretto.checkpoint.file_client import ATTEMPTS
from stretto.checkpoint.file_messages import (
    CHECKPOINTS_FOUND,
    CONTENT,
    PART_BYTES,
    READ_BYTES,
    UNKNOWN,
    WINDOW,
    Answer,
    BeginSection,
    Call,
    CheckpointFile,
    CheckpointOf,
    FileOf,
    HighestRound,
    ListCheckpoints,
    Part,
    Publish,
    ReadFile,
    Received,
    RemoveOlder,
    Sender,
    SendWindow,
)
from stretto.checkpoint.file_receiver import INCOMING, FileReceiver
from stretto.checkpoint.folder import Seal
from stretto.checkpoint.run_files import RemoteCheckpoints
from stretto.checkpoint.storage import Checkpoints, State, state_parts
from stretto.run_dir import CHECKPOINTS
from stretto.whole_files import PART as PART_SUFFIX

FINAL = FileOf(1, "final")


def receiver_of(run: Path, **options: Any) -> FileReceiver:
    return FileReceiver(run, 3, options.pop("accepts", lambda worker, incarnation: True), **options)


def sender_of(worker: int = 0, connection: str = "0" * 16, incarnation: int = 0) -> Sender:
    return Sender(worker, incarnation, connection)


def call(receiver: FileReceiver, sender: Sender, request: Any, number: int = 1) -> Answer:
    """Repeat a request until there is an answer."""
    limit = time.monotonic() + 60
    while (answer := receiver.call(sender, Call(number, request))) is None:
        assert time.monotonic() < limit, "no answer within 60 s"
        time.sleep(0.001)
    return answer


def parts_of(content: bytes) -> Iterator[tuple[str, memoryview]]:
    yield CONTENT, memoryview(content)


def upload(receiver: FileReceiver, sender: Sender, parts: Iterator[tuple[str, memoryview]], target: Any) -> Answer:
    """Send parts and publish them, over a network that loses nothing."""
    window = SendWindow(parts)
    while new := window.new_parts():
        for part in new:
            reply = receiver.take(sender, part)
            if reply.problem:
                return Answer(1, b"", reply.problem, reply.errno)
            window.receive(reply)
    return call(receiver, sender, Publish(window.confirmed, target))


def state_of(number: int, size: int = 5) -> State:
    facts = {"number": number}
    return State(facts, {"w": torch.full((size,), float(number))}, {2: (facts, {"r": torch.ones(3)})})


def unsent(seal: Seal) -> bool:
    return False


class Network:
    """A sender and a receiver that may be killed, and a network that loses, repeats and delays messages."""

    def __init__(self, run: Path, contents: bytes) -> None:
        self.run, self.contents = run, contents
        self.receiver, self.sender = receiver_of(run), sender_of()
        self.window = SendWindow(parts_of(contents))
        self.lost = False

    def deliver(self, fate: str) -> None:
        new = self.window.new_parts()
        sent = self.window.under_way if fate in ("all again", "backwards") else new
        for part in reversed(sent) if fate == "backwards" else sent:
            if fate == "lost":
                continue
            replies = [self.receiver.take(self.sender, part) for _ in range(1 + (fate == "twice"))]
            for reply in [] if fate == "replies lost" else replies:
                self.lost = self.lost or reply.number == UNKNOWN
                self.window.receive(reply)
        if fate == "restart":
            self.receiver = receiver_of(self.run)
            self.lost = True


FATES = st.sampled_from(["arrives", "twice", "lost", "replies lost", "all again", "backwards", "restart"])


@given(st.integers(0, 40 * PART_BYTES), st.lists(FATES, max_size=12))
@example(PART_BYTES - 32, ["backwards"])
def test_an_upload_is_in_its_place_unchanged_or_not_at_all_whatever_is_lost(size: int, fates: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        run, content = Path(name), os.urandom(64) * (size // 64 + 1)
        network = Network(run, content)
        for fate in fates:
            network.deliver(fate)
            assert os.listdir(run) in ([], [INCOMING])
        if not network.lost:
            while network.window.under_way or network.window.new_parts():
                network.deliver("all again")
        answer = call(network.receiver, network.sender, Publish(-(-len(content) // PART_BYTES), FINAL))
        if answer.errno:  # else the receiver has got all, if none before a restart, or in another order
            assert network.lost and answer.errno == errno.ECONNRESET
            assert not (run / "final.safetensors").exists()
            answer = upload(network.receiver, sender_of(connection="1" * 16), parts_of(content), FINAL)
        assert answer == Answer(1)
        assert (run / "final.safetensors").read_bytes() == content
        assert call(network.receiver, network.sender, Publish(network.window.confirmed, FINAL)).number == 1
        assert network.lost or os.listdir(run) == ["final.safetensors"]


@given(st.integers(0, 3 * WINDOW))
def test_no_more_parts_than_the_window_are_under_way(count: int) -> None:
    window = SendWindow((CONTENT, memoryview(b"x")) for _ in range(count))
    sent = window.new_parts()
    assert len(sent) == min(count, WINDOW)
    assert window.new_parts() == []
    window.receive(Received(1))
    sent += window.new_parts()
    assert len(window.under_way) <= WINDOW
    assert [part.number for part in sent] == list(range(len(sent)))


def test_received_checkpoint_is_read_back_and_older_ones_are_removed(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path)
    for number in range(1, 6):
        state = state_of(number, 50_000)
        sender = sender_of(connection=f"{number:016x}")
        assert upload(receiver, sender, state_parts(state, number, unsent), CheckpointOf(1, number)) == Answer(1)
    checkpoints = Checkpoints(tmp_path / CHECKPOINTS)
    assert sorted(os.listdir(checkpoints.folder)) == [f"round-{number:08d}" for number in (3, 4, 5)]
    newest = checkpoints.newest()
    assert newest is not None and newest[0] == 5
    assert newest[1].facts == {"number": 5} and newest[1].tensors["w"].eq(5).all()
    assert newest[1].own[2][1]["r"].eq(1).all()
    assert os.listdir(tmp_path) == [CHECKPOINTS]
    asker = sender_of(connection="f" * 16)
    assert call(receiver, asker, HighestRound(1), 1).result == b"5"
    removed = [call(receiver, asker, RemoveOlder(1), number).result for number in (2, 3, 4)]
    assert removed == [b"round-00000003", b"round-00000004", b""]


class Client:
    """A worker's client without a network; the coordinator loses as many uploads as `losses` says."""

    def __init__(self, receiver: FileReceiver) -> None:
        self.receiver, self.losses, self.sent, self.connections = receiver, 0, list[list[str]](), itertools.count()

    def upload(self, target: Any, parts: Any) -> None:
        for _ in range(ATTEMPTS):
            files = [(name, memoryview(bytes(data))) for name, data in parts()]
            self.sent.append(sorted({name for name, _ in files}))
            answer = upload(self.receiver, sender_of(connection=f"{next(self.connections):016x}"), iter(files), target)
            if self.losses:
                self.losses -= 1
            elif answer == Answer(1):
                return
            else:
                assert answer.errno == errno.ECONNRESET
        raise ConnectionResetError(errno.ECONNRESET, "lost")


def test_frozen_tensors_are_sent_once_and_again_when_the_coordinator_has_them_no_more(tmp_path: Path) -> None:
    client = Client(receiver_of(tmp_path))
    remote: Any = RemoteCheckpoints(cast(Any, client), 1)
    folder = tmp_path / CHECKPOINTS
    rest = ["manifest.json", "state.safetensors", "worker-2.safetensors"]
    whole = ["frozen.safetensors", *rest]

    def sent(number: int, base: int = 1) -> list[list[str]]:
        state = state_of(number)
        state.tensors["base"], state.frozen = torch.full((9,), base), frozenset({"base"})
        client.sent.clear()
        remote.write(state, number)
        newest = Checkpoints(folder).newest(pytest.fail)
        assert newest is not None and newest[0] == number and newest[1].tensors["base"].eq(base).all()
        return client.sent

    client.losses = 1
    assert sent(1) == [whole, whole]
    assert sent(2) == sent(3) == [rest]
    assert sent(4, base=2) == [whole]
    shutil.rmtree(folder)
    assert sent(5, base=2) == [rest, whole]
    client.losses = 3
    with pytest.raises(ConnectionResetError):
        sent(6, base=2)
    assert sent(7, base=2) == [whole]


def test_checkpoint_with_a_file_missing_changed_or_added_is_refused(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path)
    parts = [(name, bytes(data)) for name, data in state_parts(state_of(7), 7, unsent)]
    changed = [(name, data.replace(b"number", b"numbre")) for name, data in parts]
    lies = [parts[:-1], parts[1:], changed, [*parts, ("worker-5.safetensors", b"more")], parts[-1:], [("content", b"")]]
    for number, lie in enumerate(lies):
        sent = ((name, memoryview(data)) for name, data in lie)
        answer = upload(receiver, sender_of(connection=f"{number:016x}"), sent, CheckpointOf(1, 7))
        assert answer.problem, lie
    sent = ((name, memoryview(data)) for name, data in parts)
    assert upload(receiver, sender_of(connection="a" * 16), sent, CheckpointOf(1, 8)).problem, "another round"
    assert not (tmp_path / CHECKPOINTS).exists()


ENCODE = msgspec.msgpack.encode
REFUSED = [
    ["Part", 0, "../escaped", b"x"],
    ["Part", 0, "/tmp/escaped", b"x"],
    ["Part", 0, "state.safetensors\n", b"x"],
    ["Part", 0, "worker-1.safetensors/../../x", b"x"],
    ["Part", 0, "run.json", b"x"],
    ["Part", -1, CONTENT, b"x"],
    ["Part", 0, CONTENT, b"x" * (PART_BYTES + 1)],
    ["Call", 1, ["Publish", 1, ["FileOf", 1, "events.jsonl"]]],
    ["Call", 1, ["Publish", 1, ["FileOf", 0, "final"]]],
    ["Call", 1, ["Publish", 1, ["FileOf", "../x", "final"]]],
    ["Call", 1, ["Publish", 1, ["CheckpointOf", 1, -5]]],
    ["Call", 1, ["BeginSection", 2, "x" * 1001, []]],
    ["Call", 1, ["ReadFile", False, ["FileOf", 1, "../run.json"], 0]],
    ["Call", 1, ["ReadFile", False, ["CheckpointFile", 1, 1, 1, "../../join.key"], 0]],
    ["Call", 1, ["ReadFile", "/etc", ["FileOf", 1, "final"], 0]],
    ["Call", 1, ["Shutdown"]],
    [],
    7,
]


@pytest.mark.parametrize("message", REFUSED, ids=range(len(REFUSED)))
def test_message_that_no_worker_sends_is_refused_and_writes_nothing(tmp_path: Path, message: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        receiver_of(run).reply(sender_of().name, ENCODE(message))
    assert os.listdir(tmp_path) == ["run"] and os.listdir(run) == []


def test_other_connections_are_left_to_other_services(tmp_path: Path) -> None:
    for name in (
        b"worker 0.0",
        b"files 0.0",
        b"files 0.0 ../../etc/passwd",
        b"files 0.0 " + b"0" * 17,
        b"files -1.0 x",
    ):
        assert receiver_of(tmp_path).reply(name, b"") is None


def test_worker_that_was_declared_failed_writes_nothing(tmp_path: Path) -> None:
    failed: set[int] = set()
    receiver = receiver_of(tmp_path, accepts=lambda worker, incarnation: incarnation not in failed)
    sender = sender_of()
    assert receiver.take(sender, Part(0, CONTENT, b"x")) == Received(1)
    failed.add(0)
    assert "declared failed" in receiver.take(sender, Part(1, CONTENT, b"x")).problem
    assert "declared failed" in call(receiver, sender, Publish(1, FINAL)).problem
    assert upload(receiver, sender_of(0, "1" * 16, 1), parts_of(b"later"), FINAL) == Answer(1)
    assert os.listdir(tmp_path) == ["final.safetensors"], "the files of the failed worker are removed"


def test_a_worker_cannot_add_to_the_upload_of_another(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path)
    receiver.take(sender_of(0), Part(0, CONTENT, b"x"))
    with pytest.raises(ValueError, match="another worker's upload"):
        receiver.take(sender_of(1), Part(1, CONTENT, b"y"))


def test_a_worker_sends_no_residual_but_its_own(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path)
    assert upload(receiver, sender_of(3), parts_of(b"x"), FileOf(1, "residual", 3)) == Answer(1)
    assert (tmp_path / "residuals/worker-3.safetensors").read_bytes() == b"x"
    sender = sender_of(4, "1" * 16)
    assert "residual of worker 3" in upload(receiver, sender, parts_of(b"y"), FileOf(1, "residual", 3)).problem
    assert (tmp_path / "residuals/worker-3.safetensors").read_bytes() == b"x"


def test_a_worker_that_begins_uploads_without_end_has_three(tmp_path: Path) -> None:
    receiver = receiver_of(tmp_path)
    for number in range(20):
        assert receiver.take(sender_of(connection=f"{number:016x}"), Part(0, CONTENT, b"x")) == Received(1)
        assert len(os.listdir(tmp_path / INCOMING)) <= 3


def test_sizes_and_numbers_of_files_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.checkpoint.file_receiver.LARGEST", 2 * PART_BYTES)
    monkeypatch.setattr("stretto.checkpoint.file_receiver.MAX_FILES", 3)
    receiver = receiver_of(tmp_path)
    assert "more than 120000 bytes" in upload(receiver, sender_of(), parts_of(bytes(2 * PART_BYTES + 1)), FINAL).problem
    many = ((f"worker-{number}.safetensors", memoryview(b"x")) for number in range(4))
    assert "more than 3 files" in upload(receiver, sender_of(connection="1" * 16), many, FINAL).problem
    assert "File exists" in upload(receiver, sender_of(connection="2" * 16), iter_twice(), FINAL).problem
    assert os.listdir(tmp_path) == []


def iter_twice() -> Iterator[tuple[str, memoryview]]:
    for name in ("content", "manifest.json", "content"):
        yield name, memoryview(b"x")


DISK = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_file_uploads import *
run, size = Path(sys.argv[1]), 1 << 20
receiver = receiver_of(run, reserve_bytes=1 << 18)
for number in range(1, 4):
    parts = state_parts(state_of(number, size // 16), number, unsent)
    assert upload(receiver, sender_of(connection=f"{number:016x}"), parts, CheckpointOf(1, number)) == Answer(1)
full = upload(receiver, sender_of(connection="a" * 16), parts_of(bytes(size)), FINAL)
assert full.errno == errno.ENOSPC and "No space" in full.problem, full
assert os.listdir(run) == [CHECKPOINTS], "what was received is removed"
disk = os.statvfs(run)
assert disk.f_bavail * disk.f_frsize > 1 << 18, "room is left for the logs"
asker = sender_of(connection="b" * 16)
assert [call(receiver, asker, RemoveOlder(1), number).result for number in (1, 2, 3)][::2] == [b"round-00000001", b""]
assert upload(receiver, sender_of(connection="c" * 16), parts_of(bytes(size)), FINAL) == Answer(1)
assert (run / "final.safetensors").stat().st_size == size
"""


def test_full_disk_refuses_an_upload_and_leaves_room_for_the_logs(tmp_path: Path) -> None:
    paths = map(str, Path(__file__).parents[:2])
    line = [*own_disk("2m", tmp_path), sys.executable, "-c", DISK, str(tmp_path), *paths]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_files_of_a_run_that_is_resumed_are_read_in_its_folder_only(tmp_path: Path) -> None:
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    for number, folder in enumerate((run, resumed), 1):
        (folder / CHECKPOINTS).mkdir(parents=True)
        Checkpoints(folder / CHECKPOINTS).write(state_of(number), number)
    found = [((1, 1, 1), run), ((1, 2, 1), resumed)]
    for is_resumed, (place, folder) in enumerate(found):
        receiver, sender = receiver_of(run, resumed=resumed), sender_of(connection=f"{is_resumed:016x}")
        answer = call(receiver, sender, ListCheckpoints(bool(is_resumed)))
        assert msgspec.msgpack.decode(answer.result, type=CHECKPOINTS_FOUND) == [place]
        file = CheckpointFile(*place, "manifest.json")
        content = (folder / CHECKPOINTS / f"round-{place[1]:08d}/manifest.json").read_bytes()
        assert call(receiver, sender, ReadFile(bool(is_resumed), file, 0), 2).result == content
        assert call(receiver, sender, ReadFile(bool(is_resumed), file, len(content)), 3).result == b""
        assert call(receiver, sender, ReadFile(bool(is_resumed), FINAL, 0), 4).errno == errno.ENOENT
    assert "resumes no other" in call(receiver_of(run), sender_of(), ListCheckpoints(True)).problem


def test_few_answers_with_parts_of_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "final.safetensors").write_bytes(bytes(READ_BYTES + 5))
    receiver = receiver_of(tmp_path)
    for number in range(100):
        sender = sender_of(connection=f"{number:016x}")
        assert len(call(receiver, sender, ReadFile(False, FINAL, 0)).result) == READ_BYTES
        assert len(call(receiver, sender, ReadFile(False, FINAL, READ_BYTES), 2).result) == 5
    kept = [future.result() for _, future in receiver._calls.values()]
    assert sum(map(len, kept)) <= 16 * READ_BYTES and len(kept) <= 16
    assert len(call(receiver, sender_of(connection="0" * 16), ReadFile(False, FINAL, 0)).result) == READ_BYTES


def test_section_folder_is_made_with_its_facts(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"seed": 3}')
    receiver = receiver_of(tmp_path)
    assert call(receiver, sender_of(), BeginSection(2, "digest", [1])) == Answer(1)
    facts = msgspec.json.decode((tmp_path / "section-2/run.json").read_bytes())
    assert facts == {"seed": 3, "section": 2, "data": "digest", "absent": [1]}
    assert upload(receiver, sender_of(connection="1" * 16), parts_of(b"x"), FileOf(2, "random")) == Answer(1)
    assert (tmp_path / "section-2/final.random").read_bytes() == b"x"
    assert (
        "No such file" in upload(receiver, sender_of(connection="2" * 16), parts_of(b"x"), FileOf(3, "final")).problem
    )
    assert not list(tmp_path.rglob(f"*{PART_SUFFIX}"))
