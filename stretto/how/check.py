"""The conformance test of codecs: what every codec must do, for those who write one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.how.codec import Codec, SingleRound
from stretto.words import Answer, Ask, Conversation, Mean

LENGTHS = (1, 5, 64, 1000, 4099)


def check_codec(codec: Codec, tolerance: float = 0.0, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
    """Run every law on a codec; AssertionError where one is broken.

    `tolerance` is how far the mean may be from the exact one, relative to the largest number in it.
    """
    for dtype in dtypes:
        for length in LENGTHS:
            for workers in (1, 2, 3):
                _check_mean(codec, dtype, length, workers, tolerance)
    _check_turns(codec)
    if isinstance(codec, SingleRound):
        _check_decodes(codec, tolerance)


def hold(conversations: Sequence[Conversation]) -> tuple[list[Tensor], list[list[Ask]]]:
    """Hold the conversations of all workers in one process; their results, and what was asked in each turn."""
    asks = [next(one) for one in conversations]
    turns = [asks]
    while True:
        answer = _answered(asks)
        said = [_send(one, answer) for one in conversations]
        results = [result for _, result in said if result is not None]
        if results:
            assert len(results) == len(said), "some workers have ended the conversation and others have not"
            return results, turns
        asks = [ask for ask, _ in said if ask is not None]
        turns.append(asks)


def _send(conversation: Conversation, answer: Answer) -> tuple[Ask | None, Tensor | None]:
    try:
        return conversation.send(answer), None
    except StopIteration as end:
        return None, end.value


def _answered(asks: Sequence[Ask]) -> Answer:
    kinds = {(type(ask), ask.tensor.dtype) for ask in asks}
    assert len(kinds) == 1, "the workers ask different things in one turn"
    tensors = [ask.tensor.clone() for ask in asks]
    if not isinstance(asks[0], Mean):
        return tensors
    return torch.stack(tensors).sum(0).to(tensors[0].dtype)


def _contributions(dtype: torch.dtype, length: int, workers: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(1000 * workers + length)
    return [torch.randn(length, generator=source).to(dtype) / workers for _ in range(workers)]


def _check_mean(codec: Codec, dtype: torch.dtype, length: int, workers: int, tolerance: float) -> None:
    given = _contributions(dtype, length, workers)
    exact = torch.stack(given).sum(0)
    shapes = [codec.converse(one.clone(), codec.memory(one)) for one in given]
    results, turns = hold(shapes)
    what = f"{codec} on {length} numbers of {dtype} from {workers} workers"
    for one in results:
        assert one.shape == exact.shape, f"{what}: shape {tuple(one.shape)}"
        assert one.dtype == dtype, f"{what}: dtype {one.dtype}"
        assert torch.equal(one, results[0]), f"{what}: the workers' results differ"
    apart = float((results[0] - exact).abs().max() / exact.abs().max())
    assert apart <= tolerance, f"{what}: off by {apart:.2e} of the largest number"
    declared = codec.bytes_of(given[0])
    for worker in range(workers):
        said = sum(turn[worker].tensor.numel() * turn[worker].tensor.element_size() for turn in turns)
        assert said == declared, f"{what}: {said} bytes were said, {declared} declared"


def _check_turns(codec: Codec) -> None:
    """The kind and number of turns do not depend on the data."""
    said = []
    for x in (torch.zeros(100), torch.ones(100), torch.linspace(-1e4, 1e4, 100)):
        _, turns = hold([codec.converse(x.clone(), codec.memory(x))])
        said.append([(type(asks[0]), asks[0].tensor.dtype) for asks in turns])
    assert said[0] == said[1] == said[2], f"{codec}: what is asked depends on the data"


def _check_decodes(codec: SingleRound, tolerance: float) -> None:
    x = _contributions(torch.float32, 1000, 1)[0]
    memory: Any = codec.memory(x)
    found = codec.decode(codec.encode(x.clone(), memory), x.clone())
    assert float((found - x).abs().max() / x.abs().max()) <= tolerance, (
        f"{codec}: a message does not say what was encoded"
    )
    if codec.linear:
        both = [codec.encode(one.clone(), codec.memory(one)) for one in (x, 2 * x)]
        summed = codec.decode(both[0] + both[1], x.clone())
        assert float((summed - 3 * x).abs().max() / x.abs().max()) <= 4 * tolerance, f"{codec}: not linear"
