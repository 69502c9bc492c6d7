"""Workers that wait for each other in a library's loop: their tensors, and a meeting."""

from __future__ import annotations

from safetensors.torch import load, save
from torch import Tensor

from stretto.api import training
from stretto.identity import barrier
from stretto.training.trainer import Trainer as Training

NAME = "tensor"


def lockstep_training() -> Training | None:
    """Return the training of this worker, if it has others that wait for each other."""
    trainer = training()
    return trainer if trainer is not None and not trainer.strategy.asynchronous else None


def gathered(tensor: Tensor, together: Training | None) -> list[Tensor]:
    """Return the tensors of all workers of a training, of any shapes; this worker's alone outside one."""
    if together is None or together.transport.workers == 1:
        return [tensor]
    own = save({NAME: tensor.detach().cpu().contiguous()})
    return [load(one)[NAME].to(tensor.device) for one in together.transport.all_gather_bytes(own)]


def meet() -> None:
    """Wait for all workers, before the training and in it."""
    if training() is None:
        barrier()
    elif (together := lockstep_training()) is not None:
        together.transport.all_gather_bytes(b"")
