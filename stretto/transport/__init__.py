"""How words reach other workers. Only here, in launch and in parallel may torch.distributed be seen."""

from stretto.collective_ops import answer
from stretto.transport.interface import Handle, Traffic, Transport

__all__ = ["Handle", "Traffic", "Transport", "answer"]
