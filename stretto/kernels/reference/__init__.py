"""Reference kernels in torch operations, for any device and float dtype. Other kernels must agree to the bit."""

from stretto.kernels.reference.factorise import factor_errors, factor_steps
from stretto.kernels.reference.index_coding import pack_indices, unpack_indices
from stretto.kernels.reference.quantize import add_quantised, add_sign, noise, quantise, sign_pack
from stretto.kernels.reference.sparsify import (
    add_at,
    take_above,
    take_larger_than_change,
    take_largest,
    take_largest_per_chunk,
    take_threshold,
)

__all__ = [
    "add_at",
    "add_quantised",
    "add_sign",
    "factor_errors",
    "factor_steps",
    "noise",
    "pack_indices",
    "quantise",
    "sign_pack",
    "take_above",
    "take_larger_than_change",
    "take_largest",
    "take_largest_per_chunk",
    "take_threshold",
    "unpack_indices",
]
