"""Recipes: parsing, printing, refusals and their errors."""

from __future__ import annotations

import dataclasses
import gc
import string
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.codecs import cast, exact
from stretto.errors import RecipeError
from stretto.recipe import named
from stretto.recipe.parser import WORDS, parse
from stretto.recipe.recipe import Recipe
from stretto.recipe.then import Then, add, constant, outer, replace, step
from stretto.recipe.what import gradients, parameters, updates
from stretto.recipe.when import overhead, together
from stretto.recipe.whom import everyone
from stretto.strategies.create import strategy_of
from stretto.strategies.recipe_strategy import RecipeStrategy

POSITIVE = st.floats(1e-6, 10)
CODECS = st.one_of(st.just(exact()), st.sampled_from(["bf16", "fp16"]).map(cast))
EVERY = st.one_of(st.integers(1, 1000), st.builds(overhead, st.floats(0.01, 0.99)))
TOGETHER = st.builds(together, every=EVERY, after=st.integers(0, 50))
OUTER = st.builds(outer, lr=POSITIVE, momentum=st.floats(0, 0.99), nesterov=st.booleans())
RECIPES = st.one_of(
    st.builds(Recipe, what=st.just(gradients()), when=st.just(together()), how=CODECS, then=st.just(step())),
    st.builds(
        Recipe,
        what=st.sampled_from(["average", "keep", "reset"]).map(parameters),
        when=TOGETHER,
        how=CODECS,
        then=st.just(replace()),
    ),
    st.builds(
        Recipe,
        what=st.just(updates()),
        when=TOGETHER,
        whom=st.just(everyone()),
        how=CODECS,
        then=st.one_of(OUTER, st.builds(add, weight=st.builds(constant, POSITIVE))),
    ),
)


@given(RECIPES)
def test_printed_recipe_can_be_parsed(recipe: Recipe) -> None:
    assert parse(str(recipe)) == recipe
    assert parse(recipe.spelled()) == recipe


@pytest.mark.parametrize(
    "text",
    [
        "local_sgd(every=16)",
        "allreduce",
        "diloco(every=50, outer_lr=0.5)",
        'local_sgd(every=4, optimizer_state="keep", after=7, how=cast("bf16"))',
        "diloco(every=overhead(0.05))",
    ],
)
def test_named_recipes_print_as_they_were_typed(text: str) -> None:
    recipe = parse(text)
    assert str(recipe) == text
    assert parse(recipe.spelled()) == recipe


def test_names_need_no_brackets() -> None:
    assert parse("allreduce") == parse("allreduce()") == Recipe()
    assert parse("Recipe(what=gradients, then=step)") == Recipe()


@given(st.text(alphabet=string.printable, max_size=60))
def test_any_text_is_a_recipe_or_a_recipe_error(text: str) -> None:
    message = ""
    try:
        assert isinstance(parse(text), Recipe)
    except RecipeError as error:
        message = str(error)
    assert not message or all(word in message for word in ("got:", "expected:", "try:"))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "local_sgd(every=open('x'))",
        "local_sgd(**{'every': 3})",
        "[local_sgd() for _ in range(9)]",
        "local_sgd.__globals__",
        "local_sgd(every=2**99**99)",
        "a" * 20_000,
        "(" * 5_000,
        "local_sgd(" * 500,
        "",
        "\x00",
    ],
    ids=range(12),
)
def test_code_is_never_run(text: str) -> None:
    with pytest.raises(RecipeError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("locl_sgd", "local_sgd"),
        ("all_reduce()", "allreduce"),
        ("local_sgd(evry=3)", "local_sgd(every=3)"),
        ("diloco(outer_rate=0.1)", "diloco(outer_lr=0.1)"),
        ("local_sgd(every=0)", "at least 1"),
        ("local_sgd(every=-2)", "at least 1"),
        ("local_sgd(every=1.5)", "a whole number"),
        ("local_sgd(every=True)", "a whole number"),
        ('local_sgd(every="16")', "a whole number"),
        ('local_sgd(optimizer_state="avg")', '"average"'),
        ("diloco(outer_momentum=1.0)", "below 1"),
        ("diloco(outer_lr=1e999)", "a number above 0"),
        ('allreduce(how=cast("int8"))', '"bf16" or "fp16"'),
        ("allreduce(how=step())", "an answer to 'how'"),
        ("cast", "missing a required argument: 'to'"),
        ("exact()", "one of five"),
        ("Recipe(what=gradients(), then=replace())", "then= one of step()"),
        ("Recipe(what=updates(), then=step())", "add(), outer()"),
        ("Recipe(what=parameters(), then=outer())", "replace()"),
        ("Recipe(what=gradients(), when=together(every=4))", "no_sync"),
        ("Recipe(whom=neighbours())", "then=mix()"),
        ("Recipe(what=parameters(), whom=neighbours(), then=replace())", "needs the mean of all"),
        ("Recipe(what=parameters(), whom=server(), then=mix())", "Recipe(what=parameters(), then=mix())"),
        ("Recipe(what=parameters(), when=on_arrival(), whom=neighbours(), then=mix())", "when=together()"),
        ("Recipe(what=parameters(), whom=neighbours(), how=top_k(0.1), then=mix())", "how=exact()"),
        ('Recipe(what=parameters(optimizer_state="average"), whom=neighbours(), then=mix())', "what=parameters()"),
        ("local_sgd(every=0.1)", "or overhead(0.1)"),
        ("local_sgd(every=overhead(1.5))", "below 1"),
        ("downpour(every=overhead(0.1))", "a whole number"),
        ("gossip(every=overhead(0.1))", "whom=everyone()"),
        ("Recipe(what=parameters(), when=together(every=overhead(0.1)), whom=server(), then=replace())", "everyone()"),
        ("Recipe(when=together(every=overhead(0.1)))", "no_sync"),
        ("overhead(0.1)", "a plain value"),
        ('gossip(graph="tree")', '"ring" or "torus" or "exponential"'),
    ],
)
def test_inconsistent_answers_are_refused_with_a_correction(text: str, wanted: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text)
    message = str(caught.value)
    assert wanted in message
    assert all(word in message for word in ("got:", "expected:", "try:"))


def test_correction_in_an_error_is_valid() -> None:
    for text in ("Recipe(what=updates(), then=step())", "Recipe(what=parameters(), then=outer())"):
        with pytest.raises(RecipeError) as caught:
            parse(text)
        parse(str(caught.value).partition("try: ")[2])


def test_threads_can_parse_recipes_concurrently() -> None:
    """The garbage collector, called between any two nodes of a syntax tree, lets another thread continue."""
    text = 'Recipe(what=parameters(), when=together(every=5), how=cast("bf16"), then=replace())'
    thresholds = gc.get_threshold()
    gc.callbacks.append(_yield_to_other_threads)
    gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(lambda _: parse(text), range(100)))) == 1
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(_yield_to_other_threads)


def _yield_to_other_threads(phase: str, info: dict[str, int]) -> None:
    time.sleep(0)


def test_equal_answers_make_equal_recipes() -> None:
    assert parse("local_sgd(every=5)") == parse("Recipe(what=parameters(), when=together(every=5), then=replace())")
    assert len({parse("allreduce"), Recipe()}) == 1


def test_catalogue_follows_the_code() -> None:
    entries = {entry.name: entry for entry in named.catalogue()}
    assert set(entries) == set(named.NAMED) <= set(WORDS)
    for entry in entries.values():
        assert set(entry.words) == {"what", "when", "whom", "how", "then"}
        assert entry.sentence.endswith(".")
        assert parse(entry.signature) == named.NAMED[entry.name]()
    assert "2311.08105" in " ".join(entries["diloco"].papers)


@pytest.mark.parametrize("name", sorted(named.NAMED))
def test_the_strategy_of_each_named_recipe_can_be_imported(name: str) -> None:
    assert issubclass(strategy_of(named.NAMED[name]()), RecipeStrategy)


class no_module(Then):
    """An answer whose strategy does not exist."""

    strategy = "no_such_module.Strategy"


class no_strategy(Then):
    """An answer that names something else as its strategy."""

    strategy = "stretto.recipe.recipe.Recipe"


@pytest.mark.parametrize(("then", "got"), [(no_module, "ModuleNotFoundError"), (no_strategy, "<class 'stretto.recipe")])
def test_a_strategy_that_cannot_be_imported_is_one_error(then: type[Then], got: str) -> None:
    recipe = Recipe(what=parameters(), then=dataclasses.dataclass(frozen=True, repr=False)(then)())
    with pytest.raises(RecipeError, match="can't be imported") as caught:
        strategy_of(recipe)
    assert f"got: {got}" in str(caught.value)
    assert "try: strategy = " in str(caught.value)
