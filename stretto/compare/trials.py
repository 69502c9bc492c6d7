"""Question of a comparison, and the trials (runs) that answer it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from stretto.data.shares import EVEN
from stretto.errors import LaunchError, explain
from stretto.interval import NEVER
from stretto.launcher.config import check, ranks_of
from stretto.launcher.entry import typed
from stretto.masking import masked
from stretto.report.run_record import GLOBAL_BATCH, SINGLE_PROCESS
from stretto.report.target import Target
from stretto.run_config import RunConfig, typed_options

LONGEST_NAME = 80


@dataclass(frozen=True)
class Question:
    """Configuration of every run; the recipes, layouts and numbers of workers to run it with; the number of seeds.

    With layouts, `workers` are the numbers of all processes of all workers. An empty layout is that of whole workers.
    """

    config: RunConfig
    workers: tuple[int, ...]
    recipes: tuple[str, ...]
    seeds: int = 1
    target: Target | None = None
    layouts: tuple[str, ...] = ("",)

    def command(self) -> list[str]:
        """Return the command line that repeats the comparison; arguments that look like secrets are masked."""
        counts = ",".join(map(str, self.workers))
        words = ["stretto", "compare", "-n", counts]
        words += [word for recipe in self.recipes for word in ("--recipe", recipe)]
        layouts = (layout or "whole()" for layout in self.layouts if any(self.layouts))
        words += [word for layout in layouts for word in ("--layout", layout)]
        words += ["--target", str(self.target)] if self.target else []
        words += ["--seeds", str(self.seeds)] if self.seeds > 1 else []
        words += typed_options(
            self.config, ("threads", "stragglers", "global_batch", "shares", "max_batch", "uneven", "lr_scale")
        )
        return [*words, *masked(typed(self.config.script, self.config.module, self.config.args))]

    def describe(self) -> dict[str, Any]:
        """Return the question as saved in compare.json."""
        return {
            "script": str(self.config.script),
            "module": self.config.module,
            "args": masked(self.config.args),
            "workers": list(self.workers),
            "recipes": list(self.recipes),
            "layouts": list(filter(None, self.layouts)),
            "seeds": self.seeds,
            "target": str(self.target) if self.target else None,
            "threads": self.config.threads,
            "timeout_s": self.config.timeout_s,
            "stragglers": self.config.stragglers,
            "global_batch": self.config.global_batch,
            "shares": self.config.shares,
            "max_batch": self.config.max_batch,
            "uneven": self.config.uneven,
            "lr_scale": self.config.lr_scale,
            "command": self.command(),
        }


@dataclass(frozen=True)
class Trial:
    """One run: `name` is its folder, `reference` the name of the trial that its model is compared with.

    `workers` is the number of its processes. `layout` is empty for workers of one process each.
    """

    name: str
    recipe: str | None
    workers: int
    global_batch_of: int
    seed: int
    reference: str | None
    layout: str = ""

    @property
    def kind(self) -> str:
        """Recipe and layout, or the name of the baseline, in the record of the run."""
        if self.recipe is None:
            return GLOBAL_BATCH if self.global_batch_of > 1 else SINGLE_PROCESS
        return f"{self.recipe}, {self.layout}" if self.layout else self.recipe

    def config(self, question: Question, folder: Path) -> RunConfig:
        """Return the run configuration. A baseline runs without stragglers and shares, and all without checkpoints."""
        return replace(
            question.config,
            workers=self.workers,
            recipe=self.recipe,
            layout=self.layout or ("whole()" if self.recipe is not None and any(question.layouts) else None),
            seed=self.seed,
            single_process=self.recipe is None,
            global_batch_of=self.global_batch_of,
            out=folder / self.name,
            keep_states=True,
            checkpoint_every=NEVER,
            stragglers=None if self.recipe is None else question.config.stragglers,
            shares=EVEN if self.recipe is None else question.config.shares,
            max_batch=None if self.recipe is None else question.config.max_batch,
            output="none",
        )


def ask(
    config: RunConfig,
    *,
    workers: str,
    recipes: Sequence[str],
    seeds: int,
    target: str | None,
    layouts: Sequence[str] = (),
) -> Question:
    """Return a question from command-line values. Raises LaunchError or RecipeError before any run starts.

    `config.servers` becomes an argument of the recipes with a parameter server, so that their names show it.
    """
    recipes = recipes or ("allreduce",) * bool(layouts)
    if not recipes:
        raise LaunchError(
            explain(
                "there is nothing to compare with the single process",
                got="no --recipe",
                expected="at least one recipe (see `stretto recipes`)",
                to_type='--recipe allreduce --recipe "local_sgd(every=16)"',
            )
        )
    question = Question(
        config=replace(config, servers=None),
        workers=worker_counts(workers),
        recipes=_read(recipes, config.servers),
        seeds=_at_least_one(seeds),
        target=Target.parse(target) if target is not None else None,
        layouts=_read_layouts(layouts),
    )
    for trial in trials(question):
        check(trial.config(question, Path()))
    return question


def _read(recipes: Sequence[str], servers: int | None) -> tuple[str, ...]:
    """Return the recipes in canonical form, each once, with `servers` shards if they have a parameter server."""
    from stretto.recipe.parser import parse, with_shards  # imports torch: only if there is something to compare

    if servers is None:
        return tuple(dict.fromkeys(str(parse(text)) for text in recipes))
    served = [text for text in recipes if parse(text).shards]
    _check_servers(servers, served)
    sharded = (with_shards(text, servers) if text in served else str(parse(text)) for text in recipes)
    return tuple(dict.fromkeys(sharded))


def _read_layouts(layouts: Sequence[str]) -> tuple[str, ...]:
    """Return the layouts in canonical form, each once; an empty one for workers of one process."""
    from stretto.recipe.layout import whole
    from stretto.recipe.parser import parse_layout

    texts = (str(parse_layout(text)) for text in layouts)
    return tuple(dict.fromkeys("" if text == str(whole()) else text for text in texts)) or ("",)


def _replicas(processes: int, layout: str) -> int:
    """Return the number of workers that this number of processes is under a layout."""
    return processes // ranks_of(RunConfig(Path(), workers=processes, layout=layout or None))


def _check_servers(servers: int, served: Sequence[str]) -> None:
    if servers >= 1 and served:
        return
    problem = f"the number of servers cannot be {servers}" if served else "no recipe here has a parameter server"
    expected = "a whole number, at least 1" if served else "a recipe with one (see `stretto recipes`)"
    to_type = "--servers 2" if served else f"--recipe async_sgd --servers {max(1, servers)}"
    raise LaunchError(explain(problem, got=f"--servers {servers}", expected=expected, to_type=to_type))


def worker_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of workers in `4` or `1,2,4`, sorted and each once."""
    words = [word.strip() for word in text.split(",")]
    if all(word.isdecimal() and int(word) >= 1 for word in words):
        return tuple(sorted({int(word) for word in words}))
    raise LaunchError(
        explain(
            f"the number of workers cannot be {text}",
            got=text,
            expected="whole numbers, at least 1, separated by commas",
            to_type="-n 4, or --workers 1,2,4",
        )
    )


def _at_least_one(seeds: int) -> int:
    if seeds >= 1:
        return seeds
    expected = "a whole number, at least 1"
    raise LaunchError(
        explain(f"the number of seeds cannot be {seeds}", got=seeds, expected=expected, to_type="--seeds 3")
    )


def trials(question: Question) -> list[Trial]:
    """Return all trials in order, for each seed: single process, single process with global batches, recipes."""
    return [trial for seed in range(question.seeds) for trial in _of_seed(question, seed)]


def _of_seed(question: Question, seed: int) -> list[Trial]:
    splits = question.config.global_batch == "split"  # then the single process is the reference
    sizes = {_replicas(processes, layout) for processes in question.workers for layout in question.layouts}
    counts = [] if splits else sorted(size for size in sizes if size > 1)
    single = f"single-process-seed{seed}"
    with_global_batch = {count: f"single-process-global-batch-{count}-seed{seed}" for count in counts}
    references = {1: single, **with_global_batch}
    trials = [Trial(single, None, 1, 1, seed, with_global_batch[max(counts)] if counts else None)]
    trials += [Trial(with_global_batch[count], None, 1, count, seed, None) for count in counts]
    names, layouts = _folder_names(question.recipes), _folder_names(question.layouts)
    for workers, layout, recipe in itertools.product(question.workers, question.layouts, question.recipes):
        name = f"{names[recipe]}{f'-{layouts[layout]}' * bool(layout)}-n{workers}-seed{seed}"
        reference = references.get(_replicas(workers, layout), single)
        trials.append(Trial(name, recipe, workers, 1, seed, reference, layout))
    return trials


def without_global_batches(all_trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials without baselines of a global batch: a single process is the reference of the others."""
    return [
        dataclasses.replace(trial, reference=f"single-process-seed{trial.seed}" if trial.recipe is not None else None)
        for trial in all_trials
        if trial.global_batch_of == 1
    ]


def _folder_names(recipes: Sequence[str]) -> dict[str, str]:
    """Return a folder name for each recipe or layout; equal names are numbered."""
    names: dict[str, str] = {}
    for recipe in recipes:
        plain = re.sub(r"[^A-Za-z0-9_.]+", "-", recipe).strip("-.")[:LONGEST_NAME] or "recipe"
        same_names = sum(name == plain or name.startswith(f"{plain}~") for name in names.values())
        names[recipe] = f"{plain}~{same_names + 1}" if same_names else plain
    return names
