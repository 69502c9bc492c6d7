"""Transports between workers. Only this package, the launcher and parallel import torch.distributed."""

from stretto.collective_ops import answer
from stretto.transport.interface import Handle, Traffic, Transport

__all__ = ["Handle", "Traffic", "Transport", "answer"]
