"""Ways out of a script's loop over its batches, as its source shows them.

A loop that takes all batches of its epoch ends where the epoch does. Workers have to agree on the end of other loops
alone, once one of them has begun to count its steps later than the others.
"""

from __future__ import annotations

import ast
import functools
import linecache
from types import FrameType
from typing import TypeAlias

Place: TypeAlias = tuple[str, int]
"""File and line in which an iteration begins."""
_ENDS = (ast.Return, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await)
_EXITS = ("exit", "_exit", "quit")


def place_of(calls: FrameType) -> Place:
    """Return the place that a frame has reached."""
    return calls.f_code.co_filename, calls.f_lineno


@functools.cache
def is_repeated_by_range(place: Place | None) -> bool:
    """Return True if the source shows a `for` over a range around the loop that begins here."""
    if (found := _loop_at(place)) is None:
        return False
    loop, tree = found
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and node is not loop]
    around = [node for node in loops if loop in ast.walk(node)][-1:]  # the innermost
    return any(isinstance(one, ast.For) and "range(" in ast.unparse(one.iter) for one in around)


@functools.cache
def has_way_out(place: Place | None) -> bool:
    """Return False if the source shows a `for` over all batches, which no statement of its body leaves before."""
    if (found := _loop_at(place)) is None:
        return True
    loop, tree = found
    is_tried = any(isinstance(node, ast.Try) and loop in ast.walk(node) for node in ast.walk(tree))
    return not _has_all(loop.iter) or is_tried or any(_leaves(node) for node in loop.body)


def _loop_at(place: Place | None) -> tuple[ast.For, ast.Module] | None:
    """Return the only `for` whose iteration begins at a place, and all of its file; None if the source shows none."""
    file, line = place or ("", 0)
    tree = _parsed(file) or ast.Module([], [])
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and node.iter.lineno <= line <= (node.iter.end_lineno or 0)
    ]
    return (found[0], tree) if len(found) == 1 else None


@functools.cache
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # another encoding, or another language
        return None


def _has_all(iterated: ast.expr) -> bool:
    """Return True for `loader`, `self.loader` and `enumerate(loader, 1)`; others may stop before their last batch."""
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id == "enumerate":
        iterated = iterated.args[0] if iterated.args else iterated
    return isinstance(iterated, ast.Name | ast.Attribute)


def _leaves(node: ast.AST, is_within: bool = False) -> bool:
    """Return True if a node of a loop's body may leave the loop. `is_within` another one, whose `break` does not."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    if isinstance(node, ast.Break) and not is_within:
        return True
    is_exit = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _EXITS
    if isinstance(node, _ENDS) or is_exit:
        return True
    if isinstance(node, ast.For | ast.While | ast.AsyncFor):
        return any(_leaves(one, True) for one in node.body) or any(_leaves(one, is_within) for one in node.orelse)
    return any(_leaves(one, is_within) for one in ast.iter_child_nodes(node))
