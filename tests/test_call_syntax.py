"""The grammar of option texts: any text is read or refused with its wrong word marked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.call_syntax import DEEPEST, Term, Words
from stretto.errors import LaunchError

names = st.sampled_from(["local_sgd", "a.b", "_x", "é"])
constants = st.sampled_from(["1", "-2.5", "1e-3", "True", "None", '"text, (1)"', "'='"])
terms = st.recursive(
    constants | names,
    lambda inner: st.builds(
        lambda name, args, options: f"{name}({', '.join([*args, *(f'{key}={one}' for key, one in options.items())])})",
        names,
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=12,
)


def read(text: str) -> Term:
    words = Words(text, "--option", "1", "a value")
    term = words.term()
    words.end()
    return term


def printed(term: Term) -> str:
    values = [*map(printed, term.args), *(f"{name}={printed(one)}" for name, one in term.options.items())]
    return f"{term.name}({', '.join(values)})" if values or term.text.endswith(")") else term.text


@given(terms)
def test_terms_are_read_with_their_texts(text: str) -> None:
    assert read(text).text == text == printed(read(text))


@given(st.text("ab1.,=()[]'\" -e", max_size=20))
def test_any_text_is_read_or_refused_with_a_word_marked(text: str) -> None:
    try:
        read(text)
    except LaunchError as error:
        problem, got, marks = str(error).split("\n")[:3]
        wrong = got[marks.index("^") : marks.rindex("^") + 1]
        assert problem == f"--option cannot be read: {wrong or 'something is missing at the end'}"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("f(a=1, a=2)", "a"),
        ("f(a=1, 2)", "2"),
        ("f(1 2)", "2"),
        ("f(1)(2)", "("),
        ("1_0", "1_0"),
        ("f(x.y=1)", "x.y"),
        ("f(" * (DEEPEST + 2), "f"),
    ],
)
def test_wrong_word_of_a_call_is_marked(text: str, wrong: str) -> None:
    with pytest.raises(LaunchError) as raised:
        read(text)
    assert str(raised.value).startswith(f"--option cannot be read: {wrong}\n")
