"""The plan of a comparison is the question, spelled out run by run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from stretto.compare.trials import Question, Trial, ask, trials, worker_counts
from stretto.errors import LaunchError, RecipeError
from stretto.recipe.parser import parse
from stretto.run_config import RunConfig


def question(**more: Any) -> Question:
    asked = {name: more.pop(name) for name in more.keys() & {"workers", "recipes", "seeds", "target", "layouts"}}
    config = RunConfig(Path("train.py"), **more)
    return Question(config, **({"workers": (4,), "recipes": ("allreduce()",)} | asked))


def test_one_number_of_workers_and_one_seed() -> None:
    assert trials(question()) == [
        Trial("single-process-seed0", None, 1, 1, 0, "single-process-global-batch-4-seed0"),
        Trial("single-process-global-batch-4-seed0", None, 1, 4, 0, None),
        Trial("allreduce-n4-seed0", "allreduce()", 4, 1, 0, "single-process-global-batch-4-seed0"),
    ]


def test_every_number_of_workers_recipe_and_seed_once_and_seed_by_seed() -> None:
    found = trials(question(workers=(1, 2, 4), recipes=("a()", "b(every=2)"), seeds=3))
    assert len(found) == 3 * (1 + 2 + 3 * 2)
    assert len({trial.name for trial in found}) == len(found)
    assert [trial.seed for trial in found] == sorted(trial.seed for trial in found)
    first = [(trial.kind, trial.workers, trial.global_batch_of) for trial in found if trial.seed == 0]
    assert first[:3] == [
        ("single process", 1, 1),
        ("single process (global batch)", 1, 2),
        ("single process (global batch)", 1, 4),
    ]
    assert first[3:] == [(recipe, n, 1) for n in (1, 2, 4) for recipe in ("a()", "b(every=2)")]


def test_each_trial_refers_to_the_global_batch_of_its_workers_and_seed() -> None:
    found = {trial.name: trial for trial in trials(question(workers=(1, 2, 4), seeds=2))}
    assert found["allreduce-n1-seed1"].reference == "single-process-seed1"
    assert found["allreduce-n2-seed1"].reference == "single-process-global-batch-2-seed1"
    assert found["single-process-seed0"].reference == "single-process-global-batch-4-seed0"
    assert all(trial.reference is None or trial.reference in found for trial in found.values())


def test_one_worker_needs_no_global_batch_trial() -> None:
    names = [trial.name for trial in trials(question(workers=(1,)))]
    assert names == ["single-process-seed0", "allreduce-n1-seed0"]


def test_each_layout_is_tried_with_each_recipe_against_as_many_batches_as_it_has_workers() -> None:
    layouts = ("", "pipeline(2)", "pipeline(4)")
    found = trials(question(workers=(4,), recipes=("a()", "b()"), layouts=layouts))
    single, pair, four = found[0].name, *(f"single-process-global-batch-{size}-seed0" for size in (2, 4))
    assert [(trial.kind, trial.workers, trial.reference) for trial in found[3:]] == [
        ("a()", 4, four),
        ("b()", 4, four),
        ("a(), pipeline(2)", 4, pair),
        ("b(), pipeline(2)", 4, pair),
        ("a(), pipeline(4)", 4, single),
        ("b(), pipeline(4)", 4, single),
    ]
    assert [trial.name for trial in found[:3]] == [single, pair, four]
    assert len({trial.name for trial in found}) == len(found)


def test_recipes_with_equal_names_get_different_folders() -> None:
    found = trials(question(recipes=("a(b=1)", "a(b-1)", "a(b/1)", "../../etc")))
    names = [trial.name for trial in found]
    assert len(set(names)) == len(names)
    assert all("/" not in name and not name.startswith(".") for name in names)


def test_the_run_configuration_matches_the_trial(tmp_path: Path) -> None:
    asked = question(args=("--lr", "0.1"), threads=2, timeout_s=9.0, seeds=2)
    alone, joined, recipe = (trial.config(asked, tmp_path) for trial in trials(asked)[3:])
    assert (alone.single_process, alone.global_batch_of, alone.workers, alone.recipe, alone.seed) == (
        True,
        1,
        1,
        None,
        1,
    )
    assert (joined.single_process, joined.global_batch_of, joined.workers) == (True, 4, 1)
    assert (recipe.single_process, recipe.global_batch_of, recipe.workers, recipe.recipe) == (
        False,
        1,
        4,
        "allreduce()",
    )
    for order in (alone, joined, recipe):
        assert (order.args, order.threads, order.timeout_s) == (("--lr", "0.1"), 2, 9.0)
        assert order.keep_states
    assert recipe.out == tmp_path / "allreduce-n4-seed1"


def test_numbers_of_workers_are_sorted_and_unique() -> None:
    assert worker_counts("4") == (4,)
    assert worker_counts("4, 1,2,4") == (1, 2, 4)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1,", "", "1.5", "1;2"])
def test_other_numbers_of_workers_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="expected"):
        worker_counts(text)


def typed(tmp_path: Path, **more: Any) -> Question:
    script = tmp_path / "train.py"
    script.write_text("")
    known = {"workers": "4", "recipes": ["allreduce"], "seeds": 1, "target": None, "layouts": ()}
    asked = {name: more.pop(name, value) for name, value in known.items()}
    return ask(RunConfig(**({"script": script} | more)), **asked)


def test_equal_recipes_are_run_once(tmp_path: Path) -> None:
    asked = typed(tmp_path, recipes=["allreduce", "local_sgd(every=8)", "allreduce()"])
    assert asked.recipes == (str(parse("allreduce")), "local_sgd(every=8)")


def test_layouts_are_run_once_each_with_allreduce_unless_a_recipe_is_given(tmp_path: Path) -> None:
    layouts = ["pipeline(stages=2)", "whole()", "pipeline(2)"]
    asked = typed(tmp_path, recipes=[], layouts=layouts)
    assert (asked.recipes, asked.layouts) == ((str(parse("allreduce")),), ("pipeline(2)", ""))
    assert [trial.config(asked, tmp_path).layout for trial in trials(asked)[-2:]] == ["pipeline(2)", "whole()"]
    assert asked.describe()["layouts"] == ["pipeline(2)"]
    assert typed(tmp_path).layouts == ("",)


def test_the_command_repeats_whole_workers_beside_other_layouts(tmp_path: Path) -> None:
    asked = typed(tmp_path, layouts=["whole()", "sharded(over=2)"])
    words = asked.command()
    assert [after for before, after in itertools.pairwise(words) if before == "--layout"] == ["whole()", "sharded(2)"]
    assert "--layout" not in typed(tmp_path).command()


def test_servers_apply_to_recipes_with_a_parameter_server(tmp_path: Path) -> None:
    recipes = ["allreduce", "async_sgd(weight=0.5)", "async_sgd(weight=0.5, shards=4)", "stale_synchronous"]
    asked = typed(tmp_path, recipes=recipes, servers=3)
    first, second, third = asked.recipes
    assert first == str(parse("allreduce"))
    assert [parse(text).shards for text in (second, third)] == [3, 3]
    assert second == "async_sgd(weight=0.5, shards=3)"
    names = {trial.recipe for trial in trials(asked)}
    assert names == {None, first, second, third}
    assert typed(tmp_path, recipes=recipes, servers=None).recipes[2] == "async_sgd(weight=0.5, shards=4)"


def test_baselines_have_no_stragglers(tmp_path: Path) -> None:
    asked = typed(tmp_path, stragglers="1:2.0,3:5")
    assert [trial.config(asked, tmp_path).stragglers for trial in trials(asked)] == [None, None, "1:2.0,3:5"]
    assert asked.describe()["stragglers"] == "1:2.0,3:5"
    assert asked.command()[-3:-1] == ["--stragglers", "1:2.0,3:5"]


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"recipes": []}, LaunchError, "no --recipe"),
        ({"recipes": ["alreduce"]}, RecipeError, "allreduce"),
        ({"recipes": ["__import__('os').system('true')"]}, RecipeError, "expected"),
        ({"seeds": 0}, LaunchError, "--seeds"),
        ({"target": "accuracy"}, LaunchError, "--target"),
        ({"threads": 0}, LaunchError, "threads"),
        ({"timeout_s": 0.0}, LaunchError, "timeout"),
        ({"servers": 2}, LaunchError, "no recipe here has a parameter server"),
        ({"recipes": ["async_sgd"], "servers": 0}, LaunchError, "the number of servers cannot be 0"),
        ({"recipes": ["async_sgd"], "servers": 300}, RecipeError, "at most 256"),
        ({"stragglers": "4:2"}, LaunchError, "there is no worker 4 of 4"),
        ({"stragglers": "3:2", "workers": "2,4"}, LaunchError, "there is no worker 3 of 2"),
        ({"stragglers": "fast"}, LaunchError, "--stragglers cannot be"),
        ({"layouts": ["pipeline(stages=3)"]}, LaunchError, "4 processes cannot be divided into workers of 3"),
        ({"layouts": ["pipelin(3)"]}, RecipeError, "pipeline"),
        ({"layouts": ['blocks("a", "b")']}, LaunchError, "no recipe says what else"),
        ({"script": Path("nowhere.py")}, LaunchError, "nowhere"),
    ],
)
def test_invalid_questions_are_refused_before_any_run_starts(
    tmp_path: Path, more: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        typed(tmp_path, **more)


def test_the_command_repeats_the_question() -> None:
    asked = question(workers=(1, 2), recipes=("a()", "b(every=2)"), seeds=3, args=("--n", "1"))
    assert asked.command() == [
        *("stretto", "compare", "-n", "1,2", "--recipe", "a()", "--recipe", "b(every=2)"),
        *("--seeds", "3", "train.py", "--n", "1"),
    ]
