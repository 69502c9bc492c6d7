"""State of codecs between rounds: saved, restored, reset and packed, however it is nested."""

from __future__ import annotations

import json
from collections import namedtuple
from typing import Any

import pytest
import torch

from stretto import how
from stretto.errors import RecipeError
from stretto.state import NOTHING, Members, copied, load_into, load_replicated, pack, replicated, reset, save, unpack

Pair = namedtuple("Pair", "first second")


class Counter(how.State):
    transient = ("clock",)
    replicated = ("round",)

    def __init__(self) -> None:
        self.round, self.left = 0, torch.zeros(3)
        self.clock = lambda: 0.0
        self.rest, self.matrices, self.runs, self.scene = 1, [2], {"a": 3}, "names once lost by the walk"

    def reset(self, members: Members) -> None:
        super().reset(members)
        self.workers = members.workers


class ByHand:
    """A class that implements the state protocol without inheriting from a class of stretto."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.numbers = saved["numbers"].clone()


def nested() -> dict[str, Any]:
    return {
        "chain": Pair(Counter(), [Counter(), None]),
        "by hand": (ByHand(), torch.zeros(2), {7: 1.5, "flag": True, "bytes": b"x"}),
        "random": torch.Generator().manual_seed(1),
        "lists": [[1, 2], [torch.zeros(1)]],
    }


def change(state: dict[str, Any], by: float) -> None:
    for counter in (state["chain"].first, state["chain"].second[0]):
        counter.round += int(by)
        counter.left = counter.left + by
        counter.rest, counter.matrices, counter.runs = by, [by, by], {"a": by, "b": by}
        counter.scene = f"changed by {by}"
        counter.later = torch.full((1,), by)
    state["by hand"][0].numbers += by
    state["by hand"][1].add_(by)
    state["by hand"][2][7] = by
    state["lists"][0].append(by)
    state["lists"][1][0] = torch.full((2,), by)
    state["new"] = by
    torch.rand(3, generator=state["random"])


def comparable(state: Any) -> Any:
    """Return all values of a state in comparable form."""
    return json.dumps(plain(save(state)))


def plain(saved: Any) -> Any:
    if isinstance(saved, torch.Tensor):
        return [str(saved.dtype), saved.tolist()]
    if isinstance(saved, dict):
        return [[str(key), plain(value)] for key, value in sorted(saved.items(), key=str)]
    return [plain(one) for one in saved] if isinstance(saved, list | tuple) else str(saved)


def test_restored_nested_state_equals_the_saved_one() -> None:
    state = nested()
    change(state, 1.0)
    saved_copy, before = copied(save(state)), comparable(state)
    change(state, 2.0)
    assert comparable(state) != before
    load_into(state, saved_copy)
    assert comparable(state) == before
    change(state, 3.0)
    load_into(state, saved_copy)
    assert comparable(state) == before, "a restore left the copy whole"


def test_packed_state_can_be_loaded_in_another_process() -> None:
    state, tensors = nested(), {}
    change(state, 1.0)
    text = json.dumps(pack(save({**state, "by hand": state["by hand"][:2]}), "codec", tensors))
    assert all(isinstance(one, torch.Tensor) and name.startswith("codec/") for name, one in tensors.items())
    other = nested()
    change(other, 5.0)
    other["by hand"] = other["by hand"][:2]
    load_into(other, unpack(json.loads(text), tensors))
    assert comparable(other) == comparable({**state, "by hand": state["by hand"][:2]})


def test_copy_reuses_the_memory_of_the_previous_copy() -> None:
    state = nested()
    first = copied(save(state))
    change(state, 1.0)
    second = copied(save(state), first)
    assert second["chain"][0]["left"] is first["chain"][0]["left"]
    assert second["chain"][0]["left"].tolist() == [1, 1, 1]


def test_restore_never_writes_to_a_tensor_that_a_codec_put_into_its_state() -> None:
    state, answer = Counter(), torch.ones(3)
    saved_copy = copied(save(state))
    state.left = answer  # a transport may have to send it again
    load_into(state, saved_copy)
    assert state.left.tolist() == [0, 0, 0]
    assert answer.tolist() == [1, 1, 1]


def test_joining_worker_receives_only_the_replicated_state() -> None:
    mine, theirs = nested(), nested()
    change(mine, 3.0)
    tensors: dict[str, Any] = {}
    load_replicated(theirs, unpack(pack(replicated(mine), "common", tensors), tensors))
    assert theirs["chain"].first.round == theirs["chain"].second[0].round == 3
    assert theirs["chain"].first.left.tolist() == [0, 0, 0]
    load_replicated(None, unpack(pack(replicated(None), "common", tensors), tensors))
    assert replicated({"a": torch.zeros(1)}) is NOTHING


def test_change_of_membership_resets_every_nested_state() -> None:
    state = nested()
    reset(state, Members(5))
    assert state["chain"].first.workers == state["chain"].second[0].workers == 5


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: {"a": [one]}, lambda one: (1, one)])
def test_state_that_cannot_be_saved_is_refused(wrap: Any) -> None:
    class Lost:
        left = 1

    with pytest.raises(RecipeError, match="(?s)can't be saved: it is a Lost.*state_dict and load_state_dict"):
        save(wrap(Lost()), "the state of mine()")
    held = Counter()
    held.lost = Lost()  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match=r"Counter\.lost can't be saved"):
        save(wrap(held))
