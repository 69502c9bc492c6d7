"""Compiles every kernel in Triton for a GPU, which needs none, and writes what instructions they are made of.

    python compiled.py 90      for compute capability 9.0; one line of JSON: {kernel: {instruction: how often}}

The functions are called as on a GPU, but with `launch` replaced: it compiles instead, with the types and the constants
that Triton would find.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stretto.kernels import gpu
from stretto.kernels.gpu import dense, select
from stretto.kernels.gpu.launch import NUMBERS, options

TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.uint8: "*u8"}
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)", re.MULTILINE)


class Compiler:
    """Stands where `launch` stands."""

    def __init__(self, capability: int) -> None:
        self.found: dict[str, Counter[str]] = {}
        self._target = GPUTarget("cuda", capability, 32)

    def launch(self, kernel: Any, programs: int, *arguments: Any, numbers: int = NUMBERS, **constants: Any) -> None:
        places = kernel.arg_names
        told = dict(zip(places, arguments, strict=False))
        ones = {name: value for name, value in told.items() if isinstance(value, int) and value == 1}
        signature = {name: self._type(value) for name, value in told.items()}
        signature |= dict.fromkeys([*ones, *constants], "constexpr")
        key = f"{kernel.__name__} {constants} {list(signature.values())}"
        if key not in self.found:
            fixed = {(places.index(name),): value for name, value in (ones | constants).items()}
            source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
            done = triton.compile(source, target=self._target, options=options(numbers))
            self.found[key] = Counter(INSTRUCTION.findall(done.asm["ptx"]))

    def _type(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return TYPES[value.dtype]
        return "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"


def call_all() -> None:
    """Every function of the kernels in Triton, so that each kernel is started once at least."""
    x, owed = torch.arange(5000.0), torch.zeros(5000)
    for tau in (gpu.take_above, gpu.take_threshold):
        tau(x, owed, 1.0)
    gpu.take_moved(x, None, x, 0.5)
    gpu.take_largest(x, owed, 1)
    gpu.take_largest_per_chunk(x, owed, 4096, 64)
    gpu.take_largest_per_chunk(x, owed, 64, 1)
    for bucket in (64, 4096):
        packed, scales = gpu.sign_pack(x, owed, bucket, True)
        gpu.add_sign(x, packed, scales, bucket)
    for levels, bucket, norm in ((127, 2048, "max"), (7, 5000, "l2"), (1, 777, "max")):
        packed, scales = gpu.quantise(x, owed, levels, bucket, norm, 2**31)
        gpu.add_quantised(x, packed, scales, levels, bucket)


if __name__ == "__main__":
    compiler = Compiler(int(sys.argv[1]))
    select.launch = dense.launch = compiler.launch
    torch.Tensor.__int__ = lambda self: 3  # a count that no kernel has counted
    call_all()
    print(json.dumps(compiler.found))
