"""Factorisation in blocks: equal bit for bit to one process in the same order; rows that are not held are NaN."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factors import loss_of, made
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from stage_threads import callbacks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stretto.errors import LaunchError, LoaderError, ModelError, RecipeError, ScriptError
from stretto.events import read_events
from stretto.launcher.config import check, settled
from stretto.parallel.block_order import Blocks, blocks_of
from stretto.parallel.blocks import BlockRing
from stretto.parallel.rank_parts import RankContext
from stretto.recipe.layout import blocks
from stretto.recipe.parser import parse_layout
from stretto.run_config import RunConfig
from stretto.strategies.optimizers import Optimizers

SCRIPT = """
import copy, io, os, pathlib, sys, time, torch, stretto
from factors import loss_of, made
from stretto.errors import ScriptError
from stretto.process_config import worker_config
config = worker_config()
model, optimizer, loader = made(sys.argv[1])
def is_whole(model):
    return not any(one.isnan().any() for one in model.state_dict().values())
def evaluate(model):
    assert is_whole(copy.deepcopy(model))
    return {"size": float(model.users.weight.abs().sum())}
def refuses(read):
    try:
        read()
    except ScriptError as error:
        return "within an epoch this process holds its rows" in str(error)
loader = stretto.distribute(model, optimizer, loader, evaluate=evaluate)
next(iter(loader))
assert is_whole(model)
step, trained = 0, set()
for epoch in range(int(sys.argv[2])):
    for batch in loader:
        if sys.argv[3:] == [str(config.rank), str(step + 1)] and config.incarnation == 0:
            while not list(pathlib.Path("run/checkpoints").glob("round-*/manifest.json")):
                time.sleep(0.02)  # it is written in the background
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        step += 1
        held = [(~one.weight.isnan()).all(1) for one in (model.users, model.items)]
        assert all(one.sum() < len(one) for one in held), "all rows are held"
        assert held[0][batch[0]].all() and held[1][batch[1]].all(), "a row of the batch is not held"
        assert refuses(model.state_dict) and refuses(model.users.state_dict) and refuses(optimizer.state_dict)
        assert refuses(lambda: copy.deepcopy(model)) and refuses(lambda: torch.save(model, io.BytesIO()))
    assert not model.users.weight.isnan().any() and is_whole(copy.deepcopy(model))
    torch.save((model, optimizer.state_dict()), io.BytesIO())
    whole = copy.deepcopy(model.state_dict())
stretto.finish()
assert all(torch.equal(one, model.state_dict()[name]) for name, one in whole.items())
"""
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad, once a process
TESTS = str(Path(__file__).resolve().parents[1])
LAYOUT = 'blocks("users, user_bias", "items, item_bias")'
PIECES = LAYOUT.replace(")", ", column_blocks=3)")


def run(
    folder: Path,
    name: str,
    *options: str,
    script: tuple[str, ...],
    text: str = SCRIPT,
    fails: bool = False,
    layout: str = LAYOUT,
) -> Any:
    """Run the script in the layout, and return the run folder; the standard error if it `fails`."""
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "stretto.cli", "run", "--out", name, "--layout", layout, *options]
    path = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "train.py", *script], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else folder / name


def sequential(name: str, ranks: int, epochs: int, pieces: int = 1) -> dict[str, torch.Tensor]:
    """Return the model that one process trains with the same blocks in the same order."""
    model, optimizer, loader = made(name)
    cut = blocks_of(loader, 23, 17, ranks, pieces)
    next(iter(loader))
    for _ in range(epochs):
        drawn = [batch[3].tolist() for batch in loader]
        for batch in cut.arranged(drawn):
            for rank in range(ranks):
                own = [one for one in batch if cut.row_block[one] == rank]
                if own:
                    optimizer.zero_grad()
                    loss_of(model, loader.dataset[own]).backward()
                    optimizer.step()
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


def counts(folder: Path) -> list[Any]:
    """Return how often the samples of each epoch counted."""
    events = read_events(folder / "events.jsonl")
    return [event["sample_counts"] for event in events if event["event"] == "epoch" and not event.get("rank")]


@pytest.mark.parametrize(("optimizer", "ranks"), [("sgd", 2), ("sgd", 4), ("adagrad", 2), ("adagrad", 4)])
def test_blocks_equal_one_process_in_the_same_order_bit_for_bit(tmp_path: Path, optimizer: str, ranks: int) -> None:
    folder = run(tmp_path, "run", "-n", str(ranks), script=(optimizer, "2"))
    expected, found = sequential(optimizer, ranks, 2), load_file(folder / "final.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert counts(folder) == [{"once": 300, "twice": 0, "never": 0, "dropped": 0}] * 2
    rotated = 17 * 5 * 4 // ranks * (1 + (optimizer == "adagrad")) * 2 * (ranks - 1)
    ends = [event for event in read_events(folder / "events.jsonl") if event["event"] == "end"]
    assert len(ends) == ranks
    assert all(rotated < event["bytes_sent"] < rotated + 60_000 for event in ends), (rotated, ends)


@pytest.mark.parametrize(("optimizer", "ranks"), [("sgd", 3), ("adagrad", 2)])
def test_pieces_of_column_blocks_in_files_equal_one_process_in_the_same_order(
    tmp_path: Path, optimizer: str, ranks: int
) -> None:
    folder = run(tmp_path, "run", "-n", str(ranks), script=(optimizer, "2"), layout=PIECES)
    expected, found = sequential(optimizer, ranks, 2, pieces=3), load_file(folder / "final.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert counts(folder) == [{"once": 300, "twice": 0, "never": 0, "dropped": 0}] * 2


BIG = """
import torch, stretto
def resident():
    text, inside, found = open("/proc/self/smaps").read(), False, 0
    for line in text.splitlines():
        if "-" in line.split()[0]:
            inside = "stretto-table-" in line
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found
torch.manual_seed(0)
model = torch.nn.ModuleDict({name: torch.nn.Embedding(40_000, 32, sparse=True) for name in ("user", "item")})
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
users, items = torch.randint(40_000, (2, 60_000))
data = torch.utils.data.TensorDataset(users, items, torch.rand(60_000))
loader = stretto.distribute(model, optimizer, torch.utils.data.DataLoader(data, batch_size=1000, shuffle=True))
whole, most = 2 * 2 * 40_000 * 32 * 4, 0
for user, item, rating in loader:
    optimizer.zero_grad()
    ((model["user"](user) * model["item"](item)).sum(1) - rating).pow(2).sum().backward()
    optimizer.step()
    most = max(most, resident())
    assert most <= whole * (1 / 4 + 1 / 16 + 0.05), (most, whole)
assert most > whole / 16
assert resident() < whole / 4  # whole at this process, in the file
"""


def test_memory_holds_the_rows_and_one_piece_of_the_columns(tmp_path: Path) -> None:
    run(tmp_path, "run", "-n", "2", script=(), text=BIG, layout='blocks("user", "item", column_blocks=4)')


def test_the_model_stays_divided_between_epochs_until_it_is_due_to_be_whole(tmp_path: Path) -> None:
    layout = LAYOUT.replace(")", ", whole_every=2)")
    text = SCRIPT.replace(
        "    assert not model.users",
        "    if epoch % 2 == 0 and epoch < 4:\n        assert refuses(model.state_dict)\n"
        "        assert model.users.weight.isnan().any()\n        continue\n"
        "    stretto.finish() if epoch == 4 else None\n"
        "    assert not model.users",
    ).replace("evaluate=evaluate", "evaluate=evaluate if int(sys.argv[3]) else None")
    expected = sequential("adagrad", 3, 5)
    for evaluates in ("0", "1"):
        folder = run(tmp_path, evaluates, "-n", "3", script=("adagrad", "5", evaluates), text=text, layout=layout)
        found = load_file(folder / "final.safetensors")
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_killed_rank_continues_from_the_last_checkpoint(tmp_path: Path, victim: str) -> None:
    options = ("-n", "2", "--checkpoint-every", "1 rounds")
    folder = run(tmp_path, "run", *options, script=("adagrad", "2", victim, "35"))
    warnings = [event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "warning"]
    assert any("continues from the checkpoint of round" in text for text in warnings), warnings
    expected, found = sequential("adagrad", 2, 2), load_file(folder / "final.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert counts(folder)[-1] == {"once": 300, "twice": 0, "never": 0, "dropped": 0}


LOOP = """
import sys, torch, stretto
from factors import loss_of, made
model, optimizer, loader = made("sgd")
loader = stretto.distribute(model, optimizer, loader)
for epoch in range(2):
    for number, batch in enumerate(loader, 1):
        if sys.argv[1] != "accumulates" or number % 3 == 1:
            optimizer.zero_grad()
        loss_of(model, batch).mul(0.1).backward()
        if sys.argv[1] == "evaluates" and epoch == 0:
            continue
        if sys.argv[1] not in ("accumulates", "steps later") or (sys.argv[1] == "accumulates" and number % 3 == 0):
            optimizer.step()
        if sys.argv[1] == "steps twice":
            optimizer.step()
        if sys.argv[1] == "breaks" and number == 5:
            break
    if sys.argv[1] == "steps later":
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("accumulates", "expected: a step after every batch, or after none, as in an evaluation"),
        ("steps later", "an optimizer steps after the distributed loader has come to its end"),
        ("breaks", "expected: a loop over all batches of an epoch"),
    ],
)
def test_loops_that_would_leave_other_ranks_waiting_end_in_one_error(tmp_path: Path, loop: str, expected: str) -> None:
    shown = run(tmp_path, "run", "-n", "2", "--checkpoint-every", "1 rounds", script=(loop,), text=LOOP, fails=True)
    assert expected in shown
    assert shown.count("expected:") == 1


@pytest.mark.parametrize("loop", ["steps twice", "evaluates"])
def test_loops_with_two_steps_a_batch_or_an_epoch_without_steps_are_saved(tmp_path: Path, loop: str) -> None:
    folder = run(tmp_path, "run", "-n", "3", "--checkpoint-every", "1 rounds", script=(loop,), text=LOOP)
    assert not any(one.isnan().any() for one in load_file(folder / "final.safetensors").values())


def test_another_number_of_processes_continues_after_an_epoch_and_is_refused_within_one(tmp_path: Path) -> None:
    saves = ("--checkpoint-every", "1 rounds", "--keep", "9")
    script = LOOP.replace("range(2)", "range(int(sys.argv[2]))")
    ended = run(tmp_path, "ended", "-n", "3", *saves, script=("plain", "1"), text=script)
    longer = run(tmp_path, "longer", "-n", "2", "--resume", str(ended), script=("plain", "2"), text=script)
    assert counts(longer) == [{"once": 300, "twice": 0, "never": 0, "dropped": 0}]
    last = max((ended / "checkpoints").iterdir())
    shutil.rmtree(last)
    for ranks in ("2", "4"):
        shown = run(
            tmp_path, f"r{ranks}", "-n", ranks, "--resume", str(ended), script=("plain", "2"), text=script, fails=True
        )
        assert "the epoch was begun with another number of processes, or without blocks" in shown
        assert shown.count("expected:") == 1
    run(tmp_path, "same", "-n", "3", "--resume", str(ended), script=("plain", "2"), text=script)


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1),
)
def test_batches_have_each_sample_once_and_no_row_or_column_at_two_ranks(
    parts: int, pieces: int, size: int, pairs: list[tuple[int, int]]
) -> None:
    row, column = (torch.tensor(each) for each in zip(*pairs, strict=True))
    loader = DataLoader(TensorDataset(row, column), batch_size=size)
    cut = blocks_of(loader, 13, 10, parts, pieces)
    batches = cut.arranged([*loader.batch_sampler])  # type: ignore[misc]
    assert sorted(one for batch in batches for one in batch) == list(range(len(pairs)))
    for batch in batches:
        assert len(np.unique(cut.sub_epochs(batch))) == 1
        assert max(np.bincount(cut.row_block[batch])) <= size
        assert all(len(np.unique(cut.piece[own])) == 1 for own in _parts_of(cut, batch))
    if size <= len(pairs):
        assert cut.length(size) == len(batches)


def _parts_of(cut: Blocks, batch: list[int]) -> list[list[int]]:
    return [[one for one in batch if cut.row_block[one] == rank] for rank in {*cut.row_block[batch].tolist()}]


def test_the_layout_has_all_processes_and_is_printed_as_typed(tmp_path: Path) -> None:
    assert parse_layout(LAYOUT) == blocks("users, user_bias", "items, item_bias")
    assert str(parse_layout(LAYOUT)) == LAYOUT
    script = tmp_path / "train.py"
    script.touch()
    found = settled(RunConfig(script, layout=LAYOUT, workers=3))
    assert (found.workers, found.ranks) == (1, 3)
    with pytest.raises(RecipeError, match="expected: whole numbers, at least 1, for column_blocks"):
        parse_layout('blocks("users", "items", column_blocks=0)')
    for text in ('blocks("", "items")', 'blocks("users", "users")', 'blocks("users,", "items")'):
        with pytest.raises(RecipeError, match=r"try: blocks\(\"users, user_bias\""):
            parse_layout(text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"recipe": "local_sgd"}, "expected: no recipe"),
        ({"checkpoint_every": "30s"}, 'try: --checkpoint-every "4 rounds"'),
        ({"checkpoint_every": "4 rounds", "stop_within_s": 9.0}, "got: --stop-within --layout"),
        ({"workers": 1}, f"try: -n 2 --layout '{LAYOUT}'"),
        ({"host": "127.0.0.1"}, "no others can join"),
    ],
)
def test_options_that_blocks_cannot_follow_are_refused(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(LaunchError) as raised:
        check(RunConfig(script, **{"layout": LAYOUT, "workers": 2} | options))
    assert expected in str(raised.value)


class OneRank:
    """Connection of a rank that has no other."""

    rank, ranks = 0, 1


def ring(
    layout: blocks, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, every: int | None = None
) -> BlockRing:
    """Return one rank of a ring."""
    link: Any = OneRank()
    return BlockRing(
        layout, RankContext(model, Optimizers([optimizer]), loader, every, None, 1, link, False, *callbacks(), 20.0)
    )


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda of: torch.optim.SparseAdam(of), "got: SparseAdam"),
        (lambda of: torch.optim.SGD(of, momentum=0.9), "got: SGD with momentum"),
        (lambda of: torch.optim.SGD(of, weight_decay=0.1), "got: SGD with weight_decay"),
        (lambda of: torch.optim.Adagrad(of, lr_decay=0.1), "got: Adagrad with lr_decay"),
    ],
)
def test_optimizers_whose_state_or_step_is_not_of_one_row_are_refused(make: Any, got: str) -> None:
    model, _, loader = made("sgd")
    with pytest.raises(ModelError) as raised:
        ring(blocks("users, user_bias", "items, item_bias"), model, make(list(model.parameters())), loader)
    assert got in str(raised.value)
    assert "try: torch.optim.Adagrad(model.parameters(), lr=0.05)" in str(raised.value)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (blocks("users", "films"), "expected: one of users, items, user_bias, item_bias"),
        (blocks("users", "items"), "user_bias.weight, item_bias.weight in no table"),
        (blocks("users, item_bias", "items, user_bias"), "tables of one side have other numbers of entries"),
        (blocks("items, item_bias", "users, user_bias"), "numbers from 0 to 22 for a table of 17 entries"),
    ],
)
def test_tables_that_do_not_fit_the_model_or_the_data_are_refused(layout: blocks, expected: str) -> None:
    model, optimizer, loader = made("sgd")
    with pytest.raises((ModelError, LoaderError)) as raised:
        ring(layout, model, optimizer, loader)
    assert expected in str(raised.value)


def test_evaluations_by_steps_are_refused() -> None:
    with pytest.raises(ScriptError, match="try: stretto.distribute\\(model, optimizer, loader, evaluate=error\\)"):
        ring(blocks("users, user_bias", "items, item_bias"), *made("sgd"), every=5)


class Stream(IterableDataset[Any]):
    """Samples without numbers."""

    def __iter__(self) -> Any:
        return iter(())


def test_data_without_row_and_column_are_refused() -> None:
    model, optimizer, _ = made("sgd")
    layout = blocks("users, user_bias", "items, item_bias")
    for data in (Stream(), TensorDataset(torch.rand(4, 2), torch.rand(4)), [{"user": 1}]):
        with pytest.raises(LoaderError, match="samples that begin with the number of their row"):
            ring(layout, model, optimizer, DataLoader(data))  # type: ignore[arg-type]
