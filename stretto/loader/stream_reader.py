"""A stream that is read in its order, and the place in it at which a resumed run continues.

A checkpoint in the middle of an epoch over a stream keeps a `StreamPlace`: the positions that were trained, the random
states with which the stream was begun, and digests of the last batches. The resumed run begins the stream with these
random states and reads it again to its place, or, if the stream has `state_dict` and `load_state_dict`, continues from
the kept state. The digests prove that it is the same stream:

    checkpoint   trained 0 1 2 3 4 5 | 6 7 ...      digests of 4 and 5, the last batches of two workers
    resume       read    0 1 2 3 4 5 |              compared with the digests; the first batch that is dealt is 6

A worker that joins in the middle of an epoch does the same, while the others wait for it between two global steps.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader

from stretto.checkpoint.state_transfer import pack_own, random_states, restore_random_states, unpack_own
from stretto.data.assignment import Range
from stretto.data.stream_order import first_untrained
from stretto.errors import LoaderError, RecipeError, StaysOutError, explain
from stretto.interval import SHARE
from stretto.runtime.device_random import seed_of
from stretto.runtime.event_writer import EventWriter
from stretto.state import pack, save, unpack
from stretto.transport import Transport
from stretto.transport.tensor_bytes import octets

EXCERPT = 1 << 13
"""Numbers at either end of a tensor that enter the digest of a batch."""
SLICE_S = 0.5
"""Seconds for which a worker reads a stream again before it tells the others how far it is."""
SHOWN_S = 5.0
"""Seconds between two lines that show how far a stream was read again."""
JOINS_S = 60.0
"""Seconds that all wait at least for a worker that joins, if it is expected to have read the stream by then."""
LOOK_S = 2.0
"""Seconds of reading after which the rest is estimated."""
KEPT_BYTES = 1 << 26
"""Most bytes of the batches that a worker keeps for others that may fail, where workers do not wait for each other."""
DEEPEST = 6
"""Number of nested containers in a batch, and of nested parts of a data set, that are searched."""


Piece = tuple[int, tuple[tuple[int, int], ...]]
"""Work of a global step: the position of a batch, and the part of it, as the numbers of a part and of all parts."""
Work = tuple[Any, tuple[tuple[int, int], ...], int]
"""The same with the batch in place of its position, and the samples. None is a batch that no other worker can read."""


class StreamState(msgspec.Struct, frozen=True):
    """The `state_dict` of a stream after `position` batches, and the random states then."""

    position: int
    content: bytes
    random: bytes


class StreamPlace(msgspec.Struct, frozen=True):
    """The place in a stream at which a run stopped, as a checkpoint keeps it."""

    workers: int
    """Number of workers that the epoch began with."""
    is_own: bool
    """True if each worker reads a shard of its own: this place is that of one of them."""
    trained: list[Range]
    """Sorted ranges of the positions that were trained, at least in part."""
    counts: dict[int, int]
    """Number of trained batches by worker, as far as one worker knows it."""
    proofs: list[tuple[int, str]]
    """Positions and digests of the last trained batches."""
    start: bytes
    """Random states with which the stream was begun; empty if they are not known."""
    before_last: bytes
    """Random states before the last trained batch, if the stream draws from the generators of the script."""
    state: StreamState | None
    is_over: bool = False
    """True if the epoch has ended: the next one continues the same iterator."""
    splits: bool = False
    """True if all workers had a part of each batch."""
    parts: list[Piece] = []
    """Sorted parts of trained positions that were not trained."""
    samples: dict[int, int] = {}
    """Samples of the epoch that each worker was given, for workers that join."""
    departed: dict[int, int] = {}
    """Samples of the epoch that workers which have failed or left had trained, for workers that join."""
    read: tuple[int, bytes] | None = None
    """Number of batches that a worker has read, and the random states with which it reads on, for workers that join."""

    @property
    def goal(self) -> int:
        """Position of the first batch that is dealt."""
        return min([first_untrained(self.trained), *(position for position, _ in self.parts)])


STREAM_PLACE = msgspec.json.Decoder(StreamPlace)


class StreamDeal(msgspec.Struct, frozen=True):
    """The numbering of the pieces that workers lease of an epoch's stream, for a worker that joins or returns."""

    place: StreamPlace
    """Place from which on the pieces of the stream are numbered; parts of batches are for its number of workers."""
    samples: int
    """Samples of the epoch that were trained before the run was resumed."""


STREAM_DEAL = msgspec.msgpack.Decoder(StreamDeal)


class CommonRandom:
    """The global random generators in a state that all workers share, while they read a stream.

    The state is drawn from a text; without one it is that of this process now.
    """

    def __init__(self, text: bytes | None) -> None:
        self._states = _states()
        if text is not None:
            seed = seed_of(text)
            source = np.random.RandomState(seed % (1 << 32))
            self._states = (
                torch.Generator().manual_seed(seed).get_state(),
                random.Random(seed).getstate(),
                source.get_state(),
            )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Draw from the common state, and continue from this worker's own state afterwards."""
        own = _states()
        _put(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _put(own)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _put(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    kinds = zip(one[2], other[2], strict=True)
    return torch.equal(one[0], other[0]) and one[1] == other[1] and all(np.array_equal(*kind) for kind in kinds)


class StreamReader:
    """The batches of a stream in order, one at a time, each with its position from 0.

    They are made with the `common` random state, or with the generators of the script if there is none. For checkpoints
    it `keeps_last`: an excerpt of the last batch, and the random states before.
    """

    def __init__(
        self,
        loader: Any,
        common: CommonRandom | None = None,
        place: StreamPlace | None = None,
        keeps_last: bool = True,
    ) -> None:
        self._loader, self._common, self._keeps_last = loader, common, keeps_last
        self._batches: Iterator[Any] | None = None
        self._ahead: deque[tuple[Any, tuple[Any, ...] | None]] = deque()
        """Batches that were read before they were taken, with the random states before each."""
        self.position = 0
        """Position of the batch that is read next."""
        self._kept: dict[int, tuple[Any, tuple[Any, ...] | None]] = {}
        """Batches that were read and may be taken later, by their positions."""
        self._sizes: dict[int, int] = {}
        """Bytes of these, where there is a limit."""
        self.earlier = 0
        """Number of batches of an earlier epoch, at the positions before 0."""
        self._keeps_from: int | None = None
        """Position from which on batches are kept; None if none are."""
        self._most: int | None = None
        self._kept_bytes = 0
        self._expected = dict(place.proofs) if place is not None else {}
        self.problem = ""
        """Why this is not the stream that the place is in; empty if it may be."""
        self._restored = {max(self._expected, default=-1): place.before_last} if place and place.before_last else {}
        """Random states by the position of the batch before which they are restored."""
        if place is not None and place.read is not None:
            self._restored |= dict([place.read])
        self._taken: tuple[int, list[Any], tuple[Any, ...] | None] | None = None
        """Position and excerpt of the batch that was taken last, and the random states before it was read."""
        if place is not None and place.start:
            self._restore(place.start)
        self.start = self._random()
        self._after: tuple[Any, ...] | None = None
        """Random states after the last batch, if the stream draws from the generators of the script."""
        self._draws_in_turn = (False, False)
        """True if the script has drawn random numbers between two batches; and if the stream has after that."""
        self._noted: StreamState | None = None
        self._continued: Any = None
        """Owner of the state that was loaded, until a batch was read."""
        if place is not None and place.state is not None:
            self._load(place.state)

    # --- reading ------------------------------------------------------------------------------------------------

    def take(self, position: int) -> Any:
        """Return the batch at a position, and pass those before it; None if the stream has ended before.

        Raises LoaderError for a batch that was read before and was not kept.
        """
        while self.position < position and self.skip():
            pass
        if position < self.position and position not in self._kept:
            raise LoaderError(
                explain(
                    f"batch {position + 1} of the stream was read before, and no worker has it any more",
                    got=f"a stream that was read up to batch {self.position}",
                    expected="batches that are kept until they were trained",
                    to_type="--resume with the run's folder, from its last checkpoint; this is an error in Stretto",
                )
            )
        found = self._kept[position] if position < self.position else self._next()
        if self.problem:
            raise other_stream(self.problem)
        if found is None:
            return None
        batch, before = found
        if self._keeps_last and position >= 0:
            self._taken = position, excerpt(batch), before
        return batch

    def keep_last(self) -> None:
        """Keep an excerpt of the last batch, and the random states before, of the batches that are read from now on."""
        self._keeps_last = True

    def put_before(self, batches: Sequence[Any]) -> int:
        """Put batches of an earlier epoch before all of this stream; return the position of the first."""
        self.earlier += len(batches)
        self._kept |= {number - self.earlier: (batch, None) for number, batch in enumerate(batches)}
        return -self.earlier

    def keep_from(self, position: int | None, most: int | None = None) -> None:
        """Keep all batches from a position on, so that they can be taken again; release those before it, or all.

        Only the last ones are kept if all have more than `most` bytes.
        """
        self._keeps_from, self._most = position, most
        for kept in [one for one in self._kept if position is None or one < position]:
            self.release(kept)

    def release(self, position: int) -> None:
        """Release one kept batch."""
        self._kept.pop(position, None)
        self._kept_bytes -= self._sizes.pop(position, 0)

    def has(self, position: int) -> bool:
        """Return True if the batch at a position can be taken: it is kept, or was not read yet."""
        return position >= self.position or position in self._kept

    def _keep(self, found: tuple[Any, tuple[Any, ...] | None]) -> None:
        self._kept[self.position] = found
        if self._most is not None:
            self._sizes[self.position] = size_of(found[0])
            self._kept_bytes += self._sizes[self.position]
            while self._kept_bytes > self._most and len(self._kept) > 1:
                self.release(next(iter(self._kept)))

    def skip(self) -> bool:
        """Pass one batch. Return False at the end of the stream."""
        return self._next() is not None

    def peek(self, count: int) -> list[Any]:
        """Return the next batches without taking them; fewer at the end of the stream."""
        while len(self._ahead) < count and (found := self._read()) is not None:
            self._ahead.append(found)
        return [batch for batch, _ in list(self._ahead)[:count]]

    def look(self, position: int) -> Any:
        """Return the batch at a position without taking it; None if the stream has ended before."""
        if position < self.position:
            return self._kept[position][0] if position in self._kept else None
        return next(iter(self.peek(position - self.position + 1)[position - self.position :]), None)

    def pass_read_ones(self, transport: Transport) -> int:
        """Pass the batches that any worker has read, which an iterator does not give again; return their number."""
        furthest = max(map(int, transport.all_gather_bytes(str(self.position).encode())))
        while self.position < furthest and self.skip():
            pass
        return furthest

    def _next(self) -> tuple[Any, tuple[Any, ...] | None] | None:
        found = self._ahead.popleft() if self._ahead else self._read()
        if found is None:
            return None
        expected = self._expected.pop(self.position, None)
        if expected is not None and digest_of(excerpt(found[0])) != expected:
            self.problem = f"batch {self.position + 1} is not the batch that was trained there"
        if self._keeps_from is not None and self.position >= self._keeps_from:
            self._keep(found)
        self.position += 1
        return found

    def _read(self) -> tuple[Any, tuple[Any, ...] | None] | None:
        if self._batches is None:
            with self._applied():
                self._batches = iter(self._loader)
        if (restored := self._restored.pop(self.position + len(self._ahead), None)) is not None:
            self._restore(restored)
        before = _states() if self._common is None and self._keeps_last else None
        with self._applied():
            batch = next(self._batches, None)
        if before is not None:
            self._note_draws(before)
        if self._continued is not None:
            owners: list[Any] = [self._continued, getattr(self._continued, "dataset", None)]
            for owner in owners:
                if hasattr(owner, "_starting_state_dict"):
                    owner._starting_state_dict = None  # `datasets` would begin each further epoch there, too
            self._continued = None
        return None if batch is None else (batch, before)

    def _note_draws(self, before: tuple[Any, ...]) -> None:
        """Note which of the script and the stream have drawn random numbers, given the states before this batch."""
        after, by_script, by_stream = _states(), *self._draws_in_turn
        by_script = by_script or (self._after is not None and not _same(self._after, before))
        self._draws_in_turn, self._after = (by_script, by_stream or (by_script and not _same(before, after))), after

    def _applied(self) -> AbstractContextManager[None]:
        return self._common.applied() if self._common is not None else nullcontext()

    # --- the place ----------------------------------------------------------------------------------------------

    @property
    def common_start(self) -> bytes:
        """Random states with which any worker begins the stream; empty if it draws from the generators of a script."""
        return self.start if self._common is not None else b""

    def proof(self) -> tuple[int, str] | None:
        """Return position and digest of the batch that was taken last."""
        return (self._taken[0], digest_of(self._taken[1])) if self._taken is not None else None

    def before_last(self) -> bytes:
        """Return the random states before that batch was read; empty if the stream has random states of its own."""
        before = self._taken[2] if self._taken is not None else None
        if before is None:
            return b""
        now = _states()
        _put(before)
        try:
            return pack_own(random_states(None))
        finally:
            _put(now)

    def state(self) -> StreamState | None:
        """Return the state of the stream after all batches that were read; None if it has none that can be kept."""
        owner = stateful(self._loader)
        if owner is None or self._batches is None:
            return None
        tensors: dict[str, torch.Tensor] = {}
        try:
            content = pack_own(({"stream": pack(save(owner.state_dict()), "stream", tensors)}, tensors))
        except (RecipeError, TypeError, ValueError, OverflowError):  # it holds objects that are not plain
            return None
        return StreamState(self.position + len(self._ahead), content, self._random())

    def note_state(self) -> None:
        """Keep the state of now, if checkpoints are written: that of before the batches that are read next."""
        self._noted = self.state() if self._keeps_last else None

    def state_before(self, position: int) -> StreamState | None:
        """Return the noted state, or else that of now, if the batch at this position is read after it."""
        states = [one for one in (self._noted, self.state()) if one is not None and one.position <= position]
        return states[0] if states else None

    def _load(self, state: StreamState) -> None:
        """Continue from a state, if the stream takes it."""
        owner = stateful(self._loader)
        if owner is not None:
            self._restore(state.random)
            facts, tensors = unpack_own(state.content)
            owner.load_state_dict(unpack(facts["stream"], tensors))
            self._continued = owner
            self.position = state.position

    def share(self) -> tuple[bytes, tuple[int, bytes] | None]:
        """Read on with random states that joining workers share. Return the first ones, and those after the last read.

        The first ones are empty if joining workers can't read the same: the stream and the only worker's script have
        drawn from one generator in turn. None in place of the others before the first batch.
        """
        if self._common is None and self._draws_in_turn[1]:
            return b"", None
        if self._common is None:
            self._common = CommonRandom(None)
        return self.start, (self.position + len(self._ahead), self._random()) if self._batches is not None else None

    def _random(self) -> bytes:
        """Return the random states with which the stream reads next."""
        with self._applied():
            facts, tensors = random_states(self._loader)
        if self._common is not None:
            tensors = {name: one for name, one in tensors.items() if not name.startswith("random/device")}
        return pack_own((facts, tensors))

    def _restore(self, packed: bytes) -> None:
        with self._applied():
            restore_random_states(unpack_own(packed), self._loader)


def stateful(loader: Any) -> Any:
    """Return what keeps the state of a stream: the loader, or its data set if no other process reads it; or None.

    The shuffle buffer of `datasets` is none that a state includes.
    """
    found = loader
    if isinstance(loader, DataLoader) and not hasattr(loader, "state_dict"):
        found = loader.dataset if loader.num_workers == 0 else None
    has_both = all(callable(getattr(found, name, None)) for name in ("state_dict", "load_state_dict"))
    return found if has_both and not _is_buffered(found) else None


def _is_buffered(data: Any) -> bool:
    """Return True for a data set of `datasets` with a shuffle buffer, whose content its state leaves out."""
    for _ in range(DEEPEST):
        data = getattr(data, "_ex_iterable", None) or getattr(data, "ex_iterable", None)
        if "BufferShuffled" in type(data).__name__:
            return True
    return False


def read_to_place(
    reader: StreamReader,
    place: StreamPlace | None,
    transport: Transport,
    clock: Callable[[], float],
    events: EventWriter,
    joins: bool = False,
    alone_to: int | None = None,
) -> None:
    """Read a stream again to its place, with all workers. No worker waits for another one for longer than a batch.

    If workers `joins`, those without a place wait for them, a minute or `SHARE` of the run's time at most; all have
    read the same number of batches then. No other worker waits for a worker that reads `alone_to` a position.
    Raises LoaderError, at every worker, if the stream of any is another one; StaysOutError at a worker that joins.
    """
    goal, began = alone_to if alone_to is not None else place.goal if place is not None else 0, clock()
    gather = transport.all_gather_bytes if alone_to is None else lambda own: [own]
    first, shown, is_there = reader.position, began, False
    may_take_s = max(JOINS_S, SHARE * events.t()) if joins else math.inf
    while not is_there:
        until = clock() + SLICE_S
        while reader.position < goal and not reader.problem and clock() < until:
            if not reader.skip():
                reader.problem = f"it ended after {reader.position} batches, and {goal} of it were trained"
        took_s, read = clock() - began, reader.position - first
        if reader.position < goal and took_s > LOOK_S and took_s * (goal - first) > may_take_s * max(read, 1):
            reader.problem = (
                f"that takes longer than {may_take_s:.0f} s; a stream with state_dict and load_state_dict continues at "
                "its place"
            )
        status = msgspec.msgpack.encode((reader.position, reader.problem))
        found = [msgspec.msgpack.decode(one, type=tuple[int, str]) for one in gather(status)]
        if problem := next((problem for _, problem in found if problem and not joins), ""):
            raise other_stream(problem)
        if reader.problem:
            raise StaysOutError(
                f"this worker can't join in the middle of a stream that it reads again: {reader.problem}", returns=True
            )
        positions = [position for position, problem in found if not problem]
        goal = max(goal, *positions) if joins else goal
        left = goal - min(positions)
        is_there = left <= 0
        if clock() - shown > SHOWN_S and not is_there:
            shown = clock()
            who = "a worker that joins reads" if joins else "reads"
            events.say(f"{who} the stream again: in {shown - began:.0f} s up to {left:,} batches before its place")
    if place is not None and goal:
        how = f"continued from its state after {first:,} batches" if first else "was read again"
        proof = "a digest proves that it is the same" if place.proofs and place.proofs[-1][0] >= first else "unproved"
        where = f"worker {transport.number} has joined" if joins else "the run stopped"
        notice = events.own_notice if joins else events.notice
        notice(f"the stream {how} to batch {goal:,}, where {where}: {proof}")


def other_stream(problem: str) -> LoaderError:
    """Return the error of a stream that is not the one which the resumed run has read."""
    return LoaderError(
        explain(
            "the stream cannot be brought to the place where the run stopped",
            got=problem,
            expected="the same batches in the same order at each start, or state_dict and load_state_dict",
            to_type="--resume-stream skip, to train what the stream gives now as the rest of the epoch; "
            "--resume-stream restart, to begin the epoch and its stream again",
        )
    )


# --- sizes and digests ------------------------------------------------------------------------------------------------


def size_of(batch: Any, depth: int = DEEPEST) -> int:
    """Return about how many bytes a batch has."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch.nbytes
    parts = [*batch.values()] if isinstance(batch, Mapping) else batch
    if isinstance(parts, list | tuple) and depth:
        return sum(size_of(part, depth - 1) for part in parts)
    return sys.getsizeof(batch)


def excerpt(batch: Any, depth: int = DEEPEST) -> list[Any]:
    """Return copies of the ends of everything in a batch, so that the script may change it: no device is waited for."""
    if isinstance(batch, torch.Tensor):
        if batch.layout is not torch.strided:
            return [str(batch.shape)]
        row = batch.detach().reshape(-1)
        return [str(batch.dtype), str(batch.shape), row[:EXCERPT].clone(), row[EXCERPT:][-EXCERPT:].clone()]
    if isinstance(batch, np.ndarray) and not batch.dtype.hasobject:
        plain = np.ascontiguousarray(batch).reshape(-1)
        return [str(batch.dtype), str(batch.shape), plain[:EXCERPT].tobytes(), plain[EXCERPT:][-EXCERPT:].tobytes()]
    if isinstance(batch, Mapping):
        return excerpt([*batch.keys(), *batch.values()], depth)
    if isinstance(batch, list | tuple):
        parts = (excerpt(one, depth - 1) for one in batch) if depth else ()
        return [str(len(batch)), *(piece for part in parts for piece in part)]
    return [repr(batch) if isinstance(batch, str | bytes | int | float | bool | np.generic) else type(batch).__name__]


def digest_of(pieces: Sequence[Any]) -> str:
    """Return the digest of an excerpt."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        plain = octets(piece.cpu()).tobytes() if isinstance(piece, torch.Tensor) else piece
        digest.update(plain.encode(errors="surrogatepass") if isinstance(plain, str) else plain)
    return digest.hexdigest()
