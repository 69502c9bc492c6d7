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
from dataclasses import replace
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
            _check_residual_added(codec, dtype, length)
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


def hold(coroutines: Sequence[CollectiveCoroutine]) -> tuple[list[Tensor], list[list[CollectiveOp]]]:
    """Run the coroutines of all workers in one process; return their results and the operations of each turn."""
    ops = [next(coroutine) for coroutine in coroutines]
    turns = [[_copy_of(op) for op in ops]]
    while True:
        answer = _answered(ops)
        outcomes = [_send(coroutine, answer) for coroutine in coroutines]
        results = [result for _, result in outcomes if result is not None]
        if results:
            assert len(results) == len(outcomes), "some workers have ended their coroutine and others have not"
            return results, turns
        ops = [op for op, _ in outcomes if op is not None]
        turns.append([_copy_of(op) for op in ops])


def _copy_of(op: CollectiveOp) -> CollectiveOp:
    """Return the operation with a copy of its tensor, which the coroutine may overwrite later."""
    return replace(op, tensor=op.tensor.clone())


def _send(coroutine: CollectiveCoroutine, answer: Answer) -> tuple[CollectiveOp | None, Tensor | None]:
    copied = answer.clone() if isinstance(answer, Tensor) else [tensor.clone() for tensor in answer]
    try:
        return coroutine.send(copied), None
    except StopIteration as end:
        return None, end.value


def _answered(ops: Sequence[CollectiveOp]) -> Answer:
    kinds = {(type(op), op.tensor.dtype) for op in ops}
    assert len(kinds) == 1, "the workers submit different things in one turn"
    tensors = [op.tensor.clone() for op in ops]
    if not isinstance(ops[0], AllReduceMean):
        return tensors
    return torch.stack(tensors).sum(0).to(tensors[0].dtype)


# --- test inputs ----------------------------------------------------------------------------------------------------


class _WorkerGroup:
    """Workers with their states, in one process. They exchange all `length` numbers, or those in blocks."""

    def __init__(self, codec: Codec, dtype: torch.dtype, length: int, workers: int, in_blocks: bool = False) -> None:
        self.codec, self.dtype, self.length, self.workers = codec, dtype, length, workers
        self._source = torch.Generator().manual_seed(1000 * workers + length)
        self.thetas = [self.drawn(_normal) for _ in range(workers)]
        self._mask = torch.ones(length, dtype=dtype, device="cpu")
        blocks = _blocks(length) if in_blocks else ()
        if in_blocks:
            self._mask.zero_()
            for block in blocks:
                self._mask[block.start : block.stop] = 1
        like = torch.zeros(length, dtype=dtype, device="cpu")
        contexts = [CodecContext(worker, workers, 7, blocks, theta) for worker, theta in enumerate(self.thetas)]
        self.states = [codec.init_state(like, context) for context in contexts]
        self.residual = [like.clone() for _ in range(workers)]

    def drawn(self, kind: Kind) -> Tensor:
        return kind(self.length, self._source).to(self.dtype)

    def contributions(self, kind: Kind) -> list[Tensor]:
        return [self.drawn(kind) / self.workers * self._mask for _ in range(self.workers)]

    def round(
        self, inputs: Sequence[Tensor], with_residual: bool = False
    ) -> tuple[list[Tensor], list[list[CollectiveOp]]]:
        """Run one exchange of all workers, then move the parameters."""
        if with_residual:
            arguments = zip(inputs, self.states, self.residual, strict=True)
            coroutines = [self.codec.average(x.clone(), state, residual) for x, state, residual in arguments]
        else:
            coroutines = [self.codec.average(x.clone(), state) for x, state in zip(inputs, self.states, strict=True)]
        move = 0.1 * self.drawn(_normal)
        exchanged = hold(coroutines)
        for theta in self.thetas:
            theta.add_(move)
        return exchanged

    def surroundings(self) -> tuple[list[Tensor], Tensor]:
        """Return copies of the parameters and of the random state."""
        return [theta.clone() for theta in self.thetas], self._source.get_state()

    def surround(self, thetas: Sequence[Tensor], source: Tensor) -> None:
        """Set the parameters and the random state."""
        for theta, stored in zip(self.thetas, thetas, strict=True):
            theta.copy_(stored)
        self._source.set_state(source)

    def residuals(self) -> list[Tensor]:
        """Return the workers' residuals."""
        if not self.codec.keeps_residual:
            return self.residual
        return [residual for state in self.states if (residual := self.codec.residual(state)) is not None]

    def __str__(self) -> str:
        return f"{self.codec} on {self.length} numbers of {self.dtype} from {self.workers} workers"


def _blocks(length: int) -> list[Block]:
    """Return a matrix and a vector with padding between them, if there is room."""
    side, vector_length = int((length * 0.8) ** 0.5), length // 10
    if length < 64:
        return [Block("all", 0, length, (length,))]
    return [
        Block("matrix", 0, side * side, (side, side)),
        Block("vector", length - vector_length, length, (vector_length,)),
    ]


def _normal(length: int, source: torch.Generator) -> Tensor:
    return torch.randn(length, generator=source, device="cpu")


def _zeros(length: int, source: torch.Generator) -> Tensor:
    return 0 * torch.randn(length, generator=source, device="cpu")


def _ties(length: int, source: torch.Generator) -> Tensor:
    return torch.randint(-1, 2, (length,), generator=source, device="cpu").float()


def _spikes(length: int, source: torch.Generator) -> Tensor:
    return torch.randn(length, generator=source, device="cpu") ** 9 * (
        torch.rand(length, generator=source, device="cpu") < 0.05
    )


def _scaled(size: float) -> Kind:
    return lambda length, source: size * (2 * torch.rand(length, generator=source, device="cpu") - 1)


# --- laws of every codec ----------------------------------------------------------------------------------------------


def _check_mean(codec: Codec, dtype: torch.dtype, length: int, workers: int, tolerance: float) -> None:
    for in_blocks in (False, True):
        group = _WorkerGroup(codec, dtype, length, workers, in_blocks)
        inputs = group.contributions(_normal)
        results, turns = group.round(inputs)
        _assert_equal_results(results, inputs[0], str(group))
        _assert_near(results[0], inputs, tolerance, str(group))
        if not in_blocks:
            _check_bytes(codec, inputs[0], turns, str(group))


def _check_bytes(codec: Codec, x: Tensor, turns: Sequence[Sequence[CollectiveOp]], description: str) -> None:
    declared = codec.bytes_of(x)
    for worker in range(len(turns[0])):
        sent_bytes = sum(turn[worker].tensor.nbytes for turn in turns)
        assert sent_bytes <= declared, f"{description}: {sent_bytes} bytes were sent, at most {declared} declared"
        assert sent_bytes == declared or not codec.fixed_size, (
            f"{description}: {sent_bytes} bytes were sent, {declared} declared"
        )


def _assert_equal_results(results: Sequence[Tensor], like: Tensor, description: str) -> None:
    for result in results:
        assert result.shape == like.shape, f"{description}: shape {tuple(result.shape)}"
        assert result.dtype == like.dtype, f"{description}: dtype {result.dtype}"
        assert torch.equal(result, results[0]), f"{description}: the workers' results differ"


def _assert_near(result: Tensor, inputs: Sequence[Tensor], tolerance: float, description: str) -> None:
    exact = torch.stack([x.double() for x in inputs]).sum(0)
    error = float((result.double() - exact).abs().amax()) if result.numel() else 0.0
    assert error <= tolerance * _largest(inputs), (
        f"{description}: off by {error:.2e}, with {_largest(inputs):.2e} the largest"
    )


def _largest(inputs: Sequence[Tensor]) -> float:
    """Return the sum of the workers' largest numbers."""
    return sum(float(x.abs().max()) for x in inputs if x.numel())


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
            group = _WorkerGroup(codec, dtype, length, 2)
            description = f"{group}, {name}"
            for turn in range(2):
                inputs = group.contributions(kind)
                results, _turns = group.round(inputs)
                _assert_equal_results(results, inputs[0], description)
                assert bool(results[0].isfinite().all()), f"{description}: the result is not finite"
                if name == "zeros":
                    assert not bool(results[0].any()), f"{description}: zeros became nonzero"
                if turn == 0 and name != "denormal numbers":
                    _assert_near(results[0], inputs, tolerance, description)


def _check_turns(codec: Codec) -> None:
    """Check that kind and number of the operations do not depend on the data."""
    schedules = []
    for kind in (_zeros, _normal, _scaled(1e4)):
        group = _WorkerGroup(codec, torch.float32, 100, 1)
        rounds = [group.round(group.contributions(kind))[1] for _ in range(ROUNDS)]
        schedules.append([[(type(ops[0]), ops[0].tensor.dtype) for ops in turns] for turns in rounds])
    assert schedules[0] == schedules[1] == schedules[2], f"{codec}: the operations depend on the data"


def _check_refuses(codec: Codec, dtype: torch.dtype) -> None:
    """Check that NaN and infinity reach neither other workers nor the state."""
    if codec.elementwise:
        return
    for wild in (float("nan"), float("inf"), -float("inf")):
        group = _WorkerGroup(codec, dtype, 5000, 1)
        group.round(group.contributions(_normal))
        x = group.drawn(_normal)
        x[2500] = wild
        acts: list[Callable[[], object]] = [lambda: next(codec.average(x.clone(), group.states[0]))]  # noqa: B023
        if not codec.keeps_residual:
            acts.append(lambda: next(codec.average(x.clone(), group.states[0], group.residual[0])))  # noqa: B023
        if codec.pair:
            acts.append(lambda: codec.encode(x.clone(), group.states[0]))  # noqa: B023
        state_before, residual = copy.deepcopy(group.states[0]), group.residual[0].clone()
        for act in acts:
            _assert_refused(act, f"{group}: {wild}")
            assert _are_equal(state_before, group.states[0]), f"{group}: {wild} was refused and the state has changed"
            assert torch.equal(residual, group.residual[0]), f"{group}: {wild} was refused and the residual has changed"


def _assert_refused(act: Callable[[], object], description: str) -> None:
    with suppress(NotFiniteError):
        act()
        raise AssertionError(f"{description} was not refused")


def _are_equal(a: Any, b: Any) -> bool:
    """Return True if two states are equal."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if a is None or isinstance(a, int | float | str | bytes) or callable(a):
        return bool(callable(a) or a == b)
    return type(a) is type(b) and _are_equal(dict(_attributes(a)), dict(_attributes(b)))


def _attributes(state: object) -> Iterator[tuple[str, Any]]:
    names = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
    yield from ((name, getattr(state, name)) for name in names if hasattr(state, name))
    yield from getattr(state, "__dict__", {}).items()


def _check_residual_added(codec: Codec, dtype: torch.dtype, length: int) -> None:
    """Check that one worker's residual can be added to another's, whole and unchanged."""
    for in_blocks in (False, True):
        group = _WorkerGroup(codec, dtype, length, 2, in_blocks)
        group.round(group.contributions(_normal))
        first, second = (codec.residual(state) for state in group.states)
        if first is None or second is None:
            return
        expected, added = first + second, second.clone()
        codec.add_residual(group.states[0], added)
        total = codec.residual(group.states[0])
        assert total is not None, f"{group}: the residual has gone"
        assert torch.equal(total, expected), f"{group}: the residual of another worker was not added whole"
        assert torch.equal(added, second), f"{group}: the added residual was changed"


def _check_state(codec: Codec) -> None:
    """Check that a state continues where it was saved, in the same object and in another process; and can be reset."""
    for in_blocks in (False, True):
        group, restored = (_WorkerGroup(codec, torch.float32, 1000, 2, in_blocks) for _ in range(2))
        for _ in range(2):
            group.round(group.contributions(_normal))
        saved = _saved(group)
        tensors: dict[str, Tensor] = {}
        file = json.dumps(pack(saved, "codec", tensors))
        for state, stored in zip(restored.states, unpack(json.loads(file), tensors), strict=True):
            load_into(state, stored)
        inputs = [group.contributions(_normal) for _ in range(ROUNDS)]
        surroundings = group.surroundings()
        results = [[group.round(x)[0][0].clone() for x in inputs]]
        restored.surround(*surroundings)
        results.append([restored.round(x)[0][0].clone() for x in inputs])
        group.surround(*surroundings)
        for state, stored in zip(group.states, saved, strict=True):
            load_into(state, stored)
        results.append([group.round(x)[0][0].clone() for x in inputs])
        for place, sums in zip(("in another process", "in the same object"), results[1:], strict=True):
            are_equal = all(map(torch.equal, results[0], sums))
            assert are_equal, f"{group}: the rounds after a saved state was restored {place} differ"
        for members in (Members(3), Members(2, joined=True)):
            for state in group.states:
                reset(state, members)
        _assert_equal_results(group.round(inputs[0])[0], inputs[0][0], f"{group}, after a change of members")


def _saved(group: _WorkerGroup) -> list[Any]:
    try:
        return [copied(save(state, f"the state of {group.codec}")) for state in group.states]
    except RecipeError as error:
        raise AssertionError(str(error)) from error


def _check_residual(codec: Codec, dtype: torch.dtype, length: int, workers: int, tolerance: float) -> None:
    """Check that decoded numbers and residuals sum to the inputs."""
    if not getattr(codec, "conserves", not codec.keeps_residual):
        return
    for in_blocks in (False, True):
        group = _WorkerGroup(codec, dtype, length, workers, in_blocks)
        input_sum = torch.zeros(length, dtype=torch.float64, device="cpu")
        decoded_sum = torch.zeros(length, dtype=torch.float64, device="cpu")
        size = 0.0
        for _ in range(ROUNDS):
            inputs = group.contributions(_normal)
            residuals_before = [residual.clone() for residual in group.residuals()]
            results, _turns = group.round(inputs, with_residual=not codec.keeps_residual)
            _assert_equal_results(results, inputs[0], str(group))
            input_sum += sum(x.double() for x in inputs)
            decoded_sum += results[0].double()
            size += _largest(inputs) + _largest(residuals_before) + _largest(results[:1])
            if workers == 1 and getattr(codec, "exact_split", False):
                is_exact = torch.equal(results[0] + group.residuals()[0], residuals_before[0] + inputs[0])
                assert is_exact, f"{group}: decoded numbers and residual do not sum to the input, to the bit"
        missing = input_sum - decoded_sum - sum(residual.double() for residual in group.residuals())
        allowed = size * (8 * torch.finfo(dtype).eps + (tolerance if codec.linear else 0.0))
        error = float(missing.abs().amax()) if length else 0.0
        assert error <= allowed, f"{group}: {error:.2e} of a number is lost in {ROUNDS} rounds"


# --- laws of pairs ----------------------------------------------------------------------------------------------------


def _check_pair(codec: Codec, dtype: torch.dtype, tolerance: float) -> None:
    for length in LENGTHS:
        group = _WorkerGroup(codec, dtype, length, 1)
        x = group.drawn(_normal)
        description = f"{codec}, a message about {length} numbers of {dtype}"
        message = codec.encode(x.clone(), group.states[0])
        decoded = codec.decode(message.clone(), torch.full_like(x, 3.0))
        _assert_equal_results([decoded], x, description)
        _assert_near(decoded, [x], tolerance, description)
        assert message.nbytes <= codec.bytes_of(x), (
            f"{description}: {message.nbytes} bytes, {codec.bytes_of(x)} declared"
        )
        assert 0 <= codec.values_sent(message, x) <= length, (
            f"{description}: it contains {codec.values_sent(message, x)} numbers"
        )
        total = x.clone()
        codec.add_to(total, message.clone())
        assert torch.allclose(total, x + decoded, rtol=4 * torch.finfo(dtype).eps, atol=1e-6), (
            f"{description}: add_to differs"
        )
        if codec.linear and message.dtype.is_floating_point and length:
            summed = codec.decode(message + 2 * message, x.clone())
            _assert_near(summed, [3 * x], 4 * tolerance, f"{description}: not linear")


def _check_garbage(codec: Codec, dtype: torch.dtype) -> None:
    """Check that other bytes than messages are refused or decode to a tensor. A linear codec's numbers may be any."""
    for length in (0, 1, 64, 1000):
        group = _WorkerGroup(codec, dtype, length, 1)
        message = codec.encode(group.drawn(_normal), group.states[0])
        if message.dtype != torch.uint8:
            return
        like = torch.zeros(length, dtype=dtype, device="cpu")
        for garbage in _garbage(message):
            with suppress(TransportError, ValueError):
                decoded = codec.decode(garbage, like.clone())
                _assert_equal_results([torch.nan_to_num(decoded)], like, f"{codec}, garbage of {garbage.numel()} bytes")


def _garbage(message: Tensor) -> Iterator[Tensor]:
    source = torch.Generator().manual_seed(3)
    long = message.numel()
    for _ in range(60):
        yield torch.randint(256, (_up_to(2 * long + 9, source),), dtype=torch.uint8, generator=source, device="cpu")
        yield message[: _up_to(long, source)].clone()
        yield torch.cat([message, message[: _up_to(long, source)]])
        if long:
            damaged = message.clone()
            damaged[_up_to(min(long, 8) - 1, source)] = _up_to(255, source)
            yield damaged


def _up_to(largest: int, source: torch.Generator) -> int:
    return int(torch.randint(largest + 1, (1,), generator=source, device="cpu"))


# --- promises ---------------------------------------------------------------------------------------------------------


def _draws(codec: Codec, x: Tensor) -> Tensor:
    """Return the decoded x of many rounds: (rounds, n); of a few if it is always the same."""
    group = _WorkerGroup(codec, x.dtype, x.numel(), 1)
    decoded = [group.round([x])[0][0].clone() for _ in range(ROUNDS)]
    if any(not torch.equal(result, decoded[0]) for result in decoded):
        decoded += [group.round([x])[0][0].clone() for _ in range(DRAWS - ROUNDS)]
    return torch.stack(decoded).double()


def _check_unbiased(codec: Codec) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(5), device="cpu")
    decoded = _draws(codec, x)
    bias, spread = (decoded.mean(0) - x).abs(), decoded.std(0)
    spread = spread.clamp(min=float(spread.square().mean().sqrt()))  # some may not have been drawn yet
    allowed = SIGMAS * spread / len(decoded) ** 0.5 + 1e-5 * x.abs().max()
    assert bool((bias <= allowed).all()), f"{codec}: biased by {float((bias - allowed).max()):.2e} beyond chance"


def _check_contraction(codec: Codec) -> None:
    for kind in (_normal, _ties, _spikes, _scaled(1.0)):
        for length in (1, 64, 1000):
            x = kind(length, torch.Generator().manual_seed(length))
            delta = codec.contraction(length)  # type: ignore[attr-defined]
            if delta is None or not bool(x.any()):
                continue
            assert 0 < delta <= 1, f"{codec}: a contraction by {delta}"
            lost_shares = (_draws(codec, x) - x.double()).square().sum(1) / x.double().square().sum()
            allowed = 1 - delta + SIGMAS * float(lost_shares.std()) / len(lost_shares) ** 0.5 + 1e-5
            assert float(lost_shares.mean()) <= allowed, (
                f"{codec}: {float(lost_shares.mean()):.4f} of the square of {length} numbers is left, "
                f"promised {1 - delta:.4f}"
            )
