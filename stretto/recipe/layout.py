"""Layouts: what one worker is. A recipe says what the workers exchange, and never learns of the layout.

A worker is one replica of the model, in one process or in several, its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from stretto.errors import RecipeError, explain
from stretto.spec import Answer, Range, sentence, signature

MEASURED = "measured"


class Layout(Answer):
    """Base of the layouts."""

    axis = "layout"
    example: ClassVar[str] = "whole()"

    @property
    def ranks(self) -> int:
        """Number of processes of a worker."""
        return 1


@dataclass(frozen=True, repr=False)
class whole(Layout):
    """A worker is one process, which holds the whole model."""


@dataclass(frozen=True, repr=False)
class pipeline(Layout):
    """A worker is `stages` processes, of which each holds a part of the model; a batch passes them in pieces.

    All processes of a worker run the script with the same batches; a batch is cut into `micro_batches`. `split` is
    "measured", or the names of the modules that each stage after the first begins with: "blocks.4, blocks.8". With
    `recompute` the backward pass computes activations again, and only the inputs of a stage are kept.

    Cost: the activations at each boundary, once forward and once back; of m + stages - 1 turns of m micro-batches each
    stage waits for stages - 1.
    """

    stages: Annotated[int, Range(least=2, most=256)]
    micro_batches: Annotated[int, Range(least=1)] = 4
    split: str = MEASURED
    recompute: bool = False

    papers = ("Huang et al. 2018 (GPipe, 1811.06965)",)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.begins
        if names is not None and (len(names) != self.stages - 1 or not all(names) or len(set(names)) < len(names)):
            example = ", ".join(f"blocks.{4 * stage}" for stage in range(1, self.stages))
            raise RecipeError(
                explain(
                    f"split must name a module for each of {self.stages} stages but the first",
                    got=f'"{self.split}"',
                    expected=f'"{MEASURED}", or {self.stages - 1} different names of modules with commas between them',
                    to_type=f'pipeline(stages={self.stages}, split="{example}")',
                )
            )

    @property
    def ranks(self) -> int:
        return self.stages

    @property
    def begins(self) -> Sequence[str] | None:
        """Names of the modules that the stages after the first begin with; None if the split is measured."""
        return None if self.split == MEASURED else [name.strip() for name in self.split.split(",")]


LAYOUTS: dict[str, type[Layout]] = {layout.__name__: layout for layout in (whole, pipeline)}


def catalogue() -> list[dict[str, Any]]:
    """Return all layouts with their options and papers, for lists."""
    return [
        {"name": name, "signature": signature(layout), "sentence": sentence(layout), "papers": layout.papers}
        for name, layout in LAYOUTS.items()
    ]
