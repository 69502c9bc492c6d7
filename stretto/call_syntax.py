"""The grammar of option texts: names, calls, quantities with units, strings and phrases, read from one list of words.

A value is a quantity (`10s`, `100Mbit/s`, `0.5`), a string in quotes, a name, or a call with positional and named
values, such as `local_sgd(every=4, how=top_k(0.1))`. A phrase, such as `kill worker 3 at 10s`, is a sequence of words
that its own module lists. Whatever cannot be read is refused by `Words.refused`, with the wrong word marked.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from math import inf
from typing import Any

from stretto.errors import LaunchError, StrettoError, explain
from stretto.units import NUMBER, PLAIN, quantity

WORD = re.compile(r"""\"[^"]*\"|'[^']*'|[^\s,;:=()\[\]{}"']+|\S""")
NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
SIGNED = re.compile(rf"-?{NUMBER}", re.ASCII | re.IGNORECASE)
RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", re.ASCII)
CONSTANTS = {"True": True, "False": False, "None": None}
QUOTES = "\"'"
SMALLEST = 5e-324
"""Smallest float above 0."""
DEEPEST = 50
"""Largest number of calls within calls."""


@dataclass(frozen=True)
class Term:
    """A call, or a constant, which has no name. A name without brackets is a call without values."""

    text: str
    at: int
    """Number of its first word."""
    name: str = ""
    value: Any = None
    args: tuple[Term, ...] = ()
    options: Mapping[str, Term] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the names of this call and of all calls within it."""
        return [self.name, *(name for term in (*self.args, *self.options.values()) for name in term.names())]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name most like `name`, or None if none is similar."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return near[0] if near else None


class Words:
    """The words of an option's text, and the number `at` of the next one.

    A method consumes what it reads, or raises the error about the next word. `expected` and `example` are those of the
    error, unless a method is given others.

    >>> words = Words("5 ms, 20s", "--times", "1s", "times")
    >>> [words.quantity({"s": Decimal(1), "ms": Decimal("0.001")}) for _ in words.listed(",")]
    [0.005, 20.0]
    """

    def __init__(
        self, text: str, option: str, example: str, expected: str, error: type[StrettoError] = LaunchError
    ) -> None:
        self.text, self.option, self.example, self.expected, self._error = text, option, example, expected, error
        self._spans = [match.span() for match in WORD.finditer(text)] + [(len(text), len(text))] * 2
        self.at = 0

    @property
    def next(self) -> str:
        """The next word as typed; "" at the end."""
        return self._word(self.at)

    def _word(self, at: int) -> str:
        return self.text[slice(*self._spans[at])]

    def refused(self, expected: str = "", at: int | None = None, problem: str = "", to_type: str = "") -> StrettoError:
        """Return the error about the next word, or about word number `at`."""
        at = self.at if at is None else at
        wrong, start = self._word(at), self._spans[at][0]
        problem = problem or f"{self.option} cannot be read: {wrong or 'something is missing at the end'}"
        text = "".join(letter if letter.isprintable() else " " for letter in self.text)
        got = f"{text}\n{' ' * (len('  got: ') + start)}{'^' * max(1, len(wrong))}"
        to_type = to_type or f'{self.option} "{self.example}"'
        return self._error(explain(problem, got=got, expected=expected or self.expected, to_type=to_type))

    def skip(self, word: str) -> bool:
        """Consume the next word if it is this one, in any case of letters; return True if it was."""
        matches = self.next.lower() == word
        self.at += matches
        return matches

    def take(self, *words: str, expected: str = "") -> str:
        """Consume the next word, which must be one of these, and return it in lower case."""
        found = self.next.lower()
        if found not in words:
            raise self.refused(expected or " or ".join(words))
        self.at += 1
        return found

    def choose(self, examples: Mapping[str, str]) -> str:
        """Consume one of these names; errors show the example of the name, or of the nearest, from now on."""
        self.example = examples.get(nearest(self.next.lower(), examples) or "", self.example)
        return self.take(*examples, expected=self.expected)

    def listed(self, separator: str) -> Iterator[int]:
        """Yield the number of the first word of each part, which the caller consumes, up to the end of the text."""
        yield self.at
        while self.skip(separator):
            yield self.at
        self.end(f"`{separator}` or the end")

    def end(self, expected: str = "the end") -> None:
        """Raise the error about the next word if the text has not been consumed."""
        if self.next:
            raise self.refused(expected)

    def quantity(
        self, units: Mapping[str, Decimal] = PLAIN, least: float = 0.0, most: float = inf, expected: str = ""
    ) -> float:
        """Consume a finite number between two bounds with one of these units, which may be a word of its own."""
        start = self._spans[self.at][0]
        for last in (self.at, self.at + 1):
            value = quantity(" ".join(self.text[start : self._spans[last][1]].split()), units)
            if value is not None and least <= value <= most:
                self.at = last + 1
                return value
        raise self.refused(expected)

    def whole(self, least: int, most: int, expected: str) -> int:
        """Consume a whole number between two bounds."""
        if not (self.next.isascii() and self.next.isdecimal()):
            raise self.refused(expected)
        return int(self.quantity(PLAIN, least, most, expected))

    def numbers(self) -> Iterator[int]:
        """Consume numbers such as `3`, `0-3` or `0,2,5-7`."""
        while True:
            match = RANGE.fullmatch(self.next)
            found = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
            if not found:
                raise self.refused("numbers such as 3, 0-3 or 0,2,5-7")
            self.at += 1
            yield from found
            if not self.skip(","):
                return

    def typed(self) -> str:
        """Consume a value of any kind up to a comma outside brackets and quotes, and return it as typed."""
        first, depth = self.at, 0
        while self.next and (depth or self.next != ","):
            depth += (self.next in "([{") - (self.next in ")]}")
            if depth < 0 or self.next in QUOTES:
                raise self.refused("matching quotes and brackets")
            self.at += 1
        if depth or self.at == first:
            raise self.refused("matching quotes and brackets" if depth else "a value on each side of a comma")
        return self.text[self._spans[first][0] : self._spans[self.at - 1][1]]

    def within(self) -> str:
        """Consume the rest of the text up to its last bracket, and return it."""
        start, stop = self._spans[self.at][0], self.text.rfind(")")
        while self.next and self._spans[self.at][0] < stop:
            self.at += 1
        return self.text[start:stop].strip()

    def term(self, depth: int = 0) -> Term:
        """Consume a constant, a name, or a call."""
        at, start, word = self.at, self._spans[self.at][0], self.next
        if (constant := self._constant() or self._list()) is not None:
            return constant
        if not NAME.fullmatch(word) or depth > DEEPEST:
            raise self.refused()
        self.at += 1
        args: list[Term] = []
        options: dict[str, Term] = {}
        has_more = self.skip("(") and not self.skip(")")
        while has_more:
            name, is_named = self.next, self._word(self.at + 1) == "="
            if name in options or (not name.isidentifier() if is_named else options):
                raise self.refused("values, then options, each once by its name")
            self.at += 2 * is_named
            value = self.term(depth + 1)
            if is_named:
                options[name] = value
            else:
                args.append(value)
            has_more = self.take(",", ")", expected="`,` or `)`") == "," and not self.skip(")")
        return Term(self.text[start : self._spans[self.at - 1][1]], at, word, None, tuple(args), options)

    def _list(self) -> Term | None:
        """Consume constants in brackets, with commas between them, as in ("users", "items") or ["users"]."""
        closing = {"(": ")", "[": "]"}.get(self.next)
        if closing is None:
            return None
        at, start, values = self.at, self._spans[self.at][0], list[Any]()
        self.at += 1
        while not self.skip(closing):
            if (constant := self._constant()) is None:
                raise self.refused("constants, with commas between them")
            values.append(constant.value)
            if self.next != closing:
                self.take(",", expected=f"`,` or `{closing}`")
        return Term(self.text[start : self._spans[self.at - 1][1]], at, value=tuple(values))

    def _constant(self) -> Term | None:
        text = self.next
        if text in CONSTANTS:
            value: object = CONSTANTS[text]
        elif text[:1] in QUOTES and len(text) > 1:
            value = text[1:-1]
        elif SIGNED.fullmatch(text):
            value = float(text) if not text.removeprefix("-").isdecimal() or len(text) > 400 else int(text)
        else:
            return None
        self.at += 1
        return Term(text, self.at - 1, value=value)
