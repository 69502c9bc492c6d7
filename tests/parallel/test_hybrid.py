"""Replicas in pipeline stages train under a recipe as whole workers do: rank i of each exchanges with rank i."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import mostly_long
from layout_runs import RECIPES, tolerance
from replica_threads import DATA, in_stages, train, with_momentum
from stage_threads import joined, largest_difference
from staged_net import loss_of, make_net
from thread_workers import run_workers
from torch.utils.data import DataLoader

import stretto
from stretto.events import read_events


@pytest.mark.parametrize("recipe", mostly_long(RECIPES, short=(0, 1, 2, 4, 6, 7)))
def test_replicas_in_stages_equal_whole_workers(recipe: str, tmp_path: Path) -> None:
    nets, evaluations = in_stages(2, 2, recipe, 'pipeline(2, split="blocks.1")', run=tmp_path)
    wholes = [make_net().double() for _ in range(2)]
    expected = run_workers(2, lambda worker: train(wholes[worker]), recipe)
    assert largest_difference(joined(nets), joined(wholes[:1])) < tolerance(recipe)
    assert max(abs(one - expected[0]) for one in evaluations) < tolerance(recipe)
    texts = [one["text"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "warning"]
    assert not any("encodes the parameters" in text for text in texts), texts


def test_one_replica_in_measured_stages_equals_a_single_process() -> None:
    nets, _ = in_stages(1, 3, "allreduce", "pipeline(3, micro_batches=2)")
    whole = make_net().double()
    run_workers(1, lambda _: train(whole), "allreduce")
    assert largest_difference(joined(nets), joined([whole])) < 1e-12


def test_a_layout_of_the_script_runs_whole_in_a_single_process() -> None:
    nets = [make_net() for _ in range(2)]
    for net, layout in zip(nets, (None, "pipeline(stages=4)"), strict=True):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6), layout=layout)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            optimizer.step()
        stretto.finish()
    assert largest_difference(joined(nets[:1]), joined(nets[1:])) == 0.0


def test_a_layout_of_the_script_that_the_workers_do_not_have_is_refused() -> None:
    def work(_worker: int) -> None:
        net = make_net()
        stretto.distribute(net, torch.optim.SGD(net.parameters()), [], layout="pipeline(stages=2)")

    with pytest.raises(stretto.errors.RecipeError, match=r'try: stretto run -n 4 --layout "pipeline\(2\)"'):
        run_workers(2, work)


@pytest.mark.parametrize(
    ("asked", "scripted", "expected"),
    [
        (
            "pipeline(2)",
            "pipeline(2, micro_batches=7)",
            ["the layout asked for, pipeline(2), goes before the script's"],
        ),
        ("whole()", "pipeline(2)", []),
    ],
)
def test_the_layout_asked_for_goes_before_that_of_the_script(
    asked: str, scripted: str, expected: list[str], tmp_path: Path
) -> None:
    def work(net: Any) -> None:
        loader: Any = stretto.distribute(net, with_momentum(net), DataLoader(DATA, batch_size=6), layout=scripted)
        for x, y in loader:
            loss_of(net(x), y).backward()
        stretto.finish()

    if asked == "whole()":
        run_workers(2, lambda _: work(make_net()), "allreduce", layout=asked, run=tmp_path)
    else:
        in_stages(2, 2, "allreduce", asked, work, run=tmp_path)
    texts = [one["text"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "warning"]
    assert [text[: len(one)] for text in texts for one in expected if "goes before" in text] == expected


@pytest.mark.parametrize("codec", mostly_long(("low_rank(2)", "error_feedback(top_k(0.1))"), short=(0,)))
def test_the_log_has_the_split_and_what_hooks_and_codecs_see(codec: str, tmp_path: Path) -> None:
    def work(net: Any) -> None:
        hooks = [net.register_forward_hook(lambda *found: seen.append(float(found[2].sum().detach())))]
        hooks.append(net.blocks[3].register_forward_hook(lambda *_: None))
        train(net)
        assert len(hooks) == 2

    seen: list[float] = []
    in_stages(2, 2, f"allreduce(how={codec})", "pipeline(2)", work, run=tmp_path)
    texts = [one["text"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "warning"]
    split = r"pipeline: stage 0 from embed \(.* ms\), stage 1 from .* ms\); balance [\d.]+; next best: from .*"
    assert sum(bool(re.fullmatch(split, text)) for text in texts) == 1, texts
    assert sum("forward hooks of blocks.3 run in each micro-batch" in text for text in texts) == 1, texts
    assert sum("encodes the parameters of each stage apart" in text for text in texts) == 1, texts
    assert seen
