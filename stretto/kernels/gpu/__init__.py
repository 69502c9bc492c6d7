"""Kernels for float32 tensors of a GPU: fused passes in Triton, and torch operations where these are as good.

Places are packed by the reference, in torch operations on the device.
"""

from stretto.kernels.gpu.dense import add_quantised, add_sign, quantise, sign_pack
from stretto.kernels.gpu.launch import THERE
from stretto.kernels.gpu.select import take_above, take_largest, take_largest_per_chunk, take_moved, take_threshold
from stretto.kernels.reference import add_at, pack_indices, unpack_indices

__all__ = [
    "THERE",
    "add_at",
    "add_quantised",
    "add_sign",
    "pack_indices",
    "quantise",
    "sign_pack",
    "take_above",
    "take_largest",
    "take_largest_per_chunk",
    "take_moved",
    "take_threshold",
    "unpack_indices",
]
