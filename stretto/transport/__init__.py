"""How words reach other workers. Only here, in launch and in parallel may torch.distributed be seen."""

from stretto.collective_ops import answer
from stretto.transport.interface import Ticket, Traffic, Wire

__all__ = ["Ticket", "Traffic", "Wire", "answer"]
