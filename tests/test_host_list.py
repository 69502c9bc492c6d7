"""The texts that name the hosts of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import LaunchError
from stretto.host_list import Host, from_file, parse


def test_hosts_with_and_without_numbers_are_read() -> None:
    assert parse("a:2, user@node-1.example.org:4,b") == (Host("a", 2), Host("user@node-1.example.org", 4), Host("b", 1))
    assert parse("a:2,b,a") == (Host("a", 3), Host("b", 1))
    assert parse("") == ()


@pytest.mark.parametrize("text", ["a:", "a:0", "a:x", ",", "a b", "a,,b", "-oProxyCommand", "a:5000", "a:2:3", "$(x)"])
def test_refused_hosts_are_marked(text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse(text)
    assert all(word in str(caught.value) for word in ("got:", "^", "expected:", "try: --hosts")), caught.value


def test_lines_of_a_host_file_have_three_forms(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all of them\n\na\nb:2  # the fast one\nuser@c slots=4\n")
    assert parse(from_file(path)) == (Host("a", 1), Host("b", 2), Host("user@c", 4))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "cannot be read: No such file"),
        ("# none\n", "names no host"),
        ("a slots=x\n", "line 1 of"),
        ("a\nb max=3\n", "line 2 of"),
    ],
)
def test_host_file_that_cannot_be_read_is_explained(tmp_path: Path, text: str | None, cause: str) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError, match=cause) as caught:
        from_file(path)
    assert all(word in str(caught.value) for word in ("got:", "expected:", "try:")), caught.value
