"""Rules for the code of the package that its import rules do not cover."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct
from torch.utils._device import _device_constructors

import stretto

PACKAGE = Path(stretto.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
CLOCKED_PACKAGES = (
    "training/",
    "transport/",
    "launcher/",
    "compare/",
    "cli/",
    "runtime/",
    "parallel/",
    "simulator/compute/",
)
CLOCKED = (
    "checkpoint/file_client.py",
    "checkpoint/state_transfer.py",  # carries the random state of Python's module
    "loader/stream_reader.py",
    "membership/barrier_client.py",
    "membership/event_client.py",
    "membership/client.py",
    "membership/server.py",
    "parameter_server/embedded.py",
    "parameter_server/rpc_channel.py",
    "parameter_server/rpc_server.py",
    "simulator/isolation/process_state.py",  # keeps the global random states of simulated workers apart
    "simulator/isolation/virtual_time.py",
    "strategies/model_sync.py",
)
"""Files that may read a wall clock or the global random state."""


def subpackage(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def decoded_records(file: Path) -> Iterator[str]:
    """Yield the records that functions of a file decode by their type."""
    module = importlib.import_module(".".join(["stretto", *file.relative_to(PACKAGE).with_suffix("").parts]))
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and re.fullmatch(r"msgspec\.\w+\.decode", ast.unparse(node.func)):
            kinds = [one.value for one in node.keywords if one.arg == "type"]
            names = {one.id for kind in kinds for one in ast.walk(kind) if isinstance(one, ast.Name)}
            found = {name: getattr(module, name, None) for name in names}
            yield from (name for name, one in found.items() if isinstance(one, type) and issubclass(one, Struct))


@pytest.mark.parametrize("folder", ["checkpoint", "loader", "parallel", "strategies", "training", "transport"])
def test_records_of_workers_have_a_decoder_in_their_module(folder: str) -> None:
    """msgspec describes a record when it is first decoded; two threads that do so at once crash the process."""
    found = {file.name: [*decoded_records(file)] for file in sorted((PACKAGE / folder).rglob("*.py"))}
    assert not {name: records for name, records in found.items() if records}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_forbidden_imports_and_calls(file: Path) -> None:
    tree = ast.parse(file.read_text())
    names, calls = set(imported_names(tree)), set(called_functions(tree))
    if subpackage(file) not in ("transport", "launcher", "parallel"):
        assert not {one for one in names if one.startswith("torch.distributed")}, "only transport has torch.distributed"
    if file.parent != PACKAGE / "launcher/engines":
        assert not {name.partition(".")[0] for name in names} & {"ray", "pyspark"}, "only their engines import them"
    if subpackage(file) != "trainers":
        assert not {name.partition(".")[0] for name in names} & {"transformers", "accelerate", "trl", "peft"}
    assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, "nothing is unpickled"
    script = file.relative_to(PACKAGE) == Path("simulator/isolation/script.py")  # the file that the user asked to run
    assert not calls & {"eval", "torch.load", *(["exec"] * (not script))}, "nothing that came from outside is run"
    if str(file.relative_to(PACKAGE)) not in CLOCKED and not str(file.relative_to(PACKAGE)).startswith(
        CLOCKED_PACKAGES
    ):
        assert not names & {"time", "random", "datetime.datetime.now"}, "no wall clock, no global random state here"
    assert not names & {"stretto.utils", "stretto.common", "stretto.helpers", "stretto.misc"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_created_tensors_name_their_device(file: Path) -> None:
    """A script may have changed torch's default device."""
    calls = [one for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.Call)]
    creating = {f"torch.{function.__name__}" for function in _device_constructors()}
    unnamed = [
        ast.unparse(call)
        for call in calls
        if ast.unparse(call.func) in creating and not any(one.arg == "device" for one in call.keywords)
    ]
    assert not unnamed


def test_no_module_has_a_meaningless_name() -> None:
    assert not {subpackage(file) for file in FILES} & {"utils", "common", "helpers", "misc"}


def test_public_names_exist() -> None:
    for name in stretto.__all__:
        assert getattr(stretto, name) is not None
    with pytest.raises(AttributeError, match="distribute"):
        stretto.distribut  # noqa: B018


@pytest.mark.plain_processes
def test_recipes_are_parsed_without_torch() -> None:
    script = (
        "import sys, stretto.recipe.parser; stretto.recipe.parser.parse('power_sgd'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=150).returncode == 0
