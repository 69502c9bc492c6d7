"""How words reach other workers. Only here, in launch and in parallel may torch.distributed be seen."""

from stretto.wire.seam import Ticket, Traffic, Wire
from stretto.words import answer

__all__ = ["Ticket", "Traffic", "Wire", "answer"]
