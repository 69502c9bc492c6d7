"""Errors of loops and models that ranks can't share: each names the cause, and what to type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import ModelError, RecipeError, explain
from stretto.recipe.layout import pipeline, sharded
from stretto.recipe.recipe import Recipe
from stretto.strategies.model_sync import SeveralModels
from stretto.strategies.optimizers import Optimizers

WHOLE = '--layout "whole()"'
AGAIN = f"stretto.distribute(model, optimizer, loader) again after the change, or {WHOLE}"


def refuse_indivisible(model: nn.Module, optimizers: Optimizers, divided: str) -> None:
    """Raise ModelError for a model or an optimizer that no ranks can share: it cannot be `divided`."""
    if isinstance(model, SeveralModels):
        raise ModelError(
            explain(
                f"several models cannot be {divided}",
                got=f"a list of {len(model)} models",
                expected="one model, whose forward pass is shared",
                to_type=WHOLE,
            )
        )
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise ModelError(
            explain(
                f"a model without a forward pass cannot be {divided}",
                got=f"{type(model).__name__}, whose parts the script calls",
                expected="a module whose forward pass calls its parts",
                to_type=WHOLE,
            )
        )
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ModelError(
            explain(
                f"a compiled model cannot be {divided}",
                got="torch.compile(model)",
                expected="the plain model; parts of it may be compiled",
                to_type="model.layer = torch.compile(model.layer)",
            )
        )
    if any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
        raise ModelError(
            explain(
                "L-BFGS needs all parameters in one process",
                got=f"torch.optim.LBFGS over a model that is {divided}",
                expected="an optimizer that steps each parameter by its own gradient, such as SGD or AdamW",
                to_type=WHOLE,
            )
        )


def refuse_compiled_in_place(name: str, module: nn.Module) -> None:
    """Raise ModelError for a layer whose `compile()` was called: what compiles it would compile the stages' code."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise ModelError(
            explain(
                f"model.{name} is compiled in place, and a stage of a pipeline may begin there",
                got=f"model.{name}.compile()",
                expected="a layer that torch.compile has wrapped, or compile() of modules within it",
                to_type=f"model.{name} = torch.compile(model.{name})",
            )
        )


def refuse_unshardable(model: nn.Module) -> None:
    """Raise ModelError for parameters that have no parts, or whose gradients have none."""
    for name, one in model.named_parameters():
        if not one.dim():
            raise ModelError(
                explain(
                    f"the parameter {name} has no dimension, so no rank can hold a part of it",
                    got="a parameter of shape ()",
                    expected="parameters of at least one dimension",
                    to_type="nn.Parameter(torch.ones(1))",
                )
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ModelError(
                explain(
                    f"the gradients of {name} are sparse, and are not divided among processes",
                    got=f"{type(module).__name__}(..., sparse=True)",
                    expected="dense gradients",
                    to_type=f"{type(module).__name__}(..., sparse=False)",
                )
            )


def refuse_hooks(model: nn.Module, is_divided: bool) -> None:
    """Raise ModelError for hooks of gradients that would not run: parts of parameters get gradients without them."""
    for name, one in model.named_parameters():
        if one._backward_hooks or (not is_divided and one._post_accumulate_grad_hooks):
            raise ModelError(
                explain(
                    f"a hook of the gradient of {name} would not run, since each process has a part of it",
                    got="register_hook or register_post_accumulate_grad_hook of a parameter",
                    expected="code between loss.backward() and optimizer.step()",
                    to_type='parameter.grad.clamp_(-1, 1), or --layout "pipeline(stages=2)"',
                )
            )


def refuse_matrix_codec(recipe: Recipe | None, layout: sharded) -> None:
    """Raise RecipeError for a codec that encodes whole matrices, of which each rank has a part."""
    found = next((one for one in recipe.how.components() if one.needs_matrices), None) if recipe is not None else None
    if found is not None:
        raise RecipeError(
            explain(
                f"{found} factorises whole matrices, and each process has a part of every matrix",
                got=f"{recipe} with {layout}",
                expected="a codec of numbers, such as cast, quantise or top_k, or a layout with whole matrices",
                to_type='--layout "pipeline(stages=2)"',
            )
        )


def refuse_kept_parameters(optimizer: torch.optim.Optimizer, before: Mapping[int, str]) -> None:
    """Raise ModelError if an optimizer keeps parameters elsewhere than in its groups: they are of no model now."""
    for attribute, value in vars(optimizer).items():
        name = next((before[id(one)] for one in _flat(value) if id(one) in before), None)
        if name is not None:
            raise ModelError(
                explain(
                    f"{type(optimizer).__name__} keeps parameters outside of its groups, and would train former ones",
                    got=f"{name} in the attribute {attribute} of the optimizer",
                    expected="an optimizer whose parameters are in param_groups alone, such as SGD or AdamW",
                    to_type=WHOLE,
                )
            )


def _flat(value: Any) -> Iterator[Any]:
    """Yield all that is in lists, tuples and dicts."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield key
            yield from _flat(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def batch_norm_of_part(name: str) -> str:
    """Return the error of batch normalisation over a part of a batch."""
    return explain(
        f"the batch normalisation {name} would see one process's samples, which have other statistics than the batch",
        got="a batch normalisation in training, in a model that is divided among processes",
        expected="a normalisation that does not mix samples, such as GroupNorm or LayerNorm",
        to_type="nn.GroupNorm(8, channels)",
    )


def called_alone(name: str) -> str:
    """Return the error of a call of a part of the model."""
    return explain(
        f"the module {name} of a model in pipeline stages is called on its own",
        got=f"a call of model.{name} outside of model(...)",
        expected="calls of the whole model, at all ranks",
        to_type=f"a method of the model in which its forward calls {name}, or {WHOLE}",
    )


def needs_other(name: str) -> str:
    """Return the error of a module that needs what another stage has computed."""
    return explain(
        f"{name} needs something that another stage has computed, and that is not passed along the stages",
        got="another way through the model than with the first batch",
        expected="the same operations between modules in each forward pass",
        to_type=f'split="..." with the modules in one stage, or {WHOLE}',
    )


def other_calls(name: str, expected: str | None) -> str:
    """Return the error of other calls of modules than in the first batch."""
    return explain(
        f"the forward pass calls {name} where it called {expected or 'nothing more'} with the first batch",
        got=f"a model whose modules are called in another order, at {name}",
        expected="the same calls of modules in each forward pass of a model in pipeline stages",
        to_type=f"conditions inside of one module, which one stage runs, or {WHOLE}",
    )


def refuse_divided_parts(model: nn.Module, kind: type) -> None:
    """Raise ModelError for a model with a module of this kind, which was divided with another model."""
    for name, module in model.named_modules():
        if isinstance(module, kind):
            raise ModelError(
                explain(
                    "parts of the model were divided among processes with another model, and are not divided again",
                    got=f"{name or type(model).__name__}, a part of the model of a stretto.distribute before",
                    expected="the model of the first stretto.distribute in all others",
                    to_type="the same model, whose other parts are frozen, or a layout of pipeline(...)",
                )
            )


def new_parameter(name: str, divided: str, to_type: str) -> str:
    """Return the error of a parameter that came to a model after it was `divided`."""
    return explain(
        f"the parameter {name} came to the model after it was {divided}, and would not be trained as a part of it",
        got="a layer or a parameter that was added or replaced",
        expected="the layers and parameters that the model had when it was divided; they may be frozen and thawed",
        to_type=to_type,
    )


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch normalisations of a model by name."""
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)}


def batch_norm(name: str, layout: pipeline) -> str:
    """Return the error of batch normalisation over micro-batches."""
    return explain(
        f"the batch normalisation {name} would see micro-batches, which have other statistics than the batch",
        got=f"{layout}, with {layout.micro_batches} micro-batches",
        expected="one micro-batch, or a normalisation that does not mix samples, such as GroupNorm or LayerNorm",
        to_type=f'--layout "pipeline(stages={layout.stages}, micro_batches=1)"',
    )


def refuse_other_rows(output: Tensor, rows: int) -> None:
    """Raise ModelError for outputs of micro-batches without a row for each sample."""
    if not output.dim() or len(output) != rows:
        raise ModelError(_not_by_rows(output, rows))


def _not_by_rows(output: Tensor, rows: int) -> str:
    return explain(
        "the outputs of the micro-batches cannot be joined to that of the batch",
        got=f"a model that returns a tensor of shape {tuple(output.shape)} for {rows} samples",
        expected="outputs with one row for each sample; a loss is computed from them in the script",
        to_type="the loss outside of the model, or micro_batches=1",
    )


def input_gradient() -> str:
    """Return the error of an input that requires a gradient."""
    return explain(
        "an input of the model requires a gradient, which a model in pipeline stages does not give",
        got="model(x) with x.requires_grad",
        expected="batches of data",
        to_type=f"x.detach(), or {WHOLE}",
    )


def second_backward() -> str:
    """Return the error of a second backward pass."""
    return explain(
        "the gradients of one forward pass are computed a second time, and its activations were freed",
        got="backward() twice on one output of the model",
        expected="one backward pass for each forward pass, such as on the sum of the losses",
        to_type="(loss_a + loss_b).backward()",
    )


def second_derivative() -> str:
    """Return the error of second derivatives."""
    return explain(
        "a model in pipeline stages has no second derivatives",
        got="backward with create_graph=True",
        expected="first derivatives",
        to_type=WHOLE,
    )
