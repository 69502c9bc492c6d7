"""The private names of torch that the package uses: a version of torch without one of them is named here first."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stretto

PACKAGE = Path(stretto.__file__).parent


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of each import from torch, and of each attribute of the name `torch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            yield ast.unparse(node)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def used() -> list[str]:
    """Return the private names of torch in the package; those on the way to another are not listed."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    found = {name for tree in trees for name in names_in(tree) if name.replace(".", "").replace("_", "").isalnum()}
    private = {name for name in found if is_private(name)}
    return sorted(name for name in private if not any(other.startswith(f"{name}.") for other in private))


@pytest.mark.parametrize("name", used())
def test_a_private_name_exists(name: str) -> None:
    pkgutil.resolve_name(name)


def test_private_attributes_of_values_exist() -> None:
    """No import shows them."""
    parameter = nn.Parameter(torch.zeros(2))
    assert (parameter._version, parameter._backward_hooks, parameter._post_accumulate_grad_hooks) == (0, None, None)
    module = nn.Linear(1, 1)
    assert (list(module._parameters), list(module._buffers), list(module._forward_hooks)) == (
        ["weight", "bias"],
        [],
        [],
    )
    assert module._compiled_call_impl is None
    node = nn.functional.mse_loss(parameter, torch.zeros(2), reduction="sum").grad_fn
    assert node is not None
    assert hasattr(node, "_saved_reduction")
    assert hasattr(torch.autograd.Variable, "_execution_engine")
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    constant = [lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    assert constant[0]._step_count == 1
    followed = lr_scheduler.SequentialLR(optimizer, constant, [1])
    assert (followed._schedulers, followed._milestones) == (constant, [1])
