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


def _in_one_text(names: Any) -> Any:
    """Return names with commas between them, given as a list or a tuple; anything else is returned unchanged."""
    are_names = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return ", ".join(names) if are_names else names


class Layout(Answer):
    """Base of the layouts."""

    axis = "layout"
    example: ClassVar[str] = "whole()"
    carried_out_by: ClassVar[str] = "stretto.parallel.rank_parts.RankParts"
    """Import path of the class that divides a worker among its ranks."""
    simulated_by: ClassVar[str] = "stretto.simulator.layouts.replica.Replica"
    """Import path of the class of such workers in a simulation; empty if they cannot be simulated."""
    takes_recipe: ClassVar[bool] = True
    """True if a recipe says what the workers exchange; False if there is only one worker, whatever its processes."""

    builds_parts: ClassVar[bool] = False
    """True if each rank builds its own part of a model of the meta device, once the model is divided."""

    def ranks_in(self, processes: int) -> int:
        """Return the number of processes of a worker in a run with this number of processes."""
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
    carried_out_by = "stretto.parallel.stages.PipelineStages"
    simulated_by = "stretto.simulator.layouts.stages.StagedReplica"
    builds_parts = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", _in_one_text(self.split))
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

    def ranks_in(self, processes: int) -> int:
        return self.stages

    @property
    def begins(self) -> Sequence[str] | None:
        """Names of the modules that the stages after the first begin with; None if the split is measured."""
        return None if self.split == MEASURED else [name.strip() for name in self.split.split(",")]


@dataclass(frozen=True, repr=False)
class sharded(Layout):
    """A worker is `over` processes, of which each holds a part of every parameter, and trains a part of each batch.

    Before a layer runs, the processes gather its parameters; they free them afterwards, and each receives its part of
    the mean gradient (`fully_shard` of PyTorch). So parameters, gradients and the optimizer's state take one part of
    the memory each.

    Cost: 3 times the parameters in each step, times (over - 1) / over: for one machine or a fast network.
    """

    over: Annotated[int, Range(least=2, most=256)]

    papers = ("Rajbhandari et al. 2020 (ZeRO, 1910.02054)", "Zhao et al. 2023 (FSDP, 2304.11277)")
    carried_out_by = "stretto.parallel.sharded.ShardedModel"
    simulated_by = "stretto.simulator.layouts.shards.ShardedReplica"

    def ranks_in(self, processes: int) -> int:
        return self.over


@dataclass(frozen=True, repr=False)
class blocks(Layout):
    """All processes factorise one matrix: each trains rows of its own, and column blocks rotate among them.

    `rows` names the tables (embeddings, parameters) with an entry for each row of the matrix, `columns` the tables with
    an entry for each column, with commas between them: blocks("users, user_bias", "items, item_bias"). A sample of the
    loader begins with the number of its row and that of its column. Each process trains the samples of its rows and of
    the column block that it has, then sends this block to the next process.

    With `column_blocks` above 1 each process has this number of blocks of columns, and trains one of them after the
    other. All tables are in memory-mapped files then, and memory holds the rows and the column block in training.

    Cost: an epoch sends each column table once around the ring. After every `whole_every`-th epoch each process
    receives the tables of all, so that the script can evaluate and save them. No process waits for gradients.
    """

    rows: str
    columns: str
    column_blocks: int = 1
    whole_every: int = 1

    papers = ("Gemulla et al. 2011 (DSGD, 10.1145/2020408.2020426)",)
    carried_out_by = "stretto.parallel.blocks.BlockRing"
    simulated_by = ""
    takes_recipe = False

    def __post_init__(self) -> None:
        for field in ("rows", "columns"):
            object.__setattr__(self, field, _in_one_text(getattr(self, field)))
        super().__post_init__()
        names = [*self.row_tables, *self.column_tables]
        if not all(names) or len(set(names)) < len(names):
            raise RecipeError(
                explain(
                    "blocks needs the names of the tables of rows, and those of columns, each once",
                    got=str(self),
                    expected="names of embeddings or parameters, with commas between them",
                    to_type='blocks("users, user_bias", "items, item_bias")',
                )
            )
        if self.column_blocks < 1 or self.whole_every < 1:
            raise RecipeError(
                explain(
                    "a process needs a block of columns, and the script the whole model after some epochs",
                    got=str(self),
                    expected="whole numbers, at least 1, for column_blocks and whole_every",
                    to_type=f'blocks("{self.rows}", "{self.columns}", column_blocks=4)',
                )
            )

    def ranks_in(self, processes: int) -> int:
        return processes

    @property
    def row_tables(self) -> Sequence[str]:
        """Names of the tables with an entry for each row."""
        return [name.strip() for name in self.rows.split(",")]

    @property
    def column_tables(self) -> Sequence[str]:
        """Names of the tables with an entry for each column."""
        return [name.strip() for name in self.columns.split(",")]


LAYOUTS: dict[str, type[Layout]] = {layout.__name__: layout for layout in (whole, pipeline, sharded, blocks)}


def as_option(layout: object) -> str:
    """Return the option of the command line for a layout or its text, quoted for a shell.

    >>> print(as_option('blocks("users", "items")'))
    --layout 'blocks("users", "items")'
    """
    return f"--layout '{layout}'" if '"' in str(layout) else f'--layout "{layout}"'


def catalogue() -> list[dict[str, Any]]:
    """Return all layouts with their options and papers, for lists."""
    return [
        {"name": name, "signature": signature(layout), "sentence": sentence(layout), "papers": layout.papers}
        for name, layout in LAYOUTS.items()
    ]
