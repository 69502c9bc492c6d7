"""Conformance test of codecs.

Properties of every codec, which `check_codec` tests on many lengths, dtypes, numbers of workers and kinds of data:

- all workers obtain the same tensor, of the input's shape and dtype, within `tolerance` of the mean
- number and kind of the collective operations do not depend on the data; at most `bytes_of` bytes are sent
- NaN and infinity raise NotFiniteError and leave the state unchanged (except in `elementwise` codecs)
- a state can be saved, restored in the same object and in another process, and reset to other members
- zeros stay zeros; denormal and huge numbers, ties, and no numbers at all give finite results
- with `residual`: decoded + residual == residual before + x, also over rounds and workers: no loss beyond rounding
- pairs: decode reads what encode wrote, add_to adds what decode returns, a message contains at most n numbers, and
  other bytes raise TransportError or ValueError, or decode to a tensor of the right shape

Further properties, tested if the codec has the attribute:

- `fixed_size`: exactly `bytes_of` bytes are sent
- `linear`: messages may be added before they are decoded
- `exact_split: bool` (False): each number is decoded exactly or left whole in the residual: their sum is the input
- `conserves: bool` (True): nothing is dropped on purpose; False for clipped residuals, decay, momentum
- `keeps_residual`: `residual(state)` returns its residual, and `add_residual` adds to that
- `unbiased: bool` (False): the expectation of decode(encode(x)) is x
- `contraction(n) -> float | None`: the delta of E ||a - C(a)||^2 <= (1 - delta) ||a||^2 for n numbers
- `needs_theta`: the context has parameters that move
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from stretto.codecs.base import Block, Codec, CodecContext
from stretto.collective_ops import AllReduceMean, Answer, CollectiveCoroutine, CollectiveOp
from stretto.errors import NotFiniteError, RecipeError, TransportError
from stretto.state import Members, copied, load_into, pack, reset, save, unpack

LENGTHS = (0, 1, 5, 64, 1000, 4099)
ROUNDS = 4
DRAWS = 300
SIGMAS = 6.0

Kind = Callable[[int, torch.Generator], Tensor]


def check_codec(
    codec: Codec, tolerance: float = 0.0, dtypes: Sequence[torch.dtype] = (torch.float32,), huge: float = 1e30
) -> None:
    """Test all properties of a codec. Raise AssertionError if one does not hold.

    `tolerance` is the allowed error of the mean in a first round, relative to the sum of the workers' largest numbers.
    Numbers up to `huge` are tested.
    """
    for dtype in dtypes:
        for length in LENGTHS:
            for workers in (1, 2, 3):
                _check_mean(codec, dtype, length, workers, tolerance)
                _check_residual(codec, dtype, length, workers, tolerance)
            _check_handed_over(codec, dtype, length)
        _check_kinds(codec, dtype, tolerance, huge)
        _check_refuses(codec, dtype)
        if codec.pair:
            _check_pair(codec, dtype, tolerance)
            _check_garbage(codec, dtype)
    _check_turns(codec)
    _check_state(codec)
    if getattr(codec, "unbiased", False):
        _check_unbiased(codec)
    if getattr(codec, "contraction", None) is not None:
        _check_contraction(codec)


def hold(conversations: Sequence[CollectiveCoroutine]) -> tuple[list[Tensor], list[list[CollectiveOp]]]:
    """Run the coroutines of all workers in one process; return their results and the operations of each turn."""
    asks = [next(one) for one in conversations]
    turns = [[_kept(ask) for ask in asks]]
    while True:
        answer = _answered(asks)
        said = [_send(one, answer) for one in conversations]
        results = [result for _, result in said if result is not None]
        if results:
            assert len(results) == len(said), "some workers have ended their coroutine and others have not"
            return results, turns
        asks = [ask for ask, _ in said if ask is not None]
        turns.append([_kept(ask) for ask in asks])


def _kept(ask: CollectiveOp) -> CollectiveOp:
    """Return the operation with a copy of its tensor, which the coroutine may overwrite later."""
    return type(ask)(ask.tensor.clone())


def _send(conversation: CollectiveCoroutine, answer: Answer) -> tuple[CollectiveOp | None, Tensor | None]:
    given = answer.clone() if isinstance(answer, Tensor) else [one.clone() for one in answer]
    try:
        return conversation.send(given), None
    except StopIteration as end:
        return None, end.value


def _answered(asks: Sequence[CollectiveOp]) -> Answer:
    kinds = {(type(ask), ask.tensor.dtype) for ask in asks}
    assert len(kinds) == 1, "the workers submit different things in one turn"
    tensors = [ask.tensor.clone() for ask in asks]
    if not isinstance(asks[0], AllReduceMean):
        return tensors
    return torch.stack(tensors).sum(0).to(tensors[0].dtype)


# --- test inputs ----------------------------------------------------------------------------------------------------


class _Crew:
    """Workers with their states, in one process. They exchange all `length` numbers, or those in blocks."""

    def __init__(self, codec: Codec, dtype: torch.dtype, length: int, workers: int, in_blocks: bool = False) -> None:
        self.codec, self.dtype, self.length, self.workers = codec, dtype, length, workers
        self._source = torch.Generator().manual_seed(1000 * workers + length)
        self.thetas = [self.drawn(_normal) for _ in range(workers)]
        self._mask = torch.ones(length, dtype=dtype)
        blocks = _blocks(length) if in_blocks else ()
        if in_blocks:
            self._mask.zero_()
            for block in blocks:
                self._mask[block.start : block.stop] = 1
        like = torch.zeros(length, dtype=dtype)
        contexts = [CodecContext(worker, workers, 7, blocks, theta) for worker, theta in enumerate(self.thetas)]
        self.states = [codec.init_state(like, context) for context in contexts]
        self.residual = [like.clone() for _ in range(workers)]

    def drawn(self, kind: Kind) -> Tensor:
        return kind(self.length, self._source).to(self.dtype)

    def contributions(self, kind: Kind) -> list[Tensor]:
        return [self.drawn(kind) / self.workers * self._mask for _ in range(self.workers)]

    def round(
        self, given: Sequence[Tensor], with_residual: bool = False
    ) -> tuple[list[Tensor], list[list[CollectiveOp]]]:
        """Run one exchange of all workers, then move the parameters."""
        if with_residual:
            told = zip(given, self.states, self.residual, strict=True)
            talks = [self.codec.average(x.clone(), state, residual) for x, state, residual in told]
        else:
            talks = [self.codec.average(x.clone(), state) for x, state in zip(given, self.states, strict=True)]
        move = 0.1 * self.drawn(_normal)
        found = hold(talks)
        for theta in self.thetas:
            theta.add_(move)
        return found

    def surroundings(self) -> tuple[list[Tensor], Tensor]:
        """Return copies of the parameters and of the random state."""
        return [one.clone() for one in self.thetas], self._source.get_state()

    def surround(self, thetas: Sequence[Tensor], source: Tensor) -> None:
        """Set the parameters and the random state."""
        for theta, one in zip(self.thetas, thetas, strict=True):
            theta.copy_(one)
        self._source.set_state(source)

    def residuals(self) -> list[Tensor]:
        """Return the workers' residuals."""
        if not self.codec.keeps_residual:
            return self.residual
        return [kept for one in self.states if (kept := self.codec.residual(one)) is not None]

    def __str__(self) -> str:
        return f"{self.codec} on {self.length} numbers of {self.dtype} from {self.workers} workers"


def _blocks(length: int) -> list[Block]:
    """Return a matrix and a vector with padding between them, if there is room."""
    side, rest = int((length * 0.8) ** 0.5), length // 10
    if length < 64:
        return [Block("all", 0, length, (length,))]
    return [Block("matrix", 0, side * side, (side, side)), Block("vector", length - rest, length, (rest,))]


def _normal(length: int, source: torch.Generator) -> Tensor:
    return torch.randn(length, generator=source)


def _zeros(length: int, source: torch.Generator) -> Tensor:
    return 0 * torch.randn(length, generator=source)


def _ties(length: int, source: torch.Generator) -> Tensor:
    return torch.randint(-1, 2, (length,), generator=source).float()


def _spikes(length: int, source: torch.Generator) -> Tensor:
    return torch.randn(length, generator=source) ** 9 * (torch.rand(length, generator=source) < 0.05)


def _scaled(size: float) -> Kind:
    return lambda length, source: size * (2 * torch.rand(length, generator=source) - 1)


# --- laws of every codec ----------------------------------------------------------------------------------------------


def _check_mean(codec: Codec, dtype: torch.dtype, length: int, workers: int, tolerance: float) -> None:
    for in_blocks in (False, True):
        crew = _Crew(codec, dtype, length, workers, in_blocks)
        given = crew.contributions(_normal)
        results, turns = crew.round(given)
        _same_everywhere(results, given[0], str(crew))
        _near(results[0], given, tolerance, str(crew))
        if not in_blocks:
            _check_bytes(codec, given[0], turns, str(crew))


def _check_bytes(codec: Codec, x: Tensor, turns: Sequence[Sequence[CollectiveOp]], what: str) -> None:
    declared = codec.bytes_of(x)
    for worker in range(len(turns[0])):
        said = sum(turn[worker].tensor.nbytes for turn in turns)
        assert said <= declared, f"{what}: {said} bytes were sent, at most {declared} declared"
        assert said == declared or not codec.fixed_size, f"{what}: {said} bytes were sent, {declared} declared"


def _same_everywhere(results: Sequence[Tensor], like: Tensor, what: str) -> None:
    for one in results:
        assert one.shape == like.shape, f"{what}: shape {tuple(one.shape)}"
        assert one.dtype == like.dtype, f"{what}: dtype {one.dtype}"
        assert torch.equal(one, results[0]), f"{what}: the workers' results differ"


def _near(result: Tensor, given: Sequence[Tensor], tolerance: float, what: str) -> None:
    exact = torch.stack([one.double() for one in given]).sum(0)
    apart = float((result.double() - exact).abs().amax()) if result.numel() else 0.0
    assert apart <= tolerance * _largest(given), f"{what}: off by {apart:.2e}, with {_largest(given):.2e} the largest"


def _largest(given: Sequence[Tensor]) -> float:
    """Return the sum of the workers' largest numbers."""
    return sum(float(one.abs().max()) for one in given if one.numel())


def _check_kinds(codec: Codec, dtype: torch.dtype, tolerance: float, huge: float) -> None:
    kinds = {
        "zeros": _zeros,
        "ties": _ties,
        "spikes": _spikes,
        "denormal numbers": _scaled(1e-40),
        "huge numbers": _scaled(huge),
    }
    for name, kind in kinds.items():
        for length in (1, 1000):
            crew = _Crew(codec, dtype, length, 2)
            what = f"{crew}, {name}"
            for turn in range(2):
                given = crew.contributions(kind)
                results, _turns = crew.round(given)
                _same_everywhere(results, given[0], what)
                assert bool(results[0].isfinite().all()), f"{what}: the result is not finite"
                if name == "zeros":
                    assert not bool(results[0].any()), f"{what}: zeros became nonzero"
                if turn == 0 and name != "denormal numbers":
                    _near(results[0], given, tolerance, what)


def _check_turns(codec: Codec) -> None:
    """Check that kind and number of the operations do not depend on the data."""
    said = []
    for kind in (_zeros, _normal, _scaled(1e4)):
        crew = _Crew(codec, torch.float32, 100, 1)
        rounds = [crew.round(crew.contributions(kind))[1] for _ in range(ROUNDS)]
        said.append([[(type(asks[0]), asks[0].tensor.dtype) for asks in turns] for turns in rounds])
    assert said[0] == said[1] == said[2], f"{codec}: the operations depend on the data"


def _check_refuses(codec: Codec, dtype: torch.dtype) -> None:
    """Check that NaN and infinity reach neither other workers nor the state."""
    if codec.elementwise:
        return
    for wild in (float("nan"), float("inf"), -float("inf")):
        crew = _Crew(codec, dtype, 5000, 1)
        crew.round(crew.contributions(_normal))
        x = crew.drawn(_normal)
        x[2500] = wild
        acts: list[Callable[[], object]] = [lambda: next(codec.average(x.clone(), crew.states[0]))]  # noqa: B023
        if not codec.keeps_residual:
            acts.append(lambda: next(codec.average(x.clone(), crew.states[0], crew.residual[0])))  # noqa: B023
        if codec.pair:
            acts.append(lambda: codec.encode(x.clone(), crew.states[0]))  # noqa: B023
        before, residual = copy.deepcopy(crew.states[0]), crew.residual[0].clone()
        for act in acts:
            _refused(act, f"{crew}: {wild}")
            assert _alike(before, crew.states[0]), f"{crew}: {wild} was refused and the state has changed"
            assert torch.equal(residual, crew.residual[0]), f"{crew}: {wild} was refused and the residual has changed"


def _refused(act: Callable[[], object], what: str) -> None:
    with suppress(NotFiniteError):
        act()
        raise AssertionError(f"{what} was not refused")


def _alike(one: Any, other: Any) -> bool:
    """Return True if two states are equal."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if one is None or isinstance(one, int | float | str | bytes) or callable(one):
        return bool(callable(one) or one == other)
    return type(one) is type(other) and _alike(dict(_held(one)), dict(_held(other)))


def _held(thing: object) -> Iterator[tuple[str, Any]]:
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    yield from ((name, getattr(thing, name)) for name in names if hasattr(thing, name))
    yield from getattr(thing, "__dict__", {}).items()


def _check_handed_over(codec: Codec, dtype: torch.dtype, length: int) -> None:
    """Check that one worker's residual can be added to another's, whole and unchanged."""
    for in_blocks in (False, True):
        crew = _Crew(codec, dtype, length, 2, in_blocks)
        crew.round(crew.contributions(_normal))
        mine, theirs = (codec.residual(one) for one in crew.states)
        if mine is None or theirs is None:
            return
        together, left = mine + theirs, theirs.clone()
        codec.add_residual(crew.states[0], left)
        found = codec.residual(crew.states[0])
        assert found is not None, f"{crew}: the residual has gone"
        assert torch.equal(found, together), f"{crew}: the residual of another worker was not added whole"
        assert torch.equal(left, theirs), f"{crew}: the added residual was changed"


def _check_state(codec: Codec) -> None:
    """Check that a state continues where it was saved, in the same object and in another process; and can be reset."""
    for in_blocks in (False, True):
        crew, other = (_Crew(codec, torch.float32, 1000, 2, in_blocks) for _ in range(2))
        for _ in range(2):
            crew.round(crew.contributions(_normal))
        saved = _saved(crew)
        tensors: dict[str, Tensor] = {}
        file = json.dumps(pack(saved, "codec", tensors))
        for state, one in zip(other.states, unpack(json.loads(file), tensors), strict=True):
            load_into(state, one)
        given = [crew.contributions(_normal) for _ in range(ROUNDS)]
        surroundings = crew.surroundings()
        results = [[crew.round(one)[0][0].clone() for one in given]]
        other.surround(*surroundings)
        results.append([other.round(one)[0][0].clone() for one in given])
        crew.surround(*surroundings)
        for state, one in zip(crew.states, saved, strict=True):
            load_into(state, one)
        results.append([crew.round(one)[0][0].clone() for one in given])
        for where, found in zip(("in another process", "in the same object"), results[1:], strict=True):
            same = all(map(torch.equal, results[0], found))
            assert same, f"{crew}: the rounds after a saved state was restored {where} differ"
        for members in (Members(3), Members(2, joined=True)):
            for state in crew.states:
                reset(state, members)
        _same_everywhere(crew.round(given[0])[0], given[0][0], f"{crew}, after a change of members")


def _saved(crew: _Crew) -> list[Any]:
    try:
        return [copied(save(state, f"the state of {crew.codec}")) for state in crew.states]
    except RecipeError as error:
        raise AssertionError(str(error)) from error


def _check_residual(codec: Codec, dtype: torch.dtype, length: int, workers: int, tolerance: float) -> None:
    """Check that decoded numbers and residuals sum to the inputs."""
    if not getattr(codec, "conserves", not codec.keeps_residual):
        return
    for in_blocks in (False, True):
        crew = _Crew(codec, dtype, length, workers, in_blocks)
        given_all = torch.zeros(length, dtype=torch.float64)
        carried_all = torch.zeros(length, dtype=torch.float64)
        size = 0.0
        for _ in range(ROUNDS):
            given = crew.contributions(_normal)
            before = [one.clone() for one in crew.residuals()]
            results, _turns = crew.round(given, with_residual=not codec.keeps_residual)
            _same_everywhere(results, given[0], str(crew))
            given_all += sum(one.double() for one in given)
            carried_all += results[0].double()
            size += _largest(given) + _largest(before) + _largest(results[:1])
            if workers == 1 and getattr(codec, "exact_split", False):
                kept = torch.equal(results[0] + crew.residuals()[0], before[0] + given[0])
                assert kept, f"{crew}: decoded numbers and residual do not sum to the input, to the bit"
        lost = given_all - carried_all - sum(one.double() for one in crew.residuals())
        allowed = size * (8 * torch.finfo(dtype).eps + (tolerance if codec.linear else 0.0))
        apart = float(lost.abs().amax()) if length else 0.0
        assert apart <= allowed, f"{crew}: {apart:.2e} of a number is lost in {ROUNDS} rounds"


# --- laws of pairs ----------------------------------------------------------------------------------------------------


def _check_pair(codec: Codec, dtype: torch.dtype, tolerance: float) -> None:
    for length in LENGTHS:
        crew = _Crew(codec, dtype, length, 1)
        x = crew.drawn(_normal)
        what = f"{codec}, a message about {length} numbers of {dtype}"
        message = codec.encode(x.clone(), crew.states[0])
        found = codec.decode(message.clone(), torch.full_like(x, 3.0))
        _same_everywhere([found], x, what)
        _near(found, [x], tolerance, what)
        assert message.nbytes <= codec.bytes_of(x), f"{what}: {message.nbytes} bytes, {codec.bytes_of(x)} declared"
        assert 0 <= codec.values_sent(message, x) <= length, (
            f"{what}: it contains {codec.values_sent(message, x)} numbers"
        )
        total = x.clone()
        codec.add_to(total, message.clone())
        assert torch.allclose(total, x + found, rtol=4 * torch.finfo(dtype).eps, atol=1e-6), f"{what}: add_to differs"
        if codec.linear and message.dtype.is_floating_point and length:
            summed = codec.decode(message + 2 * message, x.clone())
            _near(summed, [3 * x], 4 * tolerance, f"{what}: not linear")


def _check_garbage(codec: Codec, dtype: torch.dtype) -> None:
    """Check that other bytes than messages are refused or decode to a tensor. A linear codec's numbers may be any."""
    for length in (0, 1, 64, 1000):
        crew = _Crew(codec, dtype, length, 1)
        message = codec.encode(crew.drawn(_normal), crew.states[0])
        if message.dtype != torch.uint8:
            return
        like = torch.zeros(length, dtype=dtype)
        for garbage in _garbage(message):
            with suppress(TransportError, ValueError):
                found = codec.decode(garbage, like.clone())
                _same_everywhere([torch.nan_to_num(found)], like, f"{codec}, garbage of {garbage.numel()} bytes")


def _garbage(message: Tensor) -> Iterator[Tensor]:
    source = torch.Generator().manual_seed(3)
    long = message.numel()
    for _ in range(60):
        yield torch.randint(256, (_up_to(2 * long + 9, source),), dtype=torch.uint8, generator=source)
        yield message[: _up_to(long, source)].clone()
        yield torch.cat([message, message[: _up_to(long, source)]])
        if long:
            damaged = message.clone()
            damaged[_up_to(min(long, 8) - 1, source)] = _up_to(255, source)
            yield damaged


def _up_to(most: int, source: torch.Generator) -> int:
    return int(torch.randint(most + 1, (1,), generator=source))


# --- promises ---------------------------------------------------------------------------------------------------------


def _draws(codec: Codec, x: Tensor) -> Tensor:
    """Return the decoded x of many rounds: (rounds, n); of a few if it is always the same."""
    crew = _Crew(codec, x.dtype, x.numel(), 1)
    decoded = [crew.round([x])[0][0].clone() for _ in range(ROUNDS)]
    if any(not torch.equal(one, decoded[0]) for one in decoded):
        decoded += [crew.round([x])[0][0].clone() for _ in range(DRAWS - ROUNDS)]
    return torch.stack(decoded).double()


def _check_unbiased(codec: Codec) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(5))
    decoded = _draws(codec, x)
    apart, spread = (decoded.mean(0) - x).abs(), decoded.std(0)
    spread = spread.clamp(min=float(spread.square().mean().sqrt()))  # some may not have been drawn yet
    allowed = SIGMAS * spread / len(decoded) ** 0.5 + 1e-5 * x.abs().max()
    assert bool((apart <= allowed).all()), f"{codec}: biased by {float((apart - allowed).max()):.2e} beyond chance"


def _check_contraction(codec: Codec) -> None:
    for kind in (_normal, _ties, _spikes, _scaled(1.0)):
        for length in (1, 64, 1000):
            x = kind(length, torch.Generator().manual_seed(length))
            delta = codec.contraction(length)  # type: ignore[attr-defined]
            if delta is None or not bool(x.any()):
                continue
            assert 0 < delta <= 1, f"{codec}: a contraction by {delta}"
            left = (_draws(codec, x) - x.double()).square().sum(1) / x.double().square().sum()
            allowed = 1 - delta + SIGMAS * float(left.std()) / len(left) ** 0.5 + 1e-5
            assert float(left.mean()) <= allowed, (
                f"{codec}: {float(left.mean()):.4f} of the square of {length} numbers is left, promised {1 - delta:.4f}"
            )
