"""Contests of the laboratory: consistent ways, targets that are set and checked correctly, and tables."""

import ast
import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.data import TensorDataset

from benchmarks import fewer, figures, lab, learning_tasks, race, tasks
from benchmarks.lab import Terms
from benchmarks.learning_tasks import MNIST, SHAKESPEARE, Course
from benchmarks.measure import save
from benchmarks.pace import ROOT
from benchmarks.race import Race, Way, alone
from benchmarks.ways import CONTESTS, FEWER, WRITING
from stretto import parse

EVERY_WAY = [
    pytest.param(way, id=f"{contest}, {name}") for contest, ways in CONTESTS.items() for name, way in ways.items()
]


def outcome(way, seconds, found=0.975, seed=0):
    evaluations = [{"step": 10, "seconds": seconds or 9.0, "found": found}]
    return lab.Outcome(way, seed, seconds, 10, 5.0, 9.0, [1_000_000, 3_000_000], None, evaluations)


@pytest.mark.parametrize("way", EVERY_WAY)
def test_evaluations_fall_on_steps_where_all_hosts_hold_the_same_model(way: Way):
    assert way.evaluate_every % way.every == 0
    if way.recipe:
        assert getattr(parse(way.recipe).when, "every", 1) in (way.every, 1)


@pytest.mark.parametrize("way", WRITING.values(), ids=WRITING)
def test_epoch_over_the_text_ends_with_an_evaluation(way):
    assert learning_tasks.WRITING_STEPS % way.evaluate_every == 0


def test_optimizer_has_no_momentum_if_the_codec_has():
    for way in (*FEWER.values(), *WRITING.values()):
        if "deep_gradient_compression" in way.recipe:
            assert way.optimizer.momentum == 0


def without_docstrings(tree: ast.AST) -> str:
    """Return the source without docstrings, comments and defaults."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        if isinstance(node, ast.arguments):
            node.defaults = []
    return ast.unparse(tree)


def bodies(file: str, name: str) -> list[str]:
    """Return the statements of a class or function, as `undocumented` prints them."""
    nodes = ast.walk(ast.parse((Path(ROOT) / file).read_text()))
    (found,) = [one for one in nodes if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == name]
    return without_docstrings(found).splitlines()[1:]


@pytest.mark.parametrize(
    ("file", "name", "original"),
    [
        ("benchmarks/tasks.py", "Block", "Block"),
        ("benchmarks/tasks.py", "Writer", "Writer"),
        ("benchmarks/learning_tasks.py", "half_cosine", "pace"),
    ],
)
def test_network_and_schedule_equal_those_of_the_example(file, name, original):
    ours = bodies(file, name)
    assert ours == bodies("examples/shakespeare.py", original)
    assert len(ours) > 1


def test_writer_has_the_documented_size():
    assert sum(one.numel() for one in tasks.Writer().parameters()) == pytest.approx(0.6e6, rel=0.05)


def test_targets_are_inputs_one_character_later():
    x, y = learning_tasks.windows(torch.arange(200), 2).tensors
    assert x.shape == y.shape == (2, tasks.CONTEXT)
    assert torch.equal(x + 1, y)
    assert len(learning_tasks.windows(torch.arange(200))) == 3


@pytest.mark.parametrize(("course", "good", "bad"), [(MNIST, 0.98, 0.97), (SHAKESPEARE, 1.9, 2.1)])
def test_target_is_reached_in_the_direction_of_improvement(course: Course, good, bad):
    middle = (good + bad) / 2
    assert course.is_reached(good, middle) and course.is_reached(middle, middle)
    assert not course.is_reached(bad, middle)
    assert not course.is_reached(good, course.never)


def test_loss_in_parts_equals_the_mean_over_all_windows():
    test = learning_tasks.windows(torch.randint(65, (300 * tasks.CONTEXT,)))
    torch.manual_seed(0)
    model = tasks.Writer(layers=1, width=16)
    x, y = test.tensors
    assert learning_tasks.mean_loss(model, test) == pytest.approx(
        learning_tasks.of_characters(model(x), y).item(), rel=1e-5
    )


def train_sign(folder, monkeypatch, target: float) -> Race:
    """Train one host to predict the sign of a number."""
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "1")
    torch.manual_seed(0)
    x = torch.randn(640, 1)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    course = Course(
        lambda: (data, data), lambda: nn.Linear(1, 2), nn.functional.cross_entropy, learning_tasks.accuracy, True
    )
    one = Race(Way(alone, course=course, passes=3, least_between=10), folder, target, 0)
    alone(one)
    return one


def test_race_ends_at_its_target(tmp_path, monkeypatch):
    done = train_sign(tmp_path, monkeypatch, 0.9)
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert done.steps == lines[-1]["step"] < 60
    assert [line["found"] >= 0.9 for line in lines] == [False] * (len(lines) - 1) + [True]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["evaluations.jsonl", "reached"]


def test_unreachable_target_takes_all_epochs(tmp_path, monkeypatch):
    done = train_sign(tmp_path, monkeypatch, math.inf)
    assert done.steps == 60
    assert not (tmp_path / "reached").exists()


def test_first_way_sets_the_target_of_its_seed():
    terms = Terms(target=None, ways=("allreduce", "diloco", "power_sgd"), contest="shakespeare", seeds=(0, 1))
    assert not Terms(target=None, ways=tuple(WRITING), contest="shakespeare").is_trial
    turns = lab._turns(terms)
    assert turns[0] == ("allreduce", 0) and turns[3] == ("allreduce", 1)
    outcomes = [outcome("allreduce", 5.0, 2.5), outcome("diloco", 5.0, 2.4), outcome("allreduce", 5.0, 2.6, seed=1)]
    assert lab._with_target(terms, 0, []).target is None
    assert lab._with_target(terms, 0, outcomes).target == 2.5
    assert lab._with_target(terms, 1, outcomes).target == 2.6


def test_fastest_recipe_is_compared_with_the_fastest_hook():
    terms = Terms(ways=tuple(FEWER), contest="fewer")
    hooks = [name for name, way in FEWER.items() if way.has_hook]
    assert "torch DDP" not in hooks and len(hooks) >= 2
    outcomes = {name: outcome(name, 100.0) for name in FEWER} | {name: outcome(name, 60.0) for name in hooks}
    outcomes |= {"alone": outcome("alone", 1.0), "torch DDP": outcome("torch DDP", 2.0)}
    outcomes |= {hooks[-1]: outcome(hooks[-1], 30.0), "power_sgd": outcome("power_sgd", 10.0)}
    assert fewer._best(terms, list(outcomes.values())) == {"ours": "power_sgd", "theirs": hooks[-1], "speed": 3.0}
    outcomes["power_sgd"] = outcome("power_sgd", None)
    assert fewer._best(terms, list(outcomes.values()))["speed"] == 0.3


def page_of(folder, monkeypatch, contest: str, **terms) -> str:
    """Return the figures page of a contest with invented results."""
    monkeypatch.setattr(fewer, "save", lambda name, record, trial: save(name, record, trial=trial, folder=folder))
    outcomes = [outcome(name, 8.0 if number else None, 2.5) for number, name in enumerate(CONTESTS[contest])]
    monkeypatch.setattr(fewer.lab, "run_all", lambda terms: (outcomes, 95.0))
    fewer.run(Terms(ways=tuple(CONTESTS[contest]), contest=contest, **terms))
    page = folder / "figures.md"
    page.write_text(f"{figures.BEGIN}{figures.END}")
    figures.write(page, folder)
    return page.read_text()


def test_page_shows_the_contest_fewer(tmp_path, monkeypatch):
    page = page_of(tmp_path, monkeypatch, "fewer")
    assert "| alone |  | SGD 0.05, momentum 0.9 | not reached | 10 | 5.0 | 2.0 |" in page
    assert "| power_sgd | `power_sgd(rank=2)` | SGD 0.05, momentum 0.9 | 8.0 | 10 | 5.0 | 2.0 |" in page
    assert "is 1.00 times as fast as the fastest hook of DDP" in page


def test_page_shows_the_contest_shakespeare(tmp_path, monkeypatch):
    page = page_of(tmp_path, monkeypatch, "shakespeare", target=None)
    assert "a held-out loss of 2.500, that of one epoch of allreduce\n\n`python -m benchmarks shakespeare`" in page
    assert "| allreduce | `allreduce` | AdamW 0.003 | not reached | 10 | 5.0 | 2.0 |" in page


REFERENCES: list[object] = []
"""References to process groups: a group that is freed in its own thread may abort the process."""


def test_power_sgd_hook_uses_one_bucket(tmp_path, monkeypatch):
    """Two or more buckets hang with gloo."""
    bucket_indices, hook = set(), powerSGD_hook.powerSGD_hook

    def counting_hook(state, bucket):
        bucket_indices.add(bucket.index())
        return hook(state, bucket)

    monkeypatch.setattr(powerSGD_hook, "powerSGD_hook", counting_hook)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    REFERENCES.extend([dist.group.WORLD, dist.group.WORLD._get_backend(torch.device("cpu"))])
    try:
        model = race.with_power_sgd_hook(tasks.perceptron(700, 700, 700, 10), 1)
        for _ in range(4):
            model(torch.randn(2, 700)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert bucket_indices == {0}
