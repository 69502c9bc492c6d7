"""The start of a section in the event log: the facts of the run, and notices about the recipe and the data."""

from __future__ import annotations

import torch

from stretto.training.effective_batch import batch_of, batches_of, describe
from stretto.training.trainer_view import TrainerView
from stretto.training.worker_context import WorkerContext


def write_start(trainer: TrainerView, context: WorkerContext, factor: float) -> None:
    """Write the start event, and the notices that describe the effective batch and the assignment of a stream.

    `factor` is that on the learning rate.
    """
    recipe, workers, source = trainer.strategy.recipe, trainer.transport.workers, trainer.batch_source
    trainer.events.write(
        "start",
        workers=workers,
        **context.runtime.process_info(),
        device=str(next(trainer.model.parameters(), torch.empty(0, device="cpu")).device),
        threads=torch.get_num_threads(),
        recipe=str(recipe or "single process" if context.single_process else recipe or context.layout),
        servers=recipe.shards if recipe else 0,
        epochs=trainer.evaluator.epoch,
        step=trainer.progress.steps,
        samples=trainer.progress.samples,
        at=round(context.runtime.clock(), 6),
        **({"numbers": True} if isinstance(trainer.loader, range) else {}),
    )
    first = source.first_workers if source.keeps_global_batch else None
    if recipe is not None and (workers > 1 or (first or 1) > 1):
        batch, waits = batch_of(trainer.loader), not recipe.asynchronous
        added = recipe.step_of_all(workers)
        batches = None if source.assignment == "own" else batches_of(trainer.loader)
        line = describe(
            workers,
            batch,
            split=source.splits,
            waits=waits,
            factor=factor,
            added=added,
            batches=batches,
            first=first,
            shares=batches is not None and source.has_share_for_each,
        )
        trainer.events.say(line)
    if not source.is_counted and not (workers == 1 and context.global_batch_of == 1):
        shards = f" ({source.library})" if source.library else ""
        share = f"one batch in {workers}" if recipe is None or not recipe.asynchronous else "the batches that it leases"
        how = (
            f"each worker reads a shard of its own{shards} and keeps all of it"
            if source.assignment == "own"
            else f"all workers read its indices, and each loads {share}"
            if source.is_indexed
            else f"every worker reads all of it and keeps {share}"
        )
        trainer.events.notice(f"the loader is a stream: {how}; how often each sample counted can't be audited")
    trainer.events.flush()
