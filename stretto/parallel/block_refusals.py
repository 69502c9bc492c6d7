"""Models, optimizers and loops that blocks of a matrix cannot train, each with the error that says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

from stretto.errors import LoaderError, ModelError, ScriptError, explain
from stretto.recipe.layout import as_option, blocks

_OPTIONS: dict[type[Optimizer], tuple[str, str]] = {
    SGD: ("momentum", "weight_decay"),
    Adagrad: ("lr_decay", "weight_decay"),
}
"""Optimizers of rows, with the options that would make them change other rows."""


def tables_of(model: nn.Module, names: Sequence[str], layout: blocks) -> list[nn.Parameter]:
    """Return the parameters of these modules, or of these names, which have equally many entries."""
    found: list[nn.Parameter] = []
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name in names:
        own = [*modules[name].parameters()] if name in modules else [parameters[name]] if name in parameters else []
        if not own:
            expected = f"one of {', '.join([one for one in modules if one] or parameters)}"
            raise _refused(f"the model has no table {name}", str(layout), expected, as_option(layout))
        found += own
    if len({len(one) if one.dim() else 0 for one in found}) > 1:
        got = ", ".join(f"{name}: {tuple(one.shape)}" for name, one in parameters.items() if _is_in(one, found))
        raise _refused("tables of one side have other numbers of entries", got, "equally many entries", f"{layout}")
    return found


def refuse_others(model: nn.Module, tables: Sequence[nn.Parameter], layout: blocks) -> None:
    """Raise ModelError if the model has trainable parameters that are in no table."""
    named = model.named_parameters()
    others = [name for name, one in named if one.requires_grad and not _is_in(one, tables)]
    if others:
        raise _refused(
            "each rank would train its own version of parameters that belong to no row or column",
            f"{', '.join(others[:4])} in no table of {layout}",
            "a model whose trained parameters all have an entry for each row, or for each column",
            f"model.{others[0]}.requires_grad_(False), or its name in the layout",
        )


def refuse_optimizers(each: Sequence[Optimizer]) -> None:
    """Raise ModelError for optimizers that change entries without a sample, or keep a state of all together."""
    for one in each:
        allowed = _OPTIONS.get(type(one))
        options = [name for name in allowed or () if any(group[name] for group in one.param_groups)]
        if allowed is None or options:
            raise _refused(
                "blocks need an optimizer whose state and step belong to one row each",
                f"{type(one).__name__}{f' with {options[0]}' if options else ''}",
                "SGD without momentum and weight_decay, or Adagrad without lr_decay and weight_decay",
                "torch.optim.Adagrad(model.parameters(), lr=0.05)",
            )


def refuse_tables_elsewhere(table: nn.Parameter) -> None:
    """Raise ModelError for a table that cannot be in a memory-mapped file."""
    if table.device.type != "cpu":
        raise _refused(
            "tables of column_blocks= are in memory-mapped files",
            f"a table on {table.device}",
            "tables in the memory of the host, or column_blocks=1",
            'model.to("cpu") before stretto.distribute',
        )


def refuse_evaluations_by_steps(every: int | None) -> None:
    """Raise ScriptError for evaluations by steps: all ranks evaluate together, and have other numbers of steps."""
    if every is not None:
        raise ScriptError(
            explain(
                "each process makes another number of steps in a layout of blocks",
                got=f"evaluate_every={every}",
                expected="an evaluation at the end of each epoch",
                to_type="stretto.distribute(model, optimizer, loader, evaluate=error)",
            )
        )


def refuse_some_steps(is_alike: bool) -> None:
    """Raise ScriptError unless the batches of an epoch are alike: each has a step, or none has."""
    if not is_alike:
        raise ScriptError(
            explain(
                "a gradient that waits for a later batch would be lost when its columns have gone to the next process",
                got="an epoch with batches that an optimizer stepped after, and others without a step",
                expected="a step after every batch, or after none, as in an evaluation",
                to_type="optimizer.zero_grad(); loss(batch).backward(); optimizer.step() for each batch, "
                "and a larger batch_size instead of accumulated gradients",
            )
        )


def refuse_left_epochs(is_left: bool) -> None:
    """Raise ScriptError for an epoch that the script has left: other ranks would wait for this one's columns."""
    if is_left:
        raise ScriptError(
            explain(
                "the script left the loop over the loader before its last batch: others wait for this process' columns",
                got="break, or a limit on the number of batches, of which each process has another number",
                expected="a loop over all batches of an epoch",
                to_type="a smaller data set instead of a break: torch.utils.data.Subset(data, range(10_000))",
            )
        )


def refuse_idle_ranks(first: Sequence[Sequence[int]], row_block: Any, ranks: int) -> None:
    """Raise LoaderError if a rank has no sample in the first batch of an epoch."""
    present = {int(row_block[sample]) for batch in first for sample in batch}
    if first and len(present) < ranks:
        raise LoaderError(
            explain(
                f"a process has no sample in the first block: {ranks} processes cut the matrix into {ranks * ranks}",
                got=f"samples for {len(present)} of {ranks} processes",
                expected="fewer processes, or more samples",
                to_type=f"stretto run -n {ranks - 1}" if ranks > 2 else "stretto run -n 1 without a layout",
            )
        )


def refuse_other_order(is_own: Any, ranks: int) -> None:
    """Raise ModelError for an epoch whose order is not one of blocks for this number of ranks."""
    if not is_own:
        raise ModelError(
            explain(
                "the epoch was begun with another number of processes, or without blocks",
                got=f"{ranks} processes that continue in the middle of an epoch",
                expected="the number of processes, and the layout, of the run whose checkpoint is resumed",
                to_type="stretto run --resume with the -n and the --layout of that run; from a checkpoint of the end "
                "of an epoch any number of processes can continue",
            )
        )


def _is_in(one: nn.Parameter, several: Sequence[nn.Parameter]) -> bool:
    return any(one is other for other in several)


def _refused(problem: str, got: str, expected: str, to_type: str) -> ModelError:
    return ModelError(explain(problem, got=got, expected=expected, to_type=to_type))
