"""Traps of a script, found before hours are spent: a look at the source, and a short run of two workers.

The source shows what only a resume or a long run would: counters, updates by hand, a best value that is forgotten. The
run, in private files, shows the rest: files that several workers write, loops of unequal length, layers that differ
among workers, and any error of the script.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from stretto.errors import LaunchError, LogError, RunFailedError, explain
from stretto.events import Event, read_events
from stretto.interval import NEVER
from stretto.launcher.entry import file_of
from stretto.launcher.local import run as run_locally
from stretto.launcher.private_files import PrivateFiles
from stretto.launcher.progress_display import ProgressDisplay
from stretto.launcher.script_watch import several_write
from stretto.launcher.signals import Stopped
from stretto.recipe.layout import whole
from stretto.recipe.parser import parse_layout
from stretto.run_config import RunConfig

WORKERS, EPOCHS, LIMIT_S = 2, 2, 60.0
"""Workers of the run, and the epochs and the seconds of training after which it ends."""
LONGEST_START_S = 300.0
"""Longest time until the training begins."""
LEAVE_S = 10.0
"""Time for workers to leave at the end of the check."""
WRITES = ("save", "save_file", "save_model", "save_pretrained", "save_checkpoint", "dump")
"""Names of functions that save a model."""
IN_PLACE = ("add_", "sub_", "addcmul_", "addcdiv_")
"""Names of methods that add to a tensor."""
LAST = "stretto.is_last_batch()"
STEPS = "stretto.steps() in place of the counter: it counts the global batches of the whole run"
KEPT = "kept = stretto.checkpointed(best=...), and kept.best in place of {}"
BY_HAND = "optimizer = torch.optim.SGD(model.parameters(), lr=...), given to stretto.distribute, and optimizer.step()"
SEED = "torch.manual_seed(0) immediately before the layer is made"
LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "LSTM", "GRU", "Parameter", "Lazy")
"""Beginnings of the names of layers with parameters."""
IN_INIT = "the layer in __init__, before stretto.distribute"
SHARED = "stretto.save(obj, path), `if stretto.is_main():`, or a name with stretto.rank()"
UNEVEN = "no `break` or `continue` by what differs among workers, as a count of their own batches: count epochs"
ALONE = "loader = stretto.distribute(model, optimizer, loader)"
_RECIPE = re.compile(r'--recipe "?(\w+(?:\([^)]*\))?)')
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class Trap:
    """A trap: its name, what happens, the place in the source, and what to type."""

    name: str
    text: str
    file: str
    line: int | None
    to_type: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line is not None else self.file
        return f"{place}: {self.name}: {self.text}. Type: {self.to_type}"


def check(config: RunConfig) -> list[Trap]:
    """Return the traps of a script, those in the source first. Raises LaunchError if it cannot be started."""
    main = file_of(config.script, config.module)
    files = list(_sources(main))
    traps = [trap for file in files for trap in in_source(file)]
    for trap in _in_run(config, files):
        if all(known.name != trap.name for known in traps):
            traps.append(trap)
    return traps


# --- the source -------------------------------------------------------------------------------------------------------


def _sources(main: Path) -> Iterator[Path]:
    """Yield the file of a script, and those of the modules beside it that it imports."""
    found, pending = set[Path](), [main]
    while pending:
        file = pending.pop()
        if file in found or (tree := _parsed(file)) is None:
            continue
        found.add(file)
        yield file
        for node in ast.walk(tree):
            modules, folders = [], [main.parent, file.parent]
            if isinstance(node, ast.Import):
                modules = [alias.name.split(".") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = node.module.split(".") if node.module else []
                modules = [package, *([*package, alias.name] for alias in node.names)]
                folders = [file.parents[node.level - 1]] if node.level else folders
            beside = [folder.joinpath(*module) for folder in folders for module in modules if module]
            pending += [path for stem in beside if (path := stem.with_name(f"{stem.name}.py")).is_file()]


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the run has the error
        return None


def in_source(file: Path) -> list[Trap]:
    """Return the traps that a source file shows, in the order of its lines."""
    tree = _parsed(file)
    if tree is None:
        return []
    name = os.path.relpath(file)
    found = [*_counters(tree), *_updates(tree), *_bests(tree), *_late_layers(tree)]
    return [Trap(trap, text, name, line, to_type) for line, trap, text, to_type in sorted(found)]


Found = tuple[int, str, str, str]
"""Line, name, text, and what to type."""


def _counters(tree: ast.Module) -> Iterator[Found]:
    """Yield counts of batches that are wrong after a resume, or differ among workers."""
    loaders = _assigned_from(tree, "distribute")
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Add)
            and any(_is_product_with_length(side, loaders) for side in ast.iter_child_nodes(node))
        ):
            text = f"`{ast.unparse(node)}` is wrong after a resume in the middle of an epoch"
            yield node.lineno, "counter", text, STEPS
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            lengths = [side for side in (node.left, node.comparators[0]) if _is_length(side, loaders)]
            text = f"`{ast.unparse(node)}` is wrong after a resume in the middle of an epoch"
            yield from ((node.lineno, "counter", text, LAST) for _ in lengths)
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    outer = [node for body in bodies for node in _outside_loops(body)]
    starts = {name for node in outer for name in _set_to_numbers(node)}
    counted: dict[str, int] = {}
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For) or not _names(loop.iter) & loaders:
            continue
        for node in ast.walk(loop):
            if isinstance(node, ast.AugAssign):
                added = {ast.unparse(node.target)}
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
                added = _targets(node) & _places(node.value)
            else:
                continue
            for counter in added & starts:
                counted.setdefault(counter, node.lineno)
        if loop in outer and _called(loop.iter) == "enumerate" and isinstance(loop.target, ast.Tuple):
            counted |= dict.fromkeys(_names(loop.target.elts[0]), loop.lineno)
    for name in sorted(counted.keys() & _limits(tree)):
        text = f"`{name}` begins again at 0 after a resume, and workers may have had different numbers of batches"
        yield counted[name], "counter", text, STEPS


def _outside_loops(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that are in no loop and in no function."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.With | ast.Try):
            yield from _outside_loops(node.body)


def _set_to_numbers(node: ast.stmt) -> set[str]:
    """Return the names and attributes that an assignment sets to numbers."""
    if not isinstance(node, ast.Assign):
        return set()
    pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value) for target in node.targets]
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs += zip(target.elts, node.value.elts, strict=False)
    return {
        ast.unparse(target)
        for target, value in pairs
        if isinstance(value, ast.Constant) and isinstance(value.value, int)
    }


def _limits(tree: ast.Module) -> set[str]:
    """Return names and attributes that end a loop: in the test of a `while`, or of an `if` with `break` or `return`."""
    names = set[str]()
    for node in ast.walk(tree):
        ends = isinstance(node, ast.While) or (
            isinstance(node, ast.If)
            and any(isinstance(inner, ast.Break | ast.Return) for part in node.body for inner in ast.walk(part))
        )
        if isinstance(node, ast.While | ast.If) and ends:
            for compare in ast.walk(node.test):
                if isinstance(compare, ast.Compare) and isinstance(compare.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                    for side in (compare.left, *compare.comparators):
                        is_sum = isinstance(side, ast.BinOp) and isinstance(side.op, ast.Add | ast.Sub)
                        names |= _places(side) if isinstance(side, ast.Name | ast.Attribute) or is_sum else set()
    return names


def _is_product_with_length(node: ast.AST, loaders: set[str]) -> bool:
    """Return True for `epoch * len(loader)` of a distributed loader."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    return any(_is_length(side, loaders) for side in (node.left, node.right))


def _is_length(node: ast.expr, loaders: set[str]) -> bool:
    """Return True for `len(loader)` and `len(loader) - 1` of a distributed loader."""
    call = node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) else node
    return isinstance(call, ast.Call) and _called(call) == "len" and any(map(loaders.__contains__, map(_id, call.args)))


def _id(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _updates(tree: ast.Module) -> Iterator[Found]:
    """Yield updates of parameters by their gradients without an optimizer."""
    for node in ast.walk(tree):
        target: ast.expr | None = None
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub | ast.Add):
            target, values = node.target, [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE:
            target, values = node.func.value, node.args
        if target is None or _has_gradient(target) or not any(map(_has_gradient, values)):
            continue
        assert isinstance(node, ast.AugAssign | ast.Call)
        text = f"`{ast.unparse(node)}` changes a parameter without an optimizer, which the workers do not exchange"
        yield node.lineno, "update by hand", text, BY_HAND


def _has_gradient(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Attribute) and inner.attr == "grad" for inner in ast.walk(node))


def _bests(tree: ast.Module) -> Iterator[Found]:
    """Yield models that are saved where a value is better than the best one, which a resumed run has forgotten."""
    kept = _assigned_from(tree, "checkpointed")
    comparisons = {
        name: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Compare)
        for name in _targets(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.If):
            continue
        saves = [call for part in node.body for call in ast.walk(part) if isinstance(call, ast.Call)]
        if not any(_called(call) in WRITES for call in saves):
            continue
        tests = [node.test, *(comparisons[name] for name in _names(node.test) & comparisons.keys())]
        compared = {
            ast.unparse(side)
            for expression in tests
            for test in ast.walk(expression)
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            for side in (test.left, *test.comparators)
            if isinstance(side, ast.Name | ast.Attribute | ast.Subscript) and not _names(side) & kept
        }
        for best in sorted(compared & _running_bests(tree)):
            text = f"`{best}` begins again after a resume, and a worse model replaces the best one"
            yield node.lineno, "save-best", text, KEPT.format(best)


def _late_layers(tree: ast.Module) -> Iterator[Found]:
    """Yield layers that a forward pass makes: each worker draws its own."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == "forward":
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and _called(node).startswith(LAYERS):
                    text = f"`{ast.unparse(node)}` is drawn in the forward pass, and differs among the workers"
                    yield node.lineno, "unseeded layers", text, IN_INIT


def _running_bests(tree: ast.Module) -> set[str]:
    """Return what is assigned under a comparison with itself, or as the smaller or larger of itself and another."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            compared = {ast.unparse(side) for test in ast.walk(node.test) for side in ast.iter_child_nodes(test)}
            for part in node.body:
                found |= {target for inner in ast.walk(part) for target in _targets(inner)} & compared
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _called(node.value) in ("min", "max")
        ):
            found |= _targets(node) & {ast.unparse(argument) for argument in node.value.args}
    return found


def _targets(node: ast.AST) -> set[str]:
    """Return the texts of what a node assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {ast.unparse(part) for part in parts}


def _assigned_from(tree: ast.Module, function: str) -> set[str]:
    """Return the names to which the result of a function of this name is assigned."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _called(node.value) == function]
    return {name for node in assigned for target in node.targets for name in _names(target)}


def _called(call: ast.expr) -> str:
    """Return the last name of what is called."""
    if not isinstance(call, ast.Call):
        return ""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _places(node: ast.AST) -> set[str]:
    """Return the texts of the names and attributes in a node."""
    return {ast.unparse(inner) for inner in ast.walk(node) if isinstance(inner, ast.Name | ast.Attribute)}


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


# --- the run ----------------------------------------------------------------------------------------------------------


class _LimitedRun(ProgressDisplay):
    """Display that shows nothing, and ends the run after EPOCHS or LIMIT_S."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self._until, self.has_begun, self.has_ended = time.monotonic() + LONGEST_START_S, False, False

    def poll(self) -> None:
        """Send a signal to this process when it is time to end."""
        super().poll()
        if self._progress.epoch > 0 and not self.has_begun:
            self._until, self.has_begun = time.monotonic() + LIMIT_S, True
        if not self.has_ended and (self._progress.epoch > EPOCHS or time.monotonic() > self._until):
            self.has_ended = True
            os.kill(os.getpid(), signal.SIGTERM)


def _in_run(config: RunConfig, files: Sequence[Path]) -> list[Trap]:
    """Return the traps that a short run shows. What the script writes there is removed.

    A script that needs another recipe than the default is run again with the one that its error names.
    """
    layout = parse_layout(config.layout or str(whole()))
    with tempfile.TemporaryDirectory(prefix="stretto-check-") as place:
        folder, display = Path(place, "run"), _LimitedRun()
        private = PrivateFiles(Path(place, ".files"), os.getcwd())
        private.make()
        limited = replace(
            config,
            workers=WORKERS * layout.ranks_in(1),
            out=folder,
            output="none",
            restarts=0,
            private_files=Path(place, ".files").resolve(),
            checkpoint_every=None if layout.takes_recipe else NEVER,
            stop_within_s=LEAVE_S if layout.takes_recipe else config.stop_within_s,
        )
        try:
            run_locally(limited, display)
        except RunFailedError:
            pass
        except Stopped:
            if not display.has_ended:
                raise
            if not display.has_begun:
                got, expected = f"no training within {LONGEST_START_S:.0f} s", "a loop over the distributed loader"
                problem, to_type = "the script has not begun to train", f"{ALONE}; or less data for the check"
                raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type)) from None
        try:
            events = list(read_events(folder / "events.jsonl"))
        except LogError:
            events = []
        errors, shared = _errors(events, files), _shared(private.written(), files)
    advised = _RECIPE.match(errors[0].to_type) if errors and config.recipe is None else None
    if advised is not None:
        print(
            f"stretto: checked with --recipe {advised[1]}, since without {errors[0].text}", file=sys.stderr, flush=True
        )
        return _in_run(replace(config, recipe=advised[1]), files)
    return [*errors, *shared, *_alone(events, files)]


def _errors(events: Iterable[Event], files: Sequence[Path]) -> list[Trap]:
    """Return the first error of the script, or of its training."""
    errors = [event for event in events if event.get("event") == "error"]
    for error in sorted(errors, key=lambda event: bool(event.get("consequence")))[:1]:
        text, kind = str(error.get("text")).strip(), str(error.get("kind"))
        frames = [(file, int(line)) for file, line in _FRAME.findall(str(error.get("traceback")))]
        own = {str(file.resolve()): file for file in files}
        place = next(((own[file], line) for file, line in reversed(frames) if file in own), (files[0], None))
        problem, _, advice = text.partition("\n")
        to_type = " ".join(advice.rpartition("try: ")[2].split())
        name, instead = "error", f"python {os.path.relpath(files[0])}, to see it without Stretto"
        if kind == "UnevenLoopsError":
            name, to_type = "uneven batches", UNEVEN
        elif kind in ("ModelError", "ReplicasDifferError") and "manual_seed" in text:
            name, instead = "unseeded layers", SEED
        elif "never stepped" in text:
            name, instead = "update by hand", BY_HAND
        elif kind == "FileExistsError":
            name, instead = "shared files", SHARED
        return [Trap(name, f"{kind}: {problem.rstrip('.')}", os.path.relpath(place[0]), place[1], to_type or instead)]
    return []


def _shared(written: Mapping[int, Sequence[str]], files: Sequence[Path]) -> list[Trap]:
    """Return a trap for the files that several workers have written."""
    sentence = several_write(
        {"event": "written", "host": "", "worker": worker, "paths": paths} for worker, paths in written.items()
    )
    if sentence is None:
        return []
    text = sentence.partition(". Use ")[0]
    file, line = _place_of({os.path.basename(path) for paths in written.values() for path in paths}, files)
    return [Trap("shared files", text, os.path.relpath(file), line, SHARED)]


def _place_of(written: set[str], files: Sequence[Path]) -> tuple[Path, int | None]:
    """Return the first line with a text that is the name of a file that was written."""
    for file in files:
        for node in ast.walk(_parsed(file) or ast.Module([], [])):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = os.path.basename(node.value)
                if name in written:
                    return file, node.lineno
    return files[0], None


def _alone(events: Sequence[Event], files: Sequence[Path]) -> list[Trap]:
    """Return a trap if no worker has called `distribute` in a run without an error."""
    if any(event.get("event") in ("start", "error") for event in events):
        return []
    text = "no worker has called stretto.distribute: each trains alone"
    return [Trap("not distributed", text, os.path.relpath(files[0]), None, ALONE)]
