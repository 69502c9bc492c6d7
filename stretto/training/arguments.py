"""Arguments of one call of `distribute`, after they were checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stretto.loader.epoch_batches import Assignment
from stretto.parallel.meta_start import build, build_states
from stretto.recipe.layout import Layout
from stretto.recipe.recipe import Recipe
from stretto.strategies.model_sync import trainable
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.sparse_tables import tables_in_files
from stretto.training.evaluation import Evaluate
from stretto.training.schedule import Mode


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of `distribute`. `recipe` is None for a single worker, which exchanges nothing."""

    model: nn.Module
    optimizers: Optimizers
    loader: Any
    recipe: Recipe | None
    evaluate: Evaluate | None
    evaluate_every: int | None
    schedule: Mode
    assignment: Assignment | None
    layout: Layout

    @property
    def device(self) -> torch.device:
        """Device of the trained parameters; the accelerator if some are on the CPU."""
        named = trainable(self.model, self.optimizers) or self.model.named_parameters()
        devices = [one.device for _, one in named]
        return next((one for one in devices if one.type != "cpu"), torch.device("cpu"))

    def build(self) -> None:
        """Give values to the tensors of a model of the meta device, and of its optimizers' state."""
        in_files = tables_in_files(self.model, self.recipe)
        build(self.model, in_files=in_files)
        build_states(self.optimizers, in_files)
