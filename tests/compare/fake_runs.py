"""A launcher that trains nothing: it writes the run folders that a real one would."""

from __future__ import annotations

from pathlib import Path

import torch
from report.synthetic_runs import write_run
from safetensors.torch import save_file

from stretto.errors import LaunchError
from stretto.launcher.progress_display import ProgressDisplay
from stretto.run_config import RunConfig


class Pretend:
    """Fake launcher. `failing` names folders whose run fails halfway, `at_once` those of runs that never start."""

    def __init__(self, failing: tuple[str, ...] = (), at_once: tuple[str, ...] = ()) -> None:
        self.failing, self.at_once = failing, at_once
        self.orders: list[RunConfig] = []

    def __call__(self, order: RunConfig, watch: ProgressDisplay) -> Path:
        self.orders.append(order)
        assert order.out is not None
        if order.out.name in self.at_once:
            raise LaunchError("no port to be had")
        recipe = None if order.single_process else order.recipe
        every = 1 if recipe is None or recipe.startswith("allreduce") else 10
        write_run(
            order.out,
            recipe=recipe,
            workers=order.workers,
            global_batch_of=order.global_batch_of,
            seed=order.seed,
            every=every,
            epoch_steps=100 if order.single_process and order.global_batch_of == 1 else 50,
        )
        moved = 1.0 if order.single_process else 1.0 + 0.01 * every
        for place in ("states/00000800", "states/00001600", "final"):
            path = order.out / f"{place}.safetensors"
            path.parent.mkdir(exist_ok=True)
            save_file({"w": moved * torch.ones(4)}, path)
        if order.out.name in self.failing:
            raise LaunchError("worker 1 failed: ValueError: boom\nTraceback")
        return order.out
