"""Errors of loops and models that a pipeline can't run: each names the cause, and what to type."""

from __future__ import annotations

from torch import Tensor

from stretto.errors import explain
from stretto.recipe.layout import pipeline

WHOLE = '--layout "whole()"'


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


def batch_norm(name: str, layout: pipeline) -> str:
    """Return the error of batch normalisation over micro-batches."""
    return explain(
        f"the batch normalisation {name} would see micro-batches, which have other statistics than the batch",
        got=f"{layout}, with {layout.micro_batches} micro-batches",
        expected="one micro-batch, or a normalisation that does not mix samples, such as GroupNorm or LayerNorm",
        to_type=f'--layout "pipeline(stages={layout.stages}, micro_batches=1)"',
    )


def not_by_rows(output: Tensor, rows: int) -> str:
    """Return the error of outputs without a row for each sample."""
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
